//! Spherical-harmonics Dirac delta: a point on the sphere as the coefficients of a delta function at that point.
//!
//! In reading order:
//! - [`harmonics`]: encodes a point, at any degree up to 511.
//! - [`derivatives`]: gradient and Hessian of a sum of harmonics on the sphere.
//! - [`gpu`]: encodes points on the GPU.
//! - [`filter`]: the paper's low-pass filter.
//! - [`points`]: uniform random points, as a function of seed, step and index.
//! - [`decode`]: from codes back to places.
//! - [`aggregate`]: combines several samples into one place.

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

/// √(4π). Codes are multiplied by it before unit noise is added, so that each dimension has about unit variance
/// (Σ C² = (L+1)² / 4π over (L+1)² dimensions). The network and the loss work with scaled codes, harmonics and decoders with
/// unscaled ones.
pub const CODE_SCALE: f64 = 3.544_907_701_811_032;

/// An error of [`crate::shdd`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShddError {
    /// An invalid number, shape or filter, with the value it got and the value it wanted.
    #[error("{0}")]
    Bad(String),
    /// Coordinates that are not a point on the sphere.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

crate::native::from_torch!(ShddError);
