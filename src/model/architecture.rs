//! The parameters of the network: the name, shape, split and initial distribution of each parameter.
//!
//! The order of the parameters must not change, because the index of a parameter selects the random numbers of its
//! initial values. The order is the same as that of `named_parameters` in the PyTorch reference implementation.

use locdiff_core::config::ModelConfig;

use super::split::Split;

/// Width of the sinusoidal time embedding.
pub(super) const TIME_WIDTH: i64 = 200;
/// Standard deviation of the initial weights of the head, the last layer of the network.
const HEAD_DEVIATION: f64 = 0.02;

/// The sizes of a CS-UNet.
#[derive(Debug, Clone, PartialEq)]
pub struct Architecture {
    /// Number of dimensions of a code.
    pub dims: i64,
    /// Width of an image embedding.
    pub embedding_width: i64,
    /// Number of timesteps of the diffusion.
    pub timesteps: i64,
    /// Fraction of activations dropped in training.
    pub dropout: f64,
    widths: [i64; 3],
    bottleneck: Option<i64>,
}

/// The sizes of one C-Siren.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleShape {
    /// Name of the module. The names of the module's parameters begin with this name.
    pub name: &'static str,
    /// Width of the input.
    pub input: i64,
    /// Width of the hidden values.
    pub hidden: i64,
    /// Width of the output.
    pub output: i64,
}

/// Distribution of a parameter's initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Init {
    Zero,
    /// All values are equal.
    Constant(f64),
    /// Uniform between −b and +b. The field is b.
    Uniform(f64),
    /// Normal with mean 0. The field is the standard deviation.
    Normal(f64),
}

/// One whole parameter, before it is split over ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) split: Split,
    pub(crate) init: Init,
}

impl Architecture {
    /// The architecture for a validated configuration, image embeddings of width `embedding_width`, and a diffusion
    /// with `timesteps` timesteps.
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
    pub fn modules(&self) -> [ModuleShape; 6] {
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

    /// All parameters: ten for each module, and two for the head.
    pub(super) fn specs(&self) -> Vec<Spec> {
        let mut specs: Vec<Spec> =
            self.modules().iter().flat_map(|module| module_specs(module, self.embedding_width)).collect();
        let head_input = 2 * self.widths[0];
        specs.extend(linear("out", head_input, self.dims, Split::Columns, Init::Normal(HEAD_DEVIATION), Init::Zero));
        specs
    }

    /// Total number of elements of all weights and biases.
    pub fn parameter_count(&self) -> i64 {
        self.specs().iter().map(|spec| spec.shape.iter().product::<i64>()).sum()
    }
}

/// The ten parameters of one module. The weights of the layers `x` and `out` are initialised as in Siren with ω₀ = 1.
/// The layer `time.2` is initialised to 0, so that at first the timestep has no influence. All other parameters are
/// initialised as in PyTorch.
fn module_specs(module: &ModuleShape, embedding_width: i64) -> Vec<Spec> {
    let ModuleShape { name, input, hidden, output } = *module;
    let layer =
        |layer, from, to, split, weight, bias| linear(&format!("{name}.{layer}"), from, to, split, weight, bias);
    [
        layer("x", input, hidden, Split::Rows, siren_init(input), pytorch_init(input)),
        layer(
            "image",
            embedding_width,
            hidden,
            Split::Rows,
            pytorch_init(embedding_width),
            pytorch_init(embedding_width),
        ),
        layer("out", hidden, output, Split::Columns, siren_init(hidden), pytorch_init(hidden)),
        layer("time.0", TIME_WIDTH, hidden, Split::Replicated, pytorch_init(TIME_WIDTH), pytorch_init(TIME_WIDTH)),
        layer("time.2", hidden, 2 * hidden, Split::RowHalves, Init::Zero, Init::Zero),
    ]
    .concat()
}

/// The weight and the bias of a linear layer. The bias is split like the weight, with one exception: if the weight is
/// split by columns, the bias is added after the sum over ranks, so every rank holds the whole bias.
fn linear(name: &str, from: i64, to: i64, split: Split, weight: Init, bias: Init) -> Vec<Spec> {
    let bias_split = if split == Split::Columns { Split::Replicated } else { split };
    vec![
        Spec { name: format!("{name}.weight"), shape: vec![to, from], split, init: weight },
        Spec { name: format!("{name}.bias"), shape: vec![to], split: bias_split, init: bias },
    ]
}

/// Siren's initial weights with ω₀ = 1 (Sitzmann et al., "Implicit neural representations with periodic activation
/// functions", 2020, section 3.2).
fn siren_init(fan_in: i64) -> Init {
    Init::Uniform((6.0 / fan_in as f64).sqrt())
}

/// PyTorch's default initialisation of the weights and biases of a linear layer.
fn pytorch_init(fan_in: i64) -> Init {
    Init::Uniform(1.0 / (fan_in as f64).sqrt())
}

/// The weight and the bias of a linear layer that is not split, with PyTorch's initial values.
pub(crate) fn linear_layer(name: &str, from: i64, to: i64) -> Vec<Spec> {
    linear(name, from, to, Split::Replicated, pytorch_init(from), pytorch_init(from))
}
