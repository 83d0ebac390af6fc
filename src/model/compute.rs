//! The device and precision of the network, and its linear layers, which may be split over ranks.
//!
//! Master weights have the type [`Placement::kind`] (f32, or f64 in tests). Matrix products use the type
//! [`Placement::compute_kind`]: either the type of the master weights, or bf16. For bf16, weights and activations are
//! converted layer by layer.
//!
//! Split layers follow Megatron-LM (Shoeybi et al. 2019, section 3). A column-parallel layer takes an input that is the
//! same on every rank and computes this rank's share of the outputs. A row-parallel layer takes this rank's share of
//! the inputs and computes an output that is the same on every rank.

use locdiff_core::config::Precision;
use tch::{Device, Kind, Tensor};

use super::error::ModelError;
use crate::comm::{Group, differentiable};

/// Device, precision and tensor-parallel group of a network.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The device of the network. If `tensor_parallel` is set, this must be the device of that group.
    pub device: Device,
    /// Type of the master weights: f32, or f64 in tests.
    pub kind: Kind,
    /// Precision of the matrix products.
    pub precision: Precision,
    /// The group of ranks over which the wide layers are split. `None` if they are not split.
    pub tensor_parallel: Option<Group>,
}

impl Placement {
    /// Places a network on one device, with f32 master weights and without tensor parallelism.
    pub fn on(device: Device, precision: Precision) -> Self {
        Self { device, kind: Kind::Float, precision, tensor_parallel: None }
    }

    /// The type of the matrix products. `Precision::Auto` means bf16 for f32 master weights on CUDA, and otherwise the
    /// type of the master weights.
    pub fn compute_kind(&self) -> Kind {
        match self.precision {
            Precision::Auto if self.device.is_cuda() && self.kind == Kind::Float => Kind::BFloat16,
            Precision::Auto | Precision::F32 => self.kind,
            Precision::Bf16 => Kind::BFloat16,
        }
    }

    pub(super) fn cast(&self, tensor: &Tensor) -> Result<Tensor, ModelError> {
        let kind = self.compute_kind();
        if tensor.kind() == kind { Ok(tensor.shallow_clone()) } else { Ok(tensor.f_to_kind(kind)?) }
    }

    /// Applies a linear layer. `weight` and `bias` cover all outputs of the layer or, in a column-parallel layer,
    /// only this rank's share of the outputs.
    pub(super) fn linear(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor, ModelError> {
        Ok(self.cast(input)?.f_linear(&self.cast(weight)?, Some(self.cast(bias)?))?)
    }

    /// Applies a row-parallel linear layer. Each rank holds a share of the inputs and of the weights. The products are
    /// summed over ranks, and then `bias` is added once.
    pub(super) fn row_parallel_linear(
        &self,
        input: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Some(group) = self.split() else { return self.linear(input, weight, bias) };
        let share = self.cast(input)?.f_linear(&self.cast(weight)?, None::<Tensor>)?;
        Ok(differentiable::reduce(group, &share)?.f_add(&self.cast(bias)?)?)
    }

    /// Returns its input, and sums the gradient over ranks in the backward pass. If the input of a column-parallel
    /// layer needs a gradient, the input must pass through this function.
    pub(super) fn sum_gradients(&self, replicated: &Tensor) -> Result<Tensor, ModelError> {
        match self.split() {
            Some(group) if replicated.requires_grad() => Ok(differentiable::copy(group, &replicated.f_contiguous()?)?),
            _ => Ok(replicated.shallow_clone()),
        }
    }

    /// This rank's share of the last dimension of a tensor that is the same on every rank.
    pub(super) fn own_share(&self, replicated: &Tensor) -> Result<Tensor, ModelError> {
        match self.split() {
            Some(group) => Ok(differentiable::split(group, &replicated.f_contiguous()?, -1)?),
            None => Ok(replicated.shallow_clone()),
        }
    }

    fn split(&self) -> Option<&Group> {
        self.tensor_parallel.as_ref().filter(|group| group.size() > 1)
    }
}
