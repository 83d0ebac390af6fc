//! Spherical-harmonics Dirac delta: a point on the sphere is encoded as the coefficients of a delta function at that
//! point.
//!
//! In reading order:
//! - [`harmonics`]: encodes points on the CPU, at any degree up to 511.
//! - [`derivatives`]: computes the gradient and the Hessian of a sum of harmonics on the sphere.
//! - [`gpu`]: encodes points on the GPU.
//! - [`filter`]: the paper's low-pass filter, which keeps only some dimensions of a code.
//! - [`codes`]: encodes points on the device of a network, and filters the codes.
//! - [`points`]: uniform random points. Each point is a function of seed, step and index.
//! - [`decode`]: decodes codes into places.
//! - [`density`]: the density over the cells of a grid.
//! - [`aggregate`]: combines the samples of one image into one place.

pub mod aggregate;
pub mod codes;
pub mod decode;
pub mod density;
pub mod derivatives;
pub mod filter;
pub mod gpu;
pub mod harmonics;
pub mod points;

pub use codes::{Codes, Points};
pub use derivatives::Local;
pub use filter::{Filter, Selection};
pub use harmonics::{Basis, DEGREE_MAX};
pub use points::uniform_points;

use locdiff_core::geo::GeoError;

use crate::native::NativeError;

/// √(4π). Codes are multiplied by this factor before unit noise is added, so that each dimension has about unit
/// variance: an unscaled code of (L+1)² dimensions has the squared length (L+1)² / 4π. The network predicts scaled
/// codes. Harmonics and decoders use unscaled codes.
pub const CODE_SCALE: f64 = 3.544_907_701_811_032;

/// An error from [`crate::shdd`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShddError {
    /// An invalid number, shape or filter. The text contains the value and what was wanted instead.
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
