//! Errors of the loss.

use crate::comm::CommError;
use crate::native::NativeError;

/// An error from [`crate::loss`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    /// The loss is not finite, or the shapes of tensors do not match.
    #[error("{0}")]
    Bad(String),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(LossError);
