//! What cannot be scored.

use crate::random::RangeError;

/// An error of [`crate::metrics`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MetricsError {
    /// Nothing to score.
    #[error("0 answers, wanted at least 1")]
    NoAnswers,
    /// A distance that is none.
    #[error("answer {row}: its error is {got} km, wanted a finite number of at least 0")]
    Distance {
        /// Which answer, from 0.
        row: usize,
        /// Its distance.
        got: f64,
    },
    /// A threshold that is no distance.
    #[error("threshold {0} km, wanted a finite number of at least 0")]
    Threshold(f64),
    /// Predictors with different numbers of answers cannot be compared row by row.
    #[error("{one} answers against {other}, wanted the same rows from both")]
    Lengths {
        /// Of the one.
        one: usize,
        /// Of the other.
        other: usize,
    },
    /// Neighbours that are not there.
    #[error("the {k}-th nearest of {got} places, wanted at least the first and more places than that")]
    Neighbours {
        /// How many there are.
        got: usize,
        /// Which neighbour was asked for.
        k: usize,
    },
    /// More answers or resamples than random numbers have names for.
    #[error(transparent)]
    Range(#[from] RangeError),
}
