//! What the network is made of: every parameter with its name, shape, split and first value.
//!
//! The order of the parameters is part of the format: a parameter's place in it names the random numbers that it starts
//! from. It is the order of `named_parameters` in the PyTorch reference.

use locdiff_core::config::ModelConfig;

use super::split::Split;

/// Width of the sinusoidal time embedding.
pub(super) const TIME_WIDTH: i64 = 200;
/// Standard deviation of the head's first weights.
const HEAD_DEVIATION: f64 = 0.02;

/// The sizes of a CS-UNet.
#[derive(Debug, Clone, PartialEq)]
pub struct Architecture {
    /// Dimensions of the code.
    pub dims: i64,
    /// Width of an image embedding.
    pub embedding_width: i64,
    /// Timesteps T of the diffusion.
    pub timesteps: i64,
    /// Share of activations dropped in training.
    pub dropout: f64,
    widths: [i64; 3],
    bottleneck: Option<i64>,
}

/// The sizes of one C-Siren.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModuleShape {
    pub(super) name: &'static str,
    pub(super) input: i64,
    pub(super) hidden: i64,
    pub(super) output: i64,
}

/// How a parameter begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Init {
    Zero,
    /// Uniform in ± this.
    Uniform(f64),
    /// Normal with this standard deviation.
    Normal(f64),
}

/// One parameter, whole.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Spec {
    pub(super) name: String,
    pub(super) shape: Vec<i64>,
    pub(super) split: Split,
    pub(super) init: Init,
}

impl Architecture {
    /// The network of a checked configuration, for embeddings of a given width and a diffusion of `timesteps`.
    pub fn new(config: &ModelConfig, embedding_width: u32, timesteps: u32) -> Self {
        Self {
            dims: config.kept_dims() as i64,
            embedding_width: i64::from(embedding_width),
            timesteps: i64::from(timesteps),
            dropout: config.dropout,
            widths: config.widths().map(|width| width as i64),
            bottleneck: (config.bottleneck > 0).then_some(i64::from(config.bottleneck)),
        }
    }

    /// The six modules in the order in which they run.
    pub(super) fn modules(&self) -> [ModuleShape; 6] {
        let [a, b, c] = self.widths;
        let module = |name, input, output| {
            let hidden = self.bottleneck.unwrap_or(output);
            ModuleShape { name, input, hidden, output }
        };
        [
            module("down1", self.dims, a),
            module("down2", a, b),
            module("down3", b, c),
            module("up3", c, c),
            module("up2", 2 * c, b),
            module("up1", 2 * b, a),
        ]
    }

    /// Every parameter: ten for each module, two for the head.
    pub(super) fn specs(&self) -> Vec<Spec> {
        let mut specs: Vec<Spec> =
            self.modules().iter().flat_map(|module| module_specs(module, self.embedding_width)).collect();
        let head_input = 2 * self.widths[0];
        specs.extend(linear("out", head_input, self.dims, Split::Columns, Init::Normal(HEAD_DEVIATION), Init::Zero));
        specs
    }

    /// How many numbers the parameters have.
    pub fn parameter_count(&self) -> i64 {
        self.specs().iter().map(|spec| spec.shape.iter().product::<i64>()).sum()
    }
}

/// W_x and W_o as in Siren without ω₀; the last time layer 0, so that every timestep begins alike; the rest as PyTorch.
fn module_specs(module: &ModuleShape, embedding_width: i64) -> Vec<Spec> {
    let ModuleShape { name, input, hidden, output } = *module;
    let layer =
        |layer, from, to, split, weight, bias| linear(&format!("{name}.{layer}"), from, to, split, weight, bias);
    [
        layer("x", input, hidden, Split::Rows, siren(input), usual(input)),
        layer("image", embedding_width, hidden, Split::Rows, usual(embedding_width), usual(embedding_width)),
        layer("out", hidden, output, Split::Columns, siren(hidden), usual(hidden)),
        layer("time.0", TIME_WIDTH, hidden, Split::Replicated, usual(TIME_WIDTH), usual(TIME_WIDTH)),
        layer("time.2", hidden, 2 * hidden, Split::RowHalves, Init::Zero, Init::Zero),
    ]
    .concat()
}

/// Weight and bias of a linear layer. Split by columns, its bias is added after the sum over ranks: replicated.
fn linear(name: &str, from: i64, to: i64, split: Split, weight: Init, bias: Init) -> Vec<Spec> {
    let bias_split = if split == Split::Columns { Split::Replicated } else { split };
    vec![
        Spec { name: format!("{name}.weight"), shape: vec![to, from], split, init: weight },
        Spec { name: format!("{name}.bias"), shape: vec![to], split: bias_split, init: bias },
    ]
}

/// Sitzmann et al., "Implicit neural representations with periodic activation functions", 2020, section 3.2, ω₀ = 1.
fn siren(fan_in: i64) -> Init {
    Init::Uniform((6.0 / fan_in as f64).sqrt())
}

/// PyTorch's own for linear layers.
fn usual(fan_in: i64) -> Init {
    Init::Uniform(1.0 / (fan_in as f64).sqrt())
}
