//! Finds the best anchors of codes. The host can do other work while the device computes these anchors.
// Letters in tensor names: b codes, k best anchors.

use tch::Tensor;

use super::source::flat;
use crate::native::cuda::Readback;
use crate::shdd::ShddError;

/// The end of the error message for a code that is rejected.
const NOT_FINITE: &str = "has a value that is NaN, infinite or too large for scores in f32";

/// The best anchors of each code, best first.
#[derive(Debug, Clone, PartialEq)]
pub struct BestAnchors {
    /// For each code, the indices of its best anchors with their scores, best first.
    pub rows: Vec<Vec<(usize, f32)>>,
}

/// The best anchors of each code while the device still computes them.
#[derive(Debug)]
pub struct PendingBest {
    /// The scores and indices of the best anchors of each code, and an upper bound of all scores of each code.
    found: Readback,
    /// The indices on the device.
    anchors_bk: Tensor,
    /// Number of anchors of each code.
    count: usize,
}

impl PendingBest {
    /// Starts to copy the results to main memory.
    pub(super) fn new(scores_bk: &Tensor, anchors_bk: &Tensor, bounds_b: &Tensor) -> Result<Self, ShddError> {
        let count = scores_bk.size()[1] as usize;
        let found = Readback::start(&[scores_bk, anchors_bk, bounds_b])?;
        Ok(Self { found, anchors_bk: anchors_bk.shallow_clone(), count })
    }

    /// The indices of the best anchors of each code, on the device.
    pub(super) fn anchors(&self) -> &Tensor {
        &self.anchors_bk
    }

    /// Waits for the device. Returns an error if a code is not finite, or so large that its scores could overflow.
    pub fn finish(self) -> Result<BestAnchors, ShddError> {
        let found = self.found.wait()?;
        check_bounds(&found[2])?;
        let (scores, anchors): (Vec<f32>, Vec<i64>) = (flat(&found[0])?, flat(&found[1])?);
        let row = |(scores, anchors): (&[f32], &[i64])| {
            anchors.iter().zip(scores).map(|(anchor, score)| (*anchor as usize, *score)).collect()
        };
        let width = self.count.max(1);
        Ok(BestAnchors { rows: scores.chunks_exact(width).zip(anchors.chunks_exact(width)).map(row).collect() })
    }
}

/// Returns an error if the upper bound of a code's scores is not finite.
pub(super) fn check_bounds(bounds_b: &Tensor) -> Result<(), ShddError> {
    let bounds: Vec<f32> = flat(bounds_b)?;
    match bounds.iter().position(|bound| !bound.is_finite()) {
        Some(row) => Err(ShddError::Bad(format!("decoder: row {row}: the code {NOT_FINITE}"))),
        None => Ok(()),
    }
}
