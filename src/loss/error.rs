//! What can go wrong with a loss.

use crate::comm::CommError;
use crate::native::NativeError;

/// An error of [`crate::loss`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    /// The loss is infinite or not a number, or tensors do not fit together: what was got and what was wanted.
    #[error("{0}")]
    Bad(String),
    /// An exchange between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The matrix product failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(LossError);
