//! Errors of the network.

use crate::comm::CommError;
use crate::native::random::RandomError;

/// An error from [`crate::model`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A tensor, a number or a layout of ranks that does not suit the network. The text describes the problem.
    #[error("{0}")]
    Bad(String),
    /// Random numbers could not be drawn.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// Communication between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

impl ModelError {
    /// A tensor of the wrong shape. In `want`, -1 stands for any length.
    pub(crate) fn shape(name: &str, got: &[i64], want: &[i64]) -> Self {
        let want = format!("{want:?}").replace("-1", "any");
        Self::Bad(format!("{name} has shape {got:?}, wanted {want}"))
    }
}

crate::native::from_torch!(ModelError);
