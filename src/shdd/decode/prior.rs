//! A prior in the decoder: the answer is the place p with the largest product of density and prior.
//!
//! The density of a code is exp(f(p) / (P · T)), where f is the score, P the peak of a clean code and T a temperature.
//! So the decoder compares f(p) + P · T · log prior(p).

use std::sync::Arc;

use locdiff_core::geo::{PlacePrior, UnitVector};

use crate::shdd::{Basis, ShddError};

/// How often the way back from a refined place to its anchor is halved.
const HALVINGS: u32 = 20;

/// A prior, and how much it counts beside scores.
#[derive(Debug, Clone)]
pub struct DecoderPrior {
    prior: Arc<PlacePrior>,
    /// P · T: the score that counts as much as one nat of the prior.
    score_per_nat: f64,
}

impl DecoderPrior {
    /// `score_per_nat` is the product of the peak of a clean code and the temperature.
    pub fn new(prior: Arc<PlacePrior>, score_per_nat: f64) -> Self {
        Self { prior, score_per_nat }
    }

    /// The number to add to the score of a place.
    pub(super) fn added_at(&self, point: UnitVector) -> f64 {
        self.score_per_nat * self.prior.log_at(point)
    }

    /// The refined place `end`, with its score, if the prior does not make it worse than its anchor `start`. Otherwise,
    /// the first place half, a quarter, an eighth... of the way from the anchor that is better than the anchor, with
    /// its score. The anchor if there is none.
    pub(super) fn best_before(
        &self,
        basis: &Basis,
        code: &[f64],
        start: UnitVector,
        end: (UnitVector, f64),
    ) -> Result<(UnitVector, f64), ShddError> {
        let (added, added_at_end) = (self.added_at(start), self.added_at(end.0));
        // Refinement never lowers the score.
        if added_at_end >= added {
            return Ok(end);
        }
        let score = |place: UnitVector| Ok::<f64, ShddError>(basis.value_gradient_hessian(code, place)?.value);
        let start = (start, score(start)?);
        let (least, mut found, mut added) = (start.1 + added, end, added_at_end);
        for _ in 0..HALVINGS {
            if found.1 + added >= least {
                return Ok(found);
            }
            let place = middle(start.0, found.0);
            added = self.added_at(place);
            found = (place, if added > f64::NEG_INFINITY { score(place)? } else { 0.0 });
        }
        Ok(start)
    }
}

/// The place halfway between two places that are not antipodes.
fn middle(one: UnitVector, other: UnitVector) -> UnitVector {
    UnitVector::new(std::array::from_fn(|axis| one.xyz()[axis] + other.xyz()[axis])).unwrap_or(one)
}
