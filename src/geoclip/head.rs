//! GeoCLIP's image head: maps a CLIP ViT-L/14 feature into the embedding space of places. Layers: 768-768-ReLU-512.
//!
//! Frozen, f32. The logit of an image and a place is `exp(logit_scale)` times the cosine of their embeddings.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::error::GeoclipError;
use super::location::{Linear, take};
use super::{EMBEDDING_WIDTH, FEATURE_WIDTH};

/// Maps CLIP features of images into GeoCLIP's embedding space.
#[derive(Debug)]
pub struct GeoclipHead {
    first: Linear,
    second: Linear,
    logit_scale: f64,
}

impl GeoclipHead {
    /// Takes the tensors that have GeoCLIP's names with the prefix `image.`, and `logit_scale`.
    pub fn new(tensors: &HashMap<String, Tensor>, device: Device) -> Result<Self, GeoclipError> {
        let (features, width) = (FEATURE_WIDTH as i64, EMBEDDING_WIDTH as i64);
        let logit_scale = take(tensors, "logit_scale", &[], Device::Cpu)?.f_double_value(&[])?;
        Ok(Self {
            first: Linear::take(tensors, "image.0", features, features, device)?,
            second: Linear::take(tensors, "image.2", features, width, device)?,
            logit_scale,
        })
    }

    /// Embeddings `[n, 512]` of CLIP features `[n, 768]`, not normalised.
    pub fn encode(&self, features: &Tensor) -> Result<Tensor, GeoclipError> {
        tch::no_grad(|| self.second.forward(&self.first.forward(features)?.f_relu_()?))
    }

    /// The factor from cosines to logits: `exp(logit_scale)`.
    pub fn logit_factor(&self) -> f64 {
        self.logit_scale.exp()
    }
}
