//! The map from the look of a view (the vector that a world draws for it) to the embedding that is stored. It is
//! computed on the device, in f32.
// Letters in tensor names: n looks, l width of a look, h hidden width, e width of a stored embedding.

use tch::Tensor;

use crate::shards::ShardsError;

/// Maps looks to stored embeddings.
#[derive(Debug)]
pub(super) enum LookMap {
    /// `e = W l`.
    Linear { weight_le: Tensor },
    /// `e = W₂ relu(W₁ l + b)`.
    Relu { first_lh: Tensor, bias_h: Tensor, second_he: Tensor },
}

impl LookMap {
    /// Another handle to the same tensors, for use in another thread.
    pub(super) fn share(&self) -> Self {
        match self {
            Self::Linear { weight_le } => Self::Linear { weight_le: weight_le.shallow_clone() },
            Self::Relu { first_lh, bias_h, second_he } => Self::Relu {
                first_lh: first_lh.shallow_clone(),
                bias_h: bias_h.shallow_clone(),
                second_he: second_he.shallow_clone(),
            },
        }
    }

    /// Width of a look.
    pub(super) fn look_width(&self) -> usize {
        let (Self::Linear { weight_le: weight } | Self::Relu { first_lh: weight, .. }) = self;
        weight.size()[0] as usize
    }

    /// The embeddings of looks `[n, l]`.
    pub(super) fn apply(&self, looks_nl: &Tensor) -> Result<Tensor, ShardsError> {
        Ok(match self {
            Self::Linear { weight_le } => looks_nl.f_matmul(weight_le)?,
            Self::Relu { first_lh, bias_h, second_he } => {
                looks_nl.f_matmul(first_lh)?.f_add_(bias_h)?.f_relu_()?.f_matmul(second_he)?
            }
        })
    }
}
