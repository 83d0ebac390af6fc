//! C-Siren: a sine layer. Its hidden values are scaled and shifted depending on the timestep, and shifted depending on
//! the image.
//!
//! ```text
//! h = (1 + scale_t) ⊙ (W_x x) + shift_t + W_I e,    out = dropout(sin(W_o h))
//! (scale_t, shift_t) = W_2 silu(W_0 τ(t))
//! ```
//!
//! Here x is the input, h the hidden values, e the embedding of the image, and τ(t) the sinusoidal embedding of
//! timestep t. The formulas leave out biases.
//!
//! If the layer is split over ranks, each rank holds a share of h, and computes only its share of W_x x, W_I e, scale_t
//! and shift_t. The products with W_o are summed over ranks. x, the output and the dropout mask are the same on every
//! rank.
// Letters in tensor names: b batch, i input, h hidden (this rank's share), o output, e embedding, t timesteps.

use locdiff_core::random::{Philox, Stream};
use tch::Tensor;

use super::architecture::ModuleShape;
use super::compute::Placement;
use super::error::ModelError;
use super::parameters::Parameters;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// Number of parameters of one module.
pub(super) const PARAMETERS: usize = 10;
// Indices of the weights within a module. Each bias follows its weight.
const X: usize = 0;
const IMAGE: usize = 2;
const OUT: usize = 4;
const TIME_IN: usize = 6;
const TIME_OUT: usize = 8;

/// Selects the random numbers of dropout for consecutive samples of a training step.
#[derive(Debug, Clone, Copy)]
pub struct DropoutDraws<'a> {
    /// The random generator of the run.
    pub philox: Philox,
    /// The training step.
    pub step: Step<'a>,
    /// Index of the first sample within the global batch, the batch of all ranks together.
    pub first_sample: u64,
}

/// The weights of the layers `x` and `out`.
pub(super) struct InnerWeights<'a> {
    pub(super) x: &'a Tensor,
    pub(super) x_bias: &'a Tensor,
    pub(super) out: &'a Tensor,
    pub(super) out_bias: &'a Tensor,
}

/// One module of the network, with its weights and its placement.
pub(super) struct CSiren<'a> {
    pub(super) index: usize,
    pub(super) shape: ModuleShape,
    pub(super) parameters: &'a Parameters,
    pub(super) placement: &'a Placement,
}

impl<'a> CSiren<'a> {
    /// The weights of the layers `x` and `out`.
    pub(super) fn inner_weights(&self) -> InnerWeights<'a> {
        let ((x, x_bias), (out, out_bias)) = (self.layer(X), self.layer(OUT));
        InnerWeights { x, x_bias, out, out_bias }
    }

    /// The vectors (1 + scale) and shift of every timestep, concatenated to `[t, 2h]`.
    pub(super) fn time_table(&self, embedding_t: &Tensor) -> Result<Tensor, ModelError> {
        let (weight, bias) = self.layer(TIME_IN);
        let hidden = self.placement.linear(embedding_t, weight, bias)?.f_silu()?;
        let (weight, bias) = self.layer(TIME_OUT);
        let table = self.placement.linear(&self.placement.sum_gradients(&hidden)?, weight, bias)?;
        let [scale, shift] = halves(&table)?;
        Ok(Tensor::f_cat(&[scale.f_add_scalar(1.0)?, shift], 1)?)
    }

    /// The term of the images, `[b, h]`. For each image embedding e, it is W_I e plus the bias.
    pub(super) fn image_term(&self, image_be: &Tensor) -> Result<Tensor, ModelError> {
        let (weight, bias) = self.layer(IMAGE);
        self.placement.linear(image_be, weight, bias)
    }

    /// The image term of an all-zero embedding. It equals the bias: `[1, h]`.
    pub(super) fn image_term_of_zero(&self) -> Result<Tensor, ModelError> {
        self.placement.cast(&self.layer(IMAGE).1.f_unsqueeze(0)?)
    }

    /// Runs the module. `time` holds the vectors (1 + scale) and shift: `[b, 2h]` with one row per sample, or `[1, 2h]`
    /// for all samples. `dropout` holds the random numbers and the fraction to drop.
    pub(super) fn forward(
        &self,
        x_bi: &Tensor,
        time: &Tensor,
        image_bh: &Tensor,
        dropout: Option<(DropoutDraws<'_>, f64)>,
    ) -> Result<Tensor, ModelError> {
        let (weight, bias) = self.layer(X);
        let x_bh = self.placement.linear(&self.placement.sum_gradients(x_bi)?, weight, bias)?;
        let [scale, shift] = halves(time)?;
        let hidden_bh = x_bh.f_mul(&scale)?.f_add(&shift)?.f_add(image_bh)?;
        let (weight, bias) = self.layer(OUT);
        let out_bo = self.placement.row_parallel_linear(&hidden_bh, weight, bias)?.f_sin()?;
        match dropout {
            Some((draws, share)) if share > 0.0 => self.apply_dropout(&out_bo, draws, share),
            _ => Ok(out_bo),
        }
    }

    /// Sets each activation to zero with probability `share`, and divides the others by 1 − `share`, so that the
    /// expected value does not change.
    fn apply_dropout(&self, out_bo: &Tensor, draws: DropoutDraws<'_>, share: f64) -> Result<Tensor, ModelError> {
        let keep = 1.0 - share;
        let rows = RowDraw {
            stream: Stream::Dropout(self.index as u16),
            step: draws.step,
            first_sample: draws.first_sample,
            samples: out_bo.size()[0] as usize,
            elements: self.shape.output as usize,
        };
        let mask_bo = draws.philox.mask(out_bo.device(), keep, rows)?;
        Ok(out_bo.f_mul(&mask_bo.f_to_kind(out_bo.kind())?.f_mul_scalar(1.0 / keep)?)?)
    }

    fn layer(&self, offset: usize) -> (&'a Tensor, &'a Tensor) {
        let weight = self.index * PARAMETERS + offset;
        (self.parameters.at(weight), self.parameters.at(weight + 1))
    }
}

fn halves(table: &Tensor) -> Result<[Tensor; 2], ModelError> {
    let width = table.size()[1] / 2;
    Ok([table.f_narrow(1, 0, width)?, table.f_narrow(1, width, width)?])
}
