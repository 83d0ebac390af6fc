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
