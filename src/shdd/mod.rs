//! Spherical-harmonics Dirac delta: a point on the sphere as the coefficients of a delta function at that point.
//!
//! - [`harmonics`]: the code of a point, at any degree to 511.
//! - [`derivatives`]: how a sum of harmonics changes along the sphere.
//! - [`points`]: uniform random points, a function of seed, step and index.
//! - [`decode`]: from codes back to places.
//! - [`aggregate`]: several samples into one place.

pub mod aggregate;
pub mod decode;
pub mod derivatives;
pub mod harmonics;
pub mod points;

pub use derivatives::Local;
pub use harmonics::{Basis, DEGREE_MAX};
pub use points::uniform_points;

use crate::native::NativeError;

/// What can go wrong with codes.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShddError {
    /// A degree beyond the range that is tested.
    #[error("harmonics: degree is {got}, wanted 0 to {DEGREE_MAX}")]
    Degree {
        /// The degree asked for.
        got: u32,
    },
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
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

/// An error of tch as one of ours: only what stands before libtorch's own stack trace.
fn torch_error(operation: &'static str, error: &tch::TchError) -> ShddError {
    let text = error.to_string();
    let text = text.split("\nException raised from").next().unwrap_or_default().trim_end().to_owned();
    ShddError::Native(NativeError { operation, text })
}
