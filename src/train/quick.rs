//! The quick evaluation while training: the engine of every evaluation with averaged weights, few samples, view 0 and a grid with
//! refinement, on the first validation rows.
//!
//! Ranks share the blocks of rows. Neither the answers nor what is made of them depends on how many ranks there are.
// n chains · d dimensions of the code

use locdiff_core::config::{EvalConfig, RunConfig};
use locdiff_core::draw::{ANSWERS_MAX, Answer};
use locdiff_core::geo::fibonacci_grid;
use locdiff_core::metrics::Tally;
use locdiff_core::protocol::QuickEvaluation;
use tch::{Device, Tensor};

use super::error::TrainError;
use super::pictures::Seen;
use super::work::duplicate;
use crate::comm::{Group, ReduceOp};
use crate::infer::{Denoiser, Engine, ImageBlock, Rows, Weights};
use crate::shards::{Blocks as _, Dataset, Mask};
use crate::shdd::Filter;

/// The validation rows of this rank and all that locating them takes.
#[derive(Debug)]
pub(super) struct Quick {
    engine: Engine,
    blocks: Vec<ImageBlock>,
    /// Rows of all ranks.
    rows: usize,
    group: Group,
}

impl Quick {
    /// Is there anything to evaluate on, and ever a step to do it after?
    pub(super) fn is_wanted(config: &RunConfig) -> bool {
        !config.shards.validation.is_empty() && config.eval.every > 0
    }

    /// Reads this rank's share of the first `eval.quick_rows` rows, without those of the mask.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<&Filter>,
        group: &Group,
        (dataset, mask): (Dataset, Mask),
    ) -> Result<Self, TrainError> {
        let denoiser = Denoiser::new(config, embedding_width, filter.cloned(), group.device())?;
        denoiser.check_width("this run", &config.shards.validation, dataset.width())?;
        let samples = config.eval.quick_samples;
        let eval = EvalConfig { samples, guidance: 0.0, neighbourhood_km: 0.0, refine: true, ..config.eval.clone() };
        let grid = fibonacci_grid(eval.grid_points(config.model.degree) as usize);
        let rows = Rows::first(u64::from(eval.quick_rows), dataset, mask);
        Ok(Self {
            engine: Engine::new(denoiser, &eval, config.train.seed, grid)?,
            blocks: rows.blocks(rows.share(group.rank(), group.size())).collect::<Result<_, _>>()?,
            rows: rows.count as usize,
            group: group.clone(),
        })
    }

    /// Locates every row with the given weights; the same figures on every rank. What is worth a picture is this rank's.
    pub(super) fn evaluate(&mut self, step: u64, weights: &Weights) -> Result<(QuickEvaluation, Seen), TrainError> {
        self.engine.load(weights)?;
        let mut distances_km = vec![0.0; self.rows];
        let mut seen = Seen { answers: Vec::new(), chain: Vec::new() };
        for (place, block) in self.blocks.iter().enumerate() {
            let watch = |t: usize, predicted_nd: &Tensor| {
                if place == 0 {
                    seen.chain.push((t, duplicate(&predicted_nd.f_narrow(0, 0, 1)?)?));
                }
                Ok(())
            };
            let found = self.engine.locate(block, &block.embeddings(self.engine.device())?, watch)?;
            for (row, (image, samples)) in (block.first as usize..).zip(block.images.iter().zip(found)) {
                let answer = Answer { truth: image.truth.into(), answer: samples.aggregate };
                distances_km[row] = answer.truth.distance(answer.answer).0;
                seen.answers.push(answer);
            }
        }
        seen.answers.truncate(ANSWERS_MAX);
        let mut tally = Tally::default();
        self.of_all(&distances_km)?.into_iter().for_each(|distance_km| tally.add(distance_km));
        let (score, within_percent) = (tally.mean_score(), tally.within_percent());
        Ok((QuickEvaluation { step, rows: self.rows as u64, score, within_percent }, seen))
    }

    /// The distances of all rows. Each is known to one rank and 0 on the others, so that their sum is exact, in whatever order.
    fn of_all(&self, own_km: &[f64]) -> Result<Vec<f64>, TrainError> {
        let mut sums = Tensor::f_from_slice(own_km)?.f_to_device(self.group.device())?;
        if !own_km.is_empty() {
            self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        }
        Ok(Vec::<f64>::try_from(sums.f_to_device(Device::Cpu)?)?)
    }
}
