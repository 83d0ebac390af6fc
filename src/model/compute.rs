//! The device and precision of the network, and its linear layers, whole or split over ranks.
//!
//! Master weights are kept in `kind` (f32, or f64 in tests). Matrix products run in `compute_kind`: either the same, or
//! bf16, to which weights and activations are cast layer by layer.
//!
//! Split layers follow Megatron-LM (Shoeybi et al. 2019, section 3). A column-parallel layer turns a replicated input
//! into this rank's share of the outputs. A row-parallel layer turns shares of the inputs into a replicated output.

use locdiff_core::config::Precision;
use tch::{Device, Kind, Tensor};

use super::error::ModelError;
use crate::comm::{Group, differentiable};

/// Device, precision and tensor-parallel group of a network.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The device. If there is a group, it must be the group's device.
    pub device: Device,
    /// Kind of the master weights: f32, or f64 in tests.
    pub kind: Kind,
    /// Precision of the matrix products.
    pub precision: Precision,
    /// The ranks that the wide layers are split over.
    pub tensor_parallel: Option<Group>,
}

impl Placement {
    /// f32 master weights on one device, not split.
    pub fn on(device: Device, precision: Precision) -> Self {
        Self { device, kind: Kind::Float, precision, tensor_parallel: None }
    }

    /// The dtype of the matrix products.
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

    /// A linear layer with replicated weights, or with a share of the outputs (column-parallel).
    pub(super) fn linear(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor, ModelError> {
        Ok(self.cast(input)?.f_linear(&self.cast(weight)?, Some(self.cast(bias)?))?)
    }

    /// A linear layer whose inputs are divided among ranks. Its bias is added once, after the sum.
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

    /// Returns its input; backward sums the gradient over ranks. Required before a layer that holds a share of the
    /// outputs.
    pub(super) fn sum_gradients(&self, replicated: &Tensor) -> Result<Tensor, ModelError> {
        match self.split() {
            Some(group) if replicated.requires_grad() => Ok(differentiable::copy(group, &replicated.f_contiguous()?)?),
            _ => Ok(replicated.shallow_clone()),
        }
    }

    /// This rank's share of a replicated tensor's last dimension.
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
