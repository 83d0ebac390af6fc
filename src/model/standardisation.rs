//! The standardisation of embeddings: each embedding e becomes (e − mean) / deviation.

use tch::{Device, Kind, Tensor};

use super::error::ModelError;

/// The names under which the mean and the standard deviation of the embeddings are saved.
const BUFFERS: [&str; 2] = ["image_mean", "image_std"];

/// The mean and the standard deviation of every dimension of the embeddings.
#[derive(Debug)]
pub struct Standardisation {
    mean_e: Tensor,
    deviation_e: Tensor,
}

impl Standardisation {
    /// Mean 0 and deviation 1, which leave embeddings of this width unchanged.
    pub(crate) fn none(width: i64, options: (Kind, Device)) -> Result<Self, ModelError> {
        Ok(Self { mean_e: Tensor::f_zeros([width], options)?, deviation_e: Tensor::f_ones([width], options)? })
    }

    /// Replaces the mean and the standard deviation.
    pub fn set(&mut self, mean_e: &Tensor, deviation_e: &Tensor) -> Result<(), ModelError> {
        let want = self.mean_e.size();
        for (name, tensor) in BUFFERS.into_iter().zip([mean_e, deviation_e]) {
            if tensor.size() != want {
                return Err(ModelError::shape(name, &tensor.size(), &want));
            }
        }
        let [means, deviations] = [mean_e, deviation_e].map(|tensor| {
            let wide = tensor.f_to_kind(Kind::Double).and_then(|wide| wide.f_to_device(Device::Cpu));
            wide.and_then(Vec::<f64>::try_from)
        });
        let (means, deviations) = (means?, deviations?);
        if let Some(dimension) = means.iter().position(|mean| !mean.is_finite()) {
            let got = means[dimension];
            return Err(ModelError::Bad(format!(
                "mean of embedding dimension {dimension} is {got}, wanted a finite number"
            )));
        }
        // The condition is not written as `deviation <= 0.0`, because NaN must be rejected too.
        let invalid = deviations.iter().position(|deviation| !(*deviation > 0.0 && deviation.is_finite()));
        if let Some(dimension) = invalid {
            let got = deviations[dimension];
            return Err(ModelError::Bad(format!(
                "standard deviation of embedding dimension {dimension} is {got}, wanted a finite number above 0"
            )));
        }
        self.mean_e.f_copy_(mean_e)?;
        Ok(self.deviation_e.f_copy_(deviation_e)?)
    }

    /// Standardises embeddings, one per row. The result has the type of the mean.
    pub fn apply(&self, image_be: &Tensor) -> Result<Tensor, ModelError> {
        let (got, want) = (image_be.size(), self.mean_e.size());
        if got.len() != 2 || got[1..] != want {
            return Err(ModelError::shape("image embedding", &got, &[-1, want[0]]));
        }
        Ok(image_be.f_to_kind(self.mean_e.kind())?.f_sub(&self.mean_e)?.f_div(&self.deviation_e)?)
    }

    /// The mean and the standard deviation, with the names under which they are saved.
    pub fn named(&self) -> Vec<(String, Tensor)> {
        let [mean, deviation] = BUFFERS.map(str::to_owned);
        vec![(mean, self.mean_e.shallow_clone()), (deviation, self.deviation_e.shallow_clone())]
    }

    /// Removes the mean and the standard deviation from the tensors of a checkpoint and returns them. The error is the
    /// name of a missing tensor.
    pub fn take_from(tensors: &mut Vec<(String, Tensor)>) -> Result<[Tensor; 2], &'static str> {
        let mut take = |name: &'static str| {
            let index = tensors.iter().position(|(found, _)| found == name);
            index.map(|index| tensors.remove(index).1).ok_or(name)
        };
        Ok([take(BUFFERS[0])?, take(BUFFERS[1])?])
    }
}
