//! What can go wrong with the network.

use crate::comm::CommError;
use crate::native::random::RandomError;

/// An error of [`crate::model`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// Tensors, numbers or a layout that do not fit the network: what was got and what was wanted.
    #[error("{0}")]
    Bad(String),
    /// Random numbers that could not be drawn.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// An exchange between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// libtorch refused or failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

impl ModelError {
    /// A tensor of the wrong shape; -1 in `want` stands for any length.
    pub(super) fn shape(name: &str, got: &[i64], want: &[i64]) -> Self {
        Self::Bad(format!("{name} is {got:?}, wanted {want:?}"))
    }
}

crate::native::from_torch!(ModelError);
