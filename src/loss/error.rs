//! What can go wrong with a loss.

use crate::comm::CommError;
use crate::native::NativeError;

/// An error of [`crate::loss`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    /// The loss is infinite or not a number.
    #[error("step {step}, rank {rank}: the loss is {loss}; {largest}")]
    NotFinite {
        /// The training step.
        step: u64,
        /// This process's rank.
        rank: u32,
        /// Its value.
        loss: f64,
        /// How large the numbers behind it are.
        largest: Largest,
    },
    /// Tensors that do not fit together.
    #[error("loss: {what} is {got:?}, wanted {want:?}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Its shape.
        got: Vec<i64>,
        /// The shape that fits; -1 stands for any length.
        want: Vec<i64>,
    },
    /// An exchange between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The matrix product failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(LossError);

/// The largest finite magnitude among the numbers behind a loss; none where none of them is finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Largest {
    /// Of this rank's logits over the anchors.
    Logit(Option<f64>),
    /// Of the prediction, where there is no KL and so no logits.
    Prediction(Option<f64>),
}

impl std::fmt::Display for Largest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, largest) = match self {
            Self::Logit(largest) => ("logit over the anchors", largest),
            Self::Prediction(largest) => ("value of the prediction", largest),
        };
        match largest {
            Some(largest) => write!(out, "largest finite {what} {largest}"),
            None => write!(out, "no {what} is finite"),
        }
    }
}
