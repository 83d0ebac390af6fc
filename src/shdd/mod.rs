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
    /// Numbers, shapes or a filter that do not fit: what was got and what was wanted.
    #[error("{0}")]
    Bad(String),
    /// A place that is none.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(ShddError);
