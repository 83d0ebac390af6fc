//! From codes back to places: the mode of `exp(code · Y(p))` over p.
//!
//! - [`anchors`]: scores of fixed points by matrix products, in tiles; the best of them in 16 bits, rescored in f32.
//! - [`neighbourhood`]: scores summed over a radius, in log space.
//! - [`refine()`]: from the best anchor to the mode on the continuous sphere, in f64.
//! - [`Decoder`]: the three together.
//!
//! Codes are unscaled: what [`Basis::tensor`](super::Basis::tensor) gives, plus whatever a model got wrong. With a
//! [`Filter`](super::Filter) they have the dimensions that it keeps, and so have the harmonics of the anchors; refinement sees the
//! whole code again, with zeros where nothing was kept.

pub mod anchors;
mod decoder;
pub mod neighbourhood;
pub mod refine;
mod source;

pub use anchors::{Anchors, Best, Budget, Coarse, grid_points_min};
pub(crate) use decoder::in_parallel;
pub use decoder::{Decoded, Decoder};
pub(in crate::shdd) use decoder::{largest, threads};
pub use neighbourhood::Neighbourhood;
pub use refine::{Refined, refine};

use super::ShddError;
use crate::native::NativeError;

/// What can go wrong in decoding.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DecodeError {
    /// Nothing to choose from.
    #[error("decoder: 0 anchors, wanted at least 1")]
    NoAnchors,
    /// A neighbourhood that is none.
    #[error("decoder: radius of the neighbourhood is {0} km, wanted more than 0 and finite")]
    Radius(f64),
    /// Codes of another degree, or no list of codes at all.
    #[error("decoder: codes have shape {got:?}, wanted [.., {dims}]")]
    Shape {
        /// Shape of the tensor.
        got: Vec<i64>,
        /// Numbers per code.
        dims: usize,
    },
    /// A filter for codes of another degree.
    #[error("decoder: the filter is for codes of {got} dimensions, wanted {dims}")]
    Filter {
        /// Dimensions of the codes that it is for.
        got: usize,
        /// Those of the harmonics.
        dims: usize,
    },
    /// A code that is no code.
    #[error("decoder: row {0}: the code has a value that is NaN, infinite or too large for scores in f32")]
    NotFinite(usize),
    /// The harmonics could not be computed.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(DecodeError);
