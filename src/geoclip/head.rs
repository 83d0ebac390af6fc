//! GeoCLIP's image head: a CLIP ViT-L/14 feature into the space of places, 768-768-ReLU-512.
//!
//! Frozen, f32. The logit of an image and a place is `exp(logit_scale)` times the cosine of their embeddings.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::error::GeoclipError;
use super::location::{Linear, take};
use super::{EMBEDDING_WIDTH, FEATURE_WIDTH};

/// Images into GeoCLIP's space.
#[derive(Debug)]
pub struct ImageHead {
    first: Linear,
    second: Linear,
    logit_scale: f64,
}

impl ImageHead {
    /// The head of these tensors, by GeoCLIP's names behind `image.`.
    pub fn new(tensors: &HashMap<String, Tensor>, device: Device) -> Result<Self, GeoclipError> {
        let (features, width) = (FEATURE_WIDTH as i64, EMBEDDING_WIDTH as i64);
        let logit_scale = take(tensors, "logit_scale", &[], Device::Cpu)?.f_double_value(&[])?;
        Ok(Self {
            first: Linear::take(tensors, "image.0", features, features, device)?,
            second: Linear::take(tensors, "image.2", features, width, device)?,
            logit_scale,
        })
    }

    /// GeoCLIP's own output for CLIP features `[n, 768]`: `[n, 512]`, not normalised.
    pub fn encode(&self, features: &Tensor) -> Result<Tensor, GeoclipError> {
        tch::no_grad(|| self.second.forward(&self.first.forward(features)?.f_relu_()?))
    }

    /// What cosines are multiplied by: `exp(logit_scale)`.
    pub fn logit_factor(&self) -> f64 {
        self.logit_scale.exp()
    }
}
