//! Spherical-harmonics Dirac delta: a point on the sphere as the coefficients of a delta function at that point.
//!
//! - [`harmonics`]: the code of a point, at any degree to 511.
//! - [`derivatives`]: how a sum of harmonics changes along the sphere.
//! - [`gpu`]: the code of a point on the GPU.
//! - [`filter`]: the paper's low-pass filter.
//! - [`points`]: uniform random points, a function of seed, step and index.
//! - [`decode`]: from codes back to places.
//! - [`aggregate`]: several samples into one place.

pub mod aggregate;
pub mod decode;
pub mod derivatives;
pub mod filter;
pub mod gpu;
pub mod harmonics;
pub mod points;

pub use derivatives::Local;
pub use filter::{Filter, Selection};
pub use harmonics::{Basis, DEGREE_MAX};
pub use points::uniform_points;

use locdiff_core::geo::GeoError;

use crate::native::NativeError;

/// √(4π): what codes are multiplied by before unit noise is added, so that one dimension has about unit variance
/// (Σ C² = (L+1)² / 4π over (L+1)² dimensions). Network and loss see codes scaled so; harmonics and decoders do not.
pub const CODE_SCALE: f64 = 3.544_907_701_811_032;

/// What can go wrong with codes.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShddError {
    /// A degree beyond the range that is tested.
    #[error("harmonics: degree is {0}, wanted 0 to {DEGREE_MAX}")]
    Degree(u32),
    /// A buffer, a list or a tensor of the wrong size.
    #[error("{what}: length is {got}, wanted {want}")]
    Length {
        /// Of what.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The right length.
        want: usize,
    },
    /// A tensor of the wrong shape, kind or device.
    #[error("{what}: tensor is {got}, wanted {want}")]
    Tensor {
        /// Of what.
        what: &'static str,
        /// What it is.
        got: String,
        /// What it should be.
        want: String,
    },
    /// A point to encode that is none.
    #[error("points to encode: row {row} is {got:?}, wanted a finite vector of length 1")]
    Point {
        /// Which row, from 0.
        row: usize,
        /// Its components.
        got: [f64; 3],
    },
    /// A coefficient that is none.
    #[error("coefficient {index} is {got}, wanted a finite number")]
    Coefficient {
        /// Which, from 0.
        index: usize,
        /// Its value.
        got: f64,
    },
    /// A filter that keeps nothing, or more than there is.
    #[error("filter: {got} dimensions kept, wanted 1 to {dims}")]
    Kept {
        /// How many.
        got: usize,
        /// Dimensions of a code.
        dims: usize,
    },
    /// A variance that is none.
    #[error("filter: variance of dimension {index} is {got}, wanted a finite number of at least 0")]
    Variance {
        /// Which dimension.
        index: usize,
        /// Its value.
        got: f64,
    },
    /// A saved filter that is not in rising order.
    #[error("filter: index at position {0} is not above the one before it, wanted rising indices")]
    Unsorted(usize),
    /// A saved filter for larger codes.
    #[error("filter: index is {got}, wanted below {dims}")]
    Index {
        /// The largest index.
        got: u32,
        /// Dimensions of a code.
        dims: usize,
    },
    /// A place that is none.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(ShddError);
