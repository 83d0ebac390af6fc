//! The quick evaluation during training. It locates the first validation rows with the averaged weights and view 0
//! only. LocDiff uses few samples, no guidance, and a grid with refinement, with the same engine as all other
//! evaluations.
//!
//! The blocks of rows are distributed over the ranks. The results do not depend on the number of ranks.
// Letters in tensor names: n denoising chains (one per sample), d dimensions of the code.

use locdiff_core::config::RunConfig;
use locdiff_core::draw::{ANSWERS_MAX, Answer};
use locdiff_core::metrics::Tally;
use locdiff_core::protocol::QuickEvaluation;
use locdiff_core::stop;
use tch::{Device, Tensor};

use super::error::TrainError;
use super::observe::PictureData;
use super::work::duplicate;
use crate::comm::{Group, ReduceOp};
use crate::infer::{ImageBlock, ImageRows, Weights};
use crate::methods::{Locator, TrainableMethod};
use crate::shards::{Blocks as _, Dataset, Mask};

/// The validation rows of this rank, and the locator for them.
#[derive(Debug)]
pub(super) struct Quick {
    locator: Box<dyn Locator>,
    blocks: Vec<ImageBlock>,
    /// Total number of rows on all ranks.
    rows: usize,
    group: Group,
}

impl Quick {
    /// Whether the configuration has validation rows and asks for quick evaluations.
    pub(super) fn is_wanted(config: &RunConfig) -> bool {
        !config.shards.validation.is_empty() && config.eval.every > 0
    }

    /// Reads this rank's share of the first `eval.quick_rows` usable rows.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        method: &dyn TrainableMethod,
        group: &Group,
        (dataset, mask): (Dataset, Mask),
    ) -> Result<Self, TrainError> {
        let (got, want) = (dataset.width(), embedding_width as usize);
        if got != want {
            let location = &config.shards.validation;
            return Err(TrainError::Config(format!(
                "shards.validation: the embeddings of {location} have {got} numbers, but those of shards.train have \
                 {want}"
            )));
        }
        let rows = ImageRows::first(u64::from(config.eval.quick_rows), dataset, mask);
        Ok(Self {
            locator: method.locator(config)?,
            blocks: rows.blocks(rows.share(group.rank(), group.size())).collect::<Result<_, _>>()?,
            rows: rows.count as usize,
            group: group.clone(),
        })
    }

    /// Locates all rows with the given weights. Every rank returns the same evaluation. The picture data covers only
    /// the rows of this rank. Returns `None` on all ranks if any rank stopped early because the launcher asked it to.
    pub(super) fn evaluate(
        &mut self,
        step: u64,
        weights: &Weights,
    ) -> Result<Option<(QuickEvaluation, PictureData)>, TrainError> {
        self.locator.load(weights)?;
        // One distance per row, and a last number that counts the ranks that stopped early.
        let mut distances_km = vec![0.0; self.rows + 1];
        let mut seen = PictureData { answers: Vec::new(), chain: Vec::new() };
        for (place, block) in self.blocks.iter().enumerate() {
            if stop::is_requested() {
                distances_km[self.rows] = 1.0;
                break;
            }
            let mut watch = |t: usize, x_nd: &Tensor, predicted_nd: &Tensor| {
                if place == 0 && seen.chain.is_empty() {
                    // The chain starts with noise. The noise has a timestep one higher than the first sampler step.
                    seen.chain.push((t + 1, duplicate(&x_nd.f_narrow(0, 0, 1)?)?));
                }
                if place == 0 {
                    seen.chain.push((t, duplicate(&predicted_nd.f_narrow(0, 0, 1)?)?));
                }
                Ok(())
            };
            let found = self.locator.locate(block, &mut watch)?;
            for (row, (image, samples)) in (block.first as usize..).zip(block.images.iter().zip(found)) {
                let answer = Answer { truth: image.true_place()?.into(), answer: samples.aggregate };
                distances_km[row] = answer.truth.distance(answer.answer).0;
                seen.answers.push(answer);
            }
        }
        seen.answers.truncate(ANSWERS_MAX);
        let mut tally = Tally::default();
        let mut distances_km = self.sum_over_ranks(&distances_km)?;
        if distances_km.pop() != Some(0.0) {
            return Ok(None);
        }
        distances_km.into_iter().for_each(|distance_km| tally.add(distance_km));
        let (score, within_percent) = (tally.mean_score(), tally.within_percent());
        Ok(Some((QuickEvaluation { step, rows: self.rows as u64, score, within_percent }, seen)))
    }

    /// The distances of all rows, as the sum of `own_km` over all ranks. For each row, all ranks but one contribute 0,
    /// so the sum is exact in any order.
    fn sum_over_ranks(&self, own_km: &[f64]) -> Result<Vec<f64>, TrainError> {
        let mut sums = Tensor::f_from_slice(own_km)?.f_to_device(self.group.device())?;
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(Vec::<f64>::try_from(sums.f_to_device(Device::Cpu)?)?)
    }
}
