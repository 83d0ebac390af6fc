//! Decodes codes into places. The place of a code is the mode of `exp(code · Y(p))`: the place p where this value is
//! largest. Y(p) is the vector of harmonics at p.
//!
//! - [`anchors`]: computes the scores of fixed points (anchors) by matrix products over tiles. On a GPU, scores are
//!   computed from 16-bit numbers, and the best anchors are scored again more exactly.
//! - [`neighbourhood`]: sums exp(score) over all anchors within a radius, in log space.
//! - [`refine()`]: climbs from the best anchor to the mode on the continuous sphere, in f64.
//! - [`DecoderPrior`]: what is known about the place besides the code.
//! - [`Decoder`]: combines these stages.
//!
//! Codes are not scaled by [`CODE_SCALE`](super::CODE_SCALE). With a [`Filter`](super::Filter), codes and the harmonics
//! of the anchors hold only the kept dimensions. Refinement uses whole codes, with zeros in the dropped dimensions.

pub mod anchors;
mod best;
mod columns;
mod decoder;
pub mod neighbourhood;
mod prior;
pub mod refine;
mod source;

pub use anchors::{Anchors, Budget, Coarse, grid_points_min};
pub use best::{BestAnchors, PendingBest};
pub use decoder::{Decoded, Decoder, Decoding};
pub(in crate::shdd) use decoder::{largest, threads};
pub use neighbourhood::Neighbourhood;
pub use prior::DecoderPrior;
pub use refine::{Refined, refine};
