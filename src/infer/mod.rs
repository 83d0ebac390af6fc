//! From embeddings to places: the one way to locate, for evaluation, for the quick evaluation while training, and for whoever
//! else has a network and images.
//!
//! In reading order:
//! - [`rows`]: a data set in blocks of images whose bits do not depend on who computes them.
//! - [`saved`]: the state and the weights of a checkpoint.
//! - [`trained`]: the network of a checkpoint, or one that gets its weights later.
//! - [`engine`]: weights, sampler, decoder and aggregate, on a block of images.
//! - [`retrieve`]: retrieval and LocDiff-H on top; [`retrieval_data`]: the gallery and the head that they need.
//! - [`anchors`]: the points that codes are decoded among.
//!
//! Invariant: the answer for an image is a function of weights, settings, seed, the image and the fixed block that it lies in;
//! the number of workers has no part in it.

pub mod anchors;
pub mod engine;
mod error;
pub mod retrieval_data;
pub mod retrieve;
pub mod rows;
pub mod saved;
pub mod trained;

pub use engine::Engine;
pub use error::InferError;
pub use rows::{BLOCK_IMAGES, Image, ImageBlock, Rows};
pub use saved::{Saved, SavedState, Weights};
pub use trained::{Denoiser, Trained};
