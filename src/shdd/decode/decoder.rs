//! Codes into places: best anchor, neighbourhood, refinement.

use locdiff_core::geo::UnitVector;
use tch::Tensor;

use super::anchors::{Anchors, ranges, rows_of};
use super::neighbourhood::Neighbourhood;
use super::refine::refine;
use super::source::flat;
use crate::shdd::ShddError;

/// Where a code was found to point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decoded {
    /// The place.
    pub point: UnitVector,
    /// The anchor that it was found from.
    pub anchor: usize,
    /// Score of the anchor, of its neighbourhood (a log sum), or of the refined place, whichever was last.
    pub score: f64,
    /// Refinement converged, or was not asked for.
    pub converged: bool,
}

/// What to do with codes.
#[derive(Debug)]
pub struct Decoder {
    anchors: Anchors,
    neighbourhood: Option<Neighbourhood>,
    refines: bool,
}

impl Decoder {
    /// `neighbourhood_km` of 0: the best anchor alone. With `refines`, from there to the mode on the continuous sphere.
    pub fn new(anchors: Anchors, neighbourhood_km: f64, refines: bool) -> Result<Self, ShddError> {
        let neighbourhood =
            if neighbourhood_km == 0.0 { None } else { Some(Neighbourhood::new(anchors.points(), neighbourhood_km)?) };
        Ok(Self { anchors, neighbourhood, refines })
    }

    /// The anchors.
    pub fn anchors(&self) -> &Anchors {
        &self.anchors
    }

    /// What scores are summed over; none: the anchor alone.
    pub fn neighbourhood(&self) -> Option<&Neighbourhood> {
        self.neighbourhood.as_ref()
    }

    /// Whether a place is refined on the continuous sphere.
    pub fn refines(&self) -> bool {
        self.refines
    }

    /// The place of each code in `codes_bc`.
    pub fn decode(&self, codes_bc: &Tensor) -> Result<Vec<Decoded>, ShddError> {
        let best = match &self.neighbourhood {
            None => self.best_points(codes_bc)?,
            Some(neighbourhood) => self.best_sums(codes_bc, neighbourhood)?,
        };
        let decoded =
            |(anchor, score)| Decoded { point: self.anchors.points()[anchor], anchor, score, converged: true };
        let found: Vec<Decoded> = best.into_iter().map(decoded).collect();
        if self.refines { self.refined(codes_bc, &found) } else { Ok(found) }
    }

    fn best_points(&self, codes_bc: &Tensor) -> Result<Vec<(usize, f64)>, ShddError> {
        let best = self.anchors.best(codes_bc, 1)?;
        Ok(best.rows.iter().map(|row| (row[0].0, f64::from(row[0].1))).collect())
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
        let basis = self.anchors.basis();
        let mut refined = Vec::new();
        for range in ranges(found.len(), self.anchors.codes_per_pass()) {
            let codes = self.anchors.lifted(&rows_of(codes_bc, &range)?)?;
            let tasks: Vec<(&Decoded, &[f64])> = found[range].iter().zip(codes.chunks_exact(basis.dims())).collect();
            let results: Vec<Result<Decoded, ShddError>> = in_parallel(threads(), &tasks, |(start, code)| {
                let end = refine(basis, code, start.point)?;
                Ok(Decoded { point: end.point, score: end.value, converged: end.converged, ..**start })
            });
            for result in results {
                refined.push(result?);
            }
        }
        Ok(refined)
    }
}

/// The first of the largest values.
pub(in crate::shdd) fn largest(values: &[f64]) -> (usize, f64) {
    let start = (0, f64::NEG_INFINITY);
    values.iter().enumerate().fold(start, |best, (index, value)| if *value > best.1 { (index, *value) } else { best })
}

/// As many as libtorch uses.
pub(in crate::shdd) fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1)
}

/// Applies `work` to each task on so many threads; results in the order of the tasks.
pub(crate) fn in_parallel<T: Sync, R: Send>(threads: usize, tasks: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let share = tasks.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = tasks.chunks(share).map(|part| scope.spawn(|| part.iter().map(&work).collect())).collect();
        let join = |part: std::thread::ScopedJoinHandle<'_, Vec<R>>| match part.join() {
            Ok(results) => results,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        parts.into_iter().flat_map(join).collect()
    })
}
