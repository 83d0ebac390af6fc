//! What can go wrong with the network.

use crate::comm::CommError;
use crate::native::random::RandomError;

/// An error of [`crate::model`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A width that the ranks of a tensor-parallel group cannot share equally.
    #[error("{name}: {length} units cannot be divided among {ranks} tensor-parallel ranks; choose another number")]
    Indivisible {
        /// The parameter.
        name: String,
        /// The length to be divided.
        length: i64,
        /// Among how many.
        ranks: i64,
    },
    /// A tensor of the wrong shape.
    #[error("{name} is {got:?}, wanted {want:?}")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape.
        got: Vec<i64>,
        /// The shape that fits; -1 stands for any length.
        want: Vec<i64>,
    },
    /// A parameter that is not among the tensors to be loaded.
    #[error("no tensor `{0}` among those to be loaded")]
    Missing(String),
    /// A tensor to be loaded that the network has no place for.
    #[error("tensor `{0}` has no place in this network")]
    Unexpected(String),
    /// A standard deviation that cannot divide.
    #[error("standard deviation of embedding dimension {dimension} is {got}, wanted above 0")]
    Deviation {
        /// Which dimension.
        dimension: usize,
        /// Its value.
        got: f64,
    },
    /// A mean that is none.
    #[error("mean of embedding dimension {dimension} is {got}, wanted a finite number")]
    Mean {
        /// Which dimension.
        dimension: usize,
        /// Its value.
        got: f64,
    },
    /// One of many timesteps is outside the table.
    #[error("row {row}: timestep {got} is not one of the network's {timesteps}")]
    TimestepRow {
        /// Which sample, from 0.
        row: usize,
        /// Its timestep.
        got: i64,
        /// How many there are.
        timesteps: i64,
    },
    /// A timestep outside the table.
    #[error("timestep {got} is not one of the network's {timesteps}")]
    Timestep {
        /// The timestep.
        got: usize,
        /// How many there are.
        timesteps: i64,
    },
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

crate::native::from_torch!(ModelError);
