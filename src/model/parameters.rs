//! The weights: a flat, ordered list of named tensors, with the part of each that this tensor-parallel rank holds.
//!
//! Invariant: on every rank the order is that of the architecture.

use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::architecture::{Init, Spec};
use super::error::ModelError;
use super::split::Split;
use crate::comm::Group;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// One parameter of the network, as this rank holds it.
#[derive(Debug)]
pub struct Parameter {
    /// Name in the PyTorch reference.
    pub name: String,
    /// A leaf that requires a gradient.
    pub tensor: Tensor,
    /// Which part of the whole parameter this rank holds.
    pub split: Split,
}

/// All parameters, in the order of the architecture.
#[derive(Debug)]
pub struct Parameters {
    list: Vec<Parameter>,
    rank: i64,
    ranks: i64,
}

impl Parameters {
    /// Draws the initial values. They are drawn whole and then cut, so that they do not depend on the layout of ranks.
    pub(super) fn initial(
        specs: Vec<Spec>,
        philox: Philox,
        (kind, device): (Kind, Device),
        group: Option<&Group>,
    ) -> Result<Self, ModelError> {
        let (rank, ranks) = group.map_or((0, 1), |group| (i64::from(group.rank()), i64::from(group.size())));
        let mut list = Vec::with_capacity(specs.len());
        for (index, Spec { name, shape, split, init }) in specs.into_iter().enumerate() {
            let whole = draw(philox, index as u64, &shape, init)?;
            let tensor = split.piece(&name, &whole, rank, ranks)?;
            let tensor = contiguous_copy(&tensor, kind, device)?.f_set_requires_grad(true)?;
            list.push(Parameter { name, tensor, split });
        }
        Ok(Self { list, rank, ranks })
    }

    /// Iterates over the parameters in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Parameter> {
        self.list.iter()
    }

    /// Handles to the tensors, in order. The optimiser updates them in place.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.list.iter().map(|parameter| parameter.tensor.shallow_clone()).collect()
    }

    /// Gathers tensors that are split like the weights, such as their moving averages, and returns them whole with
    /// their names, in order. If the network is split, this is a collective of its `group`.
    pub fn gather_whole(&self, tensors: &[Tensor], group: Option<&Group>) -> Result<Vec<(String, Tensor)>, ModelError> {
        let _without_gradients = tch::no_grad_guard();
        let whole = |parameter: &Parameter, tensor: &Tensor| {
            let tensor = tensor.f_detach()?;
            let Some(group) = group.filter(|_| parameter.split != Split::Replicated) else { return Ok(tensor) };
            parameter.split.whole(&group.all_gather(&tensor.f_contiguous()?)?.f_unbind(0)?)
        };
        let both = self.list.iter().zip(tensors);
        both.map(|(parameter, tensor)| Ok((parameter.name.clone(), whole(parameter, tensor)?))).collect()
    }

    /// Loads the values of whole tensors, which must have exactly the names of the parameters. Converts dtype and
    /// device.
    ///
    /// Changes nothing unless every name and shape fits.
    pub fn load(&mut self, tensors: &[(String, Tensor)]) -> Result<(), ModelError> {
        let _without_gradients = tch::no_grad_guard();
        for (parameter, piece) in self.list.iter().zip(self.pieces(tensors)?) {
            parameter.tensor.shallow_clone().f_copy_(&piece)?;
        }
        Ok(())
    }

    /// The parts of whole tensors that this rank holds, in order. The names must be exactly those of the parameters.
    pub fn pieces(&self, tensors: &[(String, Tensor)]) -> Result<Vec<Tensor>, ModelError> {
        if let Some((name, _)) = tensors.iter().find(|(name, _)| self.list.iter().all(|own| own.name != *name)) {
            return Err(ModelError::Bad(format!("unknown tensor `{name}`: the network has no such parameter")));
        }
        self.list.iter().map(|parameter| self.piece_for(parameter, tensors)).collect()
    }

    /// The tensor at an index in the order of the architecture.
    pub(super) fn at(&self, index: usize) -> &Tensor {
        &self.list[index].tensor
    }

    fn piece_for(&self, parameter: &Parameter, tensors: &[(String, Tensor)]) -> Result<Tensor, ModelError> {
        let found = tensors.iter().find(|(name, _)| *name == parameter.name);
        let missing = || ModelError::Bad(format!("missing tensor `{}`", parameter.name));
        let (name, whole) = found.ok_or_else(missing)?;
        let want = parameter.tensor.size();
        if whole.dim() != want.len() {
            return Err(ModelError::shape(name, &whole.size(), &want));
        }
        let piece = parameter.split.piece(name, whole, self.rank, self.ranks)?;
        if piece.size() != want {
            return Err(ModelError::shape(name, &piece.size(), &want));
        }
        Ok(piece)
    }
}

/// Draws the whole parameter with the given index, on the CPU in f32.
fn draw(philox: Philox, index: u64, shape: &[i64], init: Init) -> Result<Tensor, ModelError> {
    let elements = shape.iter().product::<i64>() as usize;
    let rows = RowDraw { stream: Stream::Weights, step: Step::At(0), first_sample: index, samples: 1, elements };
    let flat = match init {
        Init::Zero => Tensor::f_zeros([elements as i64], (Kind::Float, Device::Cpu))?,
        Init::Uniform(bound) => philox.uniform(Device::Cpu, rows)?.f_mul_scalar(2.0 * bound)?.f_sub_scalar(bound)?,
        Init::Normal(deviation) => philox.normal(Device::Cpu, rows)?.f_mul_scalar(deviation)?,
    };
    Ok(flat.f_view(shape)?)
}

/// A contiguous copy that shares no memory.
fn contiguous_copy(tensor: &Tensor, kind: Kind, device: Device) -> Result<Tensor, ModelError> {
    let mut copy = Tensor::f_empty(tensor.size(), (kind, device))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
