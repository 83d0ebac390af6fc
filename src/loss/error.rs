//! What can go wrong with a loss.

use crate::comm::CommError;
use crate::native::NativeError;

/// An error of [`crate::loss`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    /// The loss is infinite or not a number.
    #[error("step {step}, rank {rank}: the loss is {loss}; largest logit over the anchors {}", logit(*largest_logit))]
    NotFinite {
        /// The training step.
        step: u64,
        /// This process's rank.
        rank: u32,
        /// Its value.
        loss: f64,
        /// The largest magnitude among this rank's logits, where there is a KL.
        largest_logit: Option<f64>,
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
    /// libtorch refused or failed.
    #[error("loss: {text}")]
    Torch {
        /// What it says, without its stack trace.
        text: String,
    },
}

impl From<tch::TchError> for LossError {
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        Self::Torch { text: text.split("\nException raised from").next().unwrap_or(&text).trim_end().to_owned() }
    }
}

fn logit(largest: Option<f64>) -> String {
    largest.map_or_else(|| "unknown: no KL".to_owned(), |largest| largest.to_string())
}
