//! The weights: a flat, ordered list of named tensors. The list holds this tensor-parallel rank's part of each tensor.
//!
//! Invariant: every rank lists the parameters in the order in which `architecture` defines them.

use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::architecture::{Init, Spec};
use super::error::ModelError;
use super::split::Split;
use crate::comm::Group;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// The part of one network parameter that this rank holds.
#[derive(Debug)]
pub struct Parameter {
    /// Name of the parameter in the PyTorch reference implementation.
    pub name: String,
    /// The values of this part. A leaf tensor that requires a gradient, unless [`Parameters::move_into`] replaced it.
    pub tensor: Tensor,
    /// How the whole parameter is split over ranks.
    pub split: Split,
}

/// All parameters of the network, in the order in which `architecture` defines them.
#[derive(Debug)]
pub struct Parameters {
    list: Vec<Parameter>,
    rank: i64,
    ranks: i64,
}

impl Parameters {
    /// Draws the initial values. Every rank draws the whole parameter and then takes its part, so that the values do
    /// not depend on the number of ranks.
    pub(crate) fn initial(
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

    /// Iterates over the parameters in the order of the list.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Parameter> {
        self.list.iter()
    }

    /// Number of values of all parameters, over all ranks of the replica.
    pub fn count(&self) -> usize {
        let copies = |split: Split| if split == Split::Replicated { 1 } else { self.ranks as usize };
        self.list.iter().map(|parameter| copies(parameter.split) * parameter.tensor.numel()).sum()
    }

    /// The tensors of all parameters, in the order of the list. They share memory with the parameters, so that the
    /// optimiser can update the parameters in place.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.list.iter().map(|parameter| parameter.tensor.shallow_clone()).collect()
    }

    /// Moves the values into `places`, which become the tensors of the parameters. `places` holds one tensor per
    /// parameter, in the order of the list and with the shape of the parameter. Afterwards, autograd computes no
    /// gradients for the parameters.
    pub fn move_into(&mut self, places: Vec<Tensor>) -> Result<(), ModelError> {
        let _without_gradients = tch::no_grad_guard();
        for (parameter, mut place) in self.list.iter_mut().zip(places) {
            place.f_copy_(&parameter.tensor)?;
            parameter.tensor = place;
        }
        Ok(())
    }

    /// Gathers whole tensors and returns each with the name of its parameter. `tensors` holds one tensor per parameter,
    /// in the order of the parameters, for example the moving averages. Each is this rank's part, split like the
    /// parameter. If the network is split, `group` must be its tensor-parallel group, and every rank of the group must
    /// call this. Without `group`, the tensors are returned unchanged.
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

    /// Copies this rank's part of each unsplit tensor in `tensors` into the parameter of the same name. The parameters
    /// keep their types and devices. `tensors` must contain exactly one tensor for every parameter.
    ///
    /// If a name or a shape does not match, this returns an error and changes nothing.
    pub fn load(&mut self, tensors: &[(String, Tensor)]) -> Result<(), ModelError> {
        let _without_gradients = tch::no_grad_guard();
        for (parameter, piece) in self.list.iter().zip(self.pieces(tensors)?) {
            parameter.tensor.shallow_clone().f_copy_(&piece)?;
        }
        Ok(())
    }

    /// This rank's part of each unsplit tensor in `tensors`, in the order of the list. `tensors` must contain exactly
    /// one tensor for every parameter.
    pub fn pieces(&self, tensors: &[(String, Tensor)]) -> Result<Vec<Tensor>, ModelError> {
        if let Some((name, _)) = tensors.iter().find(|(name, _)| self.list.iter().all(|own| own.name != *name)) {
            return Err(ModelError::Bad(format!("unknown tensor `{name}`: the network has no such parameter")));
        }
        self.list.iter().map(|parameter| self.piece_for(parameter, tensors)).collect()
    }

    /// The tensor of the parameter at position `index` of the list.
    pub(crate) fn at(&self, index: usize) -> &Tensor {
        &self.list[index].tensor
    }

    fn piece_for(&self, parameter: &Parameter, tensors: &[(String, Tensor)]) -> Result<Tensor, ModelError> {
        let found = tensors.iter().find(|(name, _)| *name == parameter.name);
        let missing = || {
            ModelError::Bad(format!("missing tensor `{}`: the network has a parameter of this name", parameter.name))
        };
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

/// Draws the whole parameter at position `index` of the list, on the CPU in f32.
fn draw(philox: Philox, index: u64, shape: &[i64], init: Init) -> Result<Tensor, ModelError> {
    let elements = shape.iter().product::<i64>() as usize;
    let rows = RowDraw { stream: Stream::Weights, step: Step::At(0), first_sample: index, samples: 1, elements };
    let flat = match init {
        Init::Zero => Tensor::f_zeros([elements as i64], (Kind::Float, Device::Cpu))?,
        Init::Constant(value) => Tensor::f_full([elements as i64], value, (Kind::Float, Device::Cpu))?,
        Init::Uniform(bound) => philox.uniform(Device::Cpu, rows)?.f_mul_scalar(2.0 * bound)?.f_sub_scalar(bound)?,
        Init::Normal(deviation) => philox.normal(Device::Cpu, rows)?.f_mul_scalar(deviation)?,
    };
    Ok(flat.f_view(shape)?)
}

/// A contiguous copy that shares no memory with `tensor`.
fn contiguous_copy(tensor: &Tensor, kind: Kind, device: Device) -> Result<Tensor, ModelError> {
    let mut copy = Tensor::f_empty(tensor.size(), (kind, device))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
