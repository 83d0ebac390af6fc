//! Decodes codes into places: finds the best anchor, by its own score or by the sum over its neighbourhood, and then
//! optionally refines the place.

use locdiff_core::geo::UnitVector;
use locdiff_core::parallel::in_parallel;
use locdiff_core::pulse;
use tch::Tensor;

use super::anchors::{Anchors, ranges, rows_of};
use super::best::PendingBest;
use super::neighbourhood::Neighbourhood;
use super::prior::DecoderPrior;
use super::refine::refine;
use super::source::flat;
use crate::native::cuda::Readback;
use crate::shdd::ShddError;

/// A decoded place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decoded {
    /// The place.
    pub point: UnitVector,
    /// Index of the best anchor, at which refinement starts.
    pub anchor: usize,
    /// If the decoder refines, the score of the refined place. Otherwise, the score of the anchor or, with a
    /// neighbourhood, the logarithm of the sum of exp(score) over the neighbourhood.
    pub score: f64,
    /// Whether refinement converged. True if the decoder does not refine.
    pub converged: bool,
}

/// Codes that are being decoded.
#[derive(Debug)]
pub struct Decoding {
    codes_bc: Tensor,
    /// The best anchors; `None` if the decoder has a neighbourhood.
    best: Option<PendingBest>,
    /// A copy of the codes in main memory; `None` if the decoder does not refine.
    codes: Option<Readback>,
}

/// Decodes codes into places.
#[derive(Debug)]
pub struct Decoder {
    anchors: Anchors,
    neighbourhood: Option<Neighbourhood>,
    refines: bool,
    prior: Option<DecoderPrior>,
}

impl Decoder {
    /// If `neighbourhood_km` is 0, the best anchor is the anchor with the largest score. Otherwise, the best anchor is
    /// the anchor with the largest sum of exp(score) over all anchors within this radius. If `refines` is true, a
    /// search from the best anchor finds the mode on the continuous sphere.
    pub fn new(anchors: Anchors, neighbourhood_km: f64, refines: bool) -> Result<Self, ShddError> {
        let neighbourhood =
            if neighbourhood_km == 0.0 { None } else { Some(Neighbourhood::new(anchors.points(), neighbourhood_km)?) };
        Ok(Self { anchors, neighbourhood, refines, prior: None })
    }

    /// Decodes to the place where the product of density and prior is largest. All anchors must have a positive prior.
    /// A decoder with a neighbourhood ignores the prior.
    pub fn with_prior(self, prior: DecoderPrior) -> Result<Self, ShddError> {
        let added = |point: &UnitVector| {
            pulse::advance();
            prior.added_at(*point) as f32
        };
        let added: Vec<f32> = self.anchors.points().iter().map(added).collect();
        // Without differences, scores need not be changed.
        let anchors =
            if added.iter().all(|value| *value == 0.0) { self.anchors } else { self.anchors.with_added(&added)? };
        Ok(Self { anchors, prior: Some(prior), ..self })
    }

    /// The anchors.
    pub fn anchors(&self) -> &Anchors {
        &self.anchors
    }

    /// The neighbourhoods over which exp(score) is summed, or `None` if the decoder does not use sums.
    pub fn neighbourhood(&self) -> Option<&Neighbourhood> {
        self.neighbourhood.as_ref()
    }

    /// Whether places are refined on the continuous sphere.
    pub fn refines(&self) -> bool {
        self.refines
    }

    /// Decodes each row of `codes_bc`.
    pub fn decode(&self, codes_bc: &Tensor) -> Result<Vec<Decoded>, ShddError> {
        self.finish(self.start(codes_bc)?)
    }

    /// Starts to decode each row of `codes_bc`. On CUDA, the host does not wait for the device.
    pub fn start(&self, codes_bc: &Tensor) -> Result<Decoding, ShddError> {
        let best = if self.neighbourhood.is_none() { Some(self.anchors.start_best(codes_bc, 1)?) } else { None };
        let codes = if self.refines { Some(Readback::start(&[codes_bc])?) } else { None };
        Ok(Decoding { codes_bc: codes_bc.shallow_clone(), best, codes })
    }

