//! Where and in which numbers the network computes, and its linear layers, whole or split over ranks.
//!
//! Weights are masters in their own kind (f32, or f64 in tests). Products run in `compute_kind`: the masters' own, or
//! bf16, to which weights and activations are cast layer by layer.
//!
//! Split (Megatron-LM, Shoeybi et al. 2019, section 3): a column-parallel layer turns a replicated input into this rank's
//! share of the outputs, a row-parallel layer turns shares of the inputs into a replicated output.

use locdiff_core::config::Precision;
use tch::{Device, Kind, Tensor};

use super::error::ModelError;
use crate::comm::{Group, differentiable};

/// Where the network lives.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Its device; that of the group, where there is one.
    pub device: Device,
    /// Kind of the master weights: f32, or f64 in tests.
    pub kind: Kind,
    /// Numbers in which matrices are multiplied.
    pub precision: Precision,
    /// The ranks that share the wide layers.
    pub tensor_parallel: Option<Group>,
}

impl Placement {
    /// f32 masters on one device, not split.
    pub fn on(device: Device, precision: Precision) -> Self {
        Self { device, kind: Kind::Float, precision, tensor_parallel: None }
    }

    /// The kind in which products run.
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

    /// An ordinary layer: of replicated weights, or of a share of the outputs.
    pub(super) fn linear(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor, ModelError> {
        Ok(self.cast(input)?.f_linear(&self.cast(weight)?, Some(self.cast(bias)?))?)
    }

    /// A layer whose inputs are divided among ranks. Its bias is added once, after the sum.
    pub(super) fn linear_reduced(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor, ModelError> {
        let Some(group) = self.split() else { return self.linear(input, weight, bias) };
        let share = self.cast(input)?.f_linear(&self.cast(weight)?, None::<Tensor>)?;
        Ok(differentiable::reduce(group, &share)?.f_add(&self.cast(bias)?)?)
    }

    /// Before a layer that holds a share of the outputs: backward sums the shares of the gradient.
    pub(super) fn shared_out(&self, replicated: &Tensor) -> Result<Tensor, ModelError> {
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
