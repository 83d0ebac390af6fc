//! Decodes codes into places: the mode of `exp(code · Y(p))` over p.
//!
//! - [`anchors`]: scores of fixed points, by matrix products over tiles. On a GPU, scores are computed in 16 bits, and the
//!   best are rescored in f32.
//! - [`neighbourhood`]: scores summed over a radius, in log space.
//! - [`refine()`]: climbs from the best anchor to the mode on the continuous sphere, in f64.
//! - [`Decoder`]: combines the three.
//!
//! Codes are unscaled, as [`Basis::tensor`](super::Basis::tensor) returns them. With a [`Filter`](super::Filter), codes and
//! the harmonics of the anchors hold only the kept dimensions. Refinement works on whole codes, with zeros in the other
//! dimensions.

pub mod anchors;
mod decoder;
pub mod neighbourhood;
pub mod refine;
mod source;

pub use anchors::{Anchors, BestAnchors, Budget, Coarse, grid_points_min};
pub(crate) use decoder::in_parallel;
pub use decoder::{Decoded, Decoder};
pub(in crate::shdd) use decoder::{largest, threads};
pub use neighbourhood::Neighbourhood;
pub use refine::{Refined, refine};