    /// On CUDA, starts to compute the scores of other codes at the places that are being decoded: code i of `others_ic`
    /// at the places of k codes in a row, `[i, k]`. Returns `None` if the device does not find the places: on the CPU,
    /// and if the decoder refines or has a neighbourhood.
    pub fn start_scores(&self, decoding: &Decoding, others_ic: &Tensor) -> Result<Option<Tensor>, ShddError> {
        let on_device = self.anchors.device().is_cuda() && !self.refines;
        let Some(best) = decoding.best.as_ref().filter(|_| on_device) else { return Ok(None) };
        let anchors_ik = best.anchors().f_view([others_ic.size()[0], -1])?;
        Ok(Some(self.anchors.scores_at(others_ic, &anchors_ik)?))
    }

    /// Waits for the device, and does the rest of the work on the CPU.
    pub fn finish(&self, decoding: Decoding) -> Result<Vec<Decoded>, ShddError> {
        let best = match (decoding.best, &self.neighbourhood) {
            (Some(best), _) => best.finish()?.rows.iter().map(|row| (row[0].0, f64::from(row[0].1))).collect(),
            (None, Some(neighbourhood)) => self.best_sums(&decoding.codes_bc, neighbourhood)?,
            (None, None) => {
                return Err(ShddError::Bad("decoder: another decoder started to decode these codes".to_owned()));
            }
        };
        let decoded =
            |(anchor, score)| Decoded { point: self.anchors.points()[anchor], anchor, score, converged: true };
        let found: Vec<Decoded> = best.into_iter().map(decoded).collect();
        match decoding.codes {
            Some(codes) => self.refined(&codes.wait()?[0], &found),
            None => Ok(found),
        }
    }

    fn best_sums(&self, codes_bc: &Tensor, neighbourhood: &Neighbourhood) -> Result<Vec<(usize, f64)>, ShddError> {
        let mut best = Vec::new();
        for range in ranges(codes_bc.size()[0] as usize, self.anchors.codes_per_pass()) {
            let chunk_bc = rows_of(codes_bc, &range)?;
            let scores: Vec<f32> = flat(&self.anchors.scores(&chunk_bc)?)?;
            let rows: Vec<&[f32]> = scores.chunks_exact(self.anchors.points().len()).collect();
            best.extend(in_parallel(threads(), &rows, |scores| largest(&neighbourhood.log_sums(scores))));
        }
        Ok(best)
    }

    fn refined(&self, codes_bc: &Tensor, found: &[Decoded]) -> Result<Vec<Decoded>, ShddError> {
        let (basis, prior) = (self.anchors.basis(), self.prior.as_ref());
        let mut refined = Vec::new();
        for range in ranges(found.len(), self.anchors.codes_per_pass()) {
            let codes = self.anchors.whole_codes::<f64>(&rows_of(codes_bc, &range)?)?;
            let tasks: Vec<(&Decoded, &[f64])> = found[range].iter().zip(codes.chunks_exact(basis.dims())).collect();
            let results: Vec<Result<Decoded, ShddError>> = in_parallel(threads(), &tasks, |(start, code)| {
                let end = refine(basis, code, start.point)?;
                let (point, score) = match prior {
                    Some(prior) => prior.best_before(basis, code, start.point, (end.point, end.value))?,
                    None => (end.point, end.value),
                };
                Ok(Decoded { point, score, converged: end.converged, ..**start })
            });
            for result in results {
                refined.push(result?);
            }
        }
        Ok(refined)
    }
}

/// The index and value of the largest element. Among equal elements, the first is chosen.
pub(in crate::shdd) fn largest(values: &[f64]) -> (usize, f64) {
    let start = (0, f64::NEG_INFINITY);
    values.iter().enumerate().fold(start, |best, (index, value)| if *value > best.1 { (index, *value) } else { best })
}

/// Number of threads for work on the CPU: as many as libtorch has, or a share of the cores if there is a GPU.
pub(in crate::shdd) fn threads() -> usize {
    let of_libtorch = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    // A worker with a GPU has only one libtorch thread. It gets its share of the machine's cores instead: the number of
    // cores divided by the number of GPUs.
    match usize::try_from(tch::Cuda::device_count()).unwrap_or(0) {
        0 => of_libtorch,
        gpus => of_libtorch.max(std::thread::available_parallelism().map_or(1, usize::from) / gpus),
    }
}
