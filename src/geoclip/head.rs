//! GeoCLIP's image head maps a CLIP ViT-L/14 feature of width 768 into the embedding space of places. It has a linear
//! layer of width 768, a ReLU, and a linear layer of width 512.
//!
//! The weights are frozen and in f32. The logit of an image and a place is `exp(logit_scale)` times the cosine of their
//! embeddings.

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
    /// Creates the head from the tensor `logit_scale` and the tensors whose names begin with `image.`.
    pub fn new(tensors: &HashMap<String, Tensor>, device: Device) -> Result<Self, GeoclipError> {
        let (features, width) = (FEATURE_WIDTH as i64, EMBEDDING_WIDTH as i64);
        let logit_scale = take(tensors, "logit_scale", &[], Device::Cpu)?.f_double_value(&[])?;
        Ok(Self {
            first: Linear::take(tensors, "image.0", features, features, device)?,
            second: Linear::take(tensors, "image.2", features, width, device)?,
            logit_scale,
        })
    }

    /// The unnormalised embeddings `[n, 512]` of CLIP features `[n, 768]`.
    pub fn encode(&self, features: &Tensor) -> Result<Tensor, GeoclipError> {
        tch::no_grad(|| self.second.forward(&self.first.forward(features)?.f_relu_()?))
    }

    /// The factor `exp(logit_scale)`, which turns a cosine into a logit.
    pub fn logit_factor(&self) -> f64 {
        self.logit_scale.exp()
    }
}
