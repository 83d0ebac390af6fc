//! The parameters in one flat buffer.
//!
//! The weights, their moving average, both moments, the rounded weights and the gradient each have one buffer with the
//! same layout, so that a single kernel can update all parameters. Layers that multiply the same input are adjacent and
//! form one matrix. There are two such matrices: the image layers of all modules, and the first of the time layers of
//! all modules. The other weights are in the order of the modules, so that the gradients of a module can be reduced as
//! soon as its backward pass is done.

use std::ops::Range;

use tch::Tensor;

use crate::model::{ModuleShape, Parameters};
use crate::train::error::TrainError;

/// Number of parameters of a module.
const OF_MODULE: usize = 10;
// Positions of the weights in the parameters of a module. Each bias follows its weight.
const X: usize = 0;
const IMAGE: usize = 2;
const OUT: usize = 4;
const TIME_IN: usize = 6;
const TIME_OUT: usize = 8;
/// Each group begins at a multiple of this many elements. In bf16, this many elements take 128 bytes.
const ALIGNMENT: i64 = 64;

/// Where each parameter lies in a flat buffer.
#[derive(Debug)]
pub(super) struct FlatLayout {
    modules: Vec<ModuleShape>,
    /// Position and shape of each parameter, in the order of the parameters.
    slots: Vec<(i64, Vec<i64>)>,
    /// Number of elements, with padding.
    pub(super) elements: i64,
    /// The parts of the gradient, in the order in which the backward pass completes them: the head, the modules from
    /// last to first, then the image and time layers and all biases.
    pub(super) arrivals: Vec<Vec<Range<i64>>>,
}

/// Weight and bias of a linear layer, as views of a flat buffer.
#[derive(Debug)]
pub(super) struct FlatLinear {
    pub(super) weight: Tensor,
    pub(super) bias: Tensor,
}

/// The layers of the network, as views of a flat buffer.
#[derive(Debug)]
pub(super) struct Layers {
    /// The image layers of all modules.
    pub(super) image: FlatLinear,
    /// The first time layers of all modules.
    pub(super) time_in: FlatLinear,
    pub(super) modules: Vec<ModuleLayers>,
    pub(super) head: FlatLinear,
    /// The biases of the output layers of all modules.
    pub(super) out_biases: Tensor,
}

/// The layers of one module, as views of a flat buffer.
#[derive(Debug)]
pub(super) struct ModuleLayers {
    pub(super) x: FlatLinear,
    pub(super) out: FlatLinear,
    pub(super) time_out: FlatLinear,
    /// The part of the biases of all image layers that belongs to this module.
    pub(super) image_bias: Tensor,
}

impl FlatLayout {
    pub(super) fn new(modules: Vec<ModuleShape>, parameters: &Parameters) -> Self {
        let shapes: Vec<Vec<i64>> = parameters.iter().map(|parameter| parameter.tensor.size()).collect();
        let numbers = |part: usize| (0..modules.len()).map(|module| module * OF_MODULE + part).collect::<Vec<_>>();
        let head = modules.len() * OF_MODULE;
        let mut groups = vec![numbers(IMAGE), numbers(TIME_IN)];
        for module in 0..modules.len() {
            groups.extend([X, OUT, TIME_OUT].map(|part| vec![module * OF_MODULE + part]));
        }
        groups.push(vec![head]);
        groups.extend([IMAGE, TIME_IN, X, OUT, TIME_OUT].map(|part| numbers(part + 1)));
        groups.push(vec![head + 1]);
        let (mut slots, mut end, mut starts) = (vec![(0, Vec::new()); shapes.len()], 0, Vec::new());
        for group in &groups {
            end = round_up(end);
            starts.push(end);
            for index in group {
                slots[*index] = (end, shapes[*index].clone());
                end += shapes[*index].iter().product::<i64>();
            }
        }
        let elements = round_up(end);
        starts.push(elements);
        let of_groups = |groups: Range<usize>| starts[groups.start]..starts[groups.end];
        let (first, head_group) = (2, 2 + 3 * modules.len());
        let mut arrivals = vec![vec![of_groups(head_group..head_group + 1)]];
        arrivals.extend((0..modules.len()).rev().map(|module| {
            let group = first + 3 * module;
            vec![of_groups(group..group + 3)]
        }));
        arrivals.push(vec![of_groups(0..first), of_groups(head_group + 1..groups.len())]);
        Self { modules, slots, elements, arrivals }
    }

    /// Views of all parameters in `flat`, in the order of the parameters.
    pub(super) fn parameters(&self, flat: &Tensor) -> Result<Vec<Tensor>, TrainError> {
        self.slots.iter().map(|(at, shape)| view(flat, *at, shape)).collect()
    }

    /// Views of all layers in `flat`.
    pub(super) fn layers(&self, flat: &Tensor) -> Result<Layers, TrainError> {
        let hidden: i64 = self.modules.iter().map(|module| module.hidden).sum();
        let output: i64 = self.modules.iter().map(|module| module.output).sum();
        let one = |index: usize| view(flat, self.slots[index].0, &self.slots[index].1);
        let linear = |index: usize| Ok::<_, TrainError>(FlatLinear { weight: one(index)?, bias: one(index + 1)? });
        let joined = |part: usize| {
            let (at, shape) = &self.slots[part];
            let weight = view(flat, *at, &[hidden, shape[1]])?;
            Ok::<_, TrainError>(FlatLinear { weight, bias: view(flat, self.slots[part + 1].0, &[hidden])? })
        };
        let module = |index: usize| {
            let first = index * OF_MODULE;
            Ok::<_, TrainError>(ModuleLayers {
                x: linear(first + X)?,
                out: linear(first + OUT)?,
                time_out: linear(first + TIME_OUT)?,
                image_bias: one(first + IMAGE + 1)?,
            })
        };
        Ok(Layers {
            image: joined(IMAGE)?,
            time_in: joined(TIME_IN)?,
            modules: (0..self.modules.len()).map(module).collect::<Result<_, _>>()?,
            head: linear(self.modules.len() * OF_MODULE)?,
            out_biases: view(flat, self.slots[OUT + 1].0, &[output])?,
        })
    }
}

fn round_up(elements: i64) -> i64 {
    elements.cast_unsigned().next_multiple_of(ALIGNMENT.cast_unsigned()).cast_signed()
}

fn view(flat: &Tensor, at: i64, shape: &[i64]) -> Result<Tensor, TrainError> {
    Ok(flat.f_narrow(0, at, shape.iter().product())?.f_view(shape)?)
}
