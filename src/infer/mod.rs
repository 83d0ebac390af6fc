//! From embeddings to places: the one way to locate. [`crate::eval::locate`] calls it with a checkpoint, the quick evaluation of
//! [`crate::train`] with the weights of the moment.
//!
//! In reading order:
//! - [`rows`]: a data set in blocks of images whose bits do not depend on who computes them. `Dataset::read_usable` of
//!   [`crate::shards`] leaves out the rows that cannot be used, here as everywhere.
//! - [`saved`]: the state and the weights of a checkpoint; training and evaluation read them here only.
//! - [`trained`]: the network of a checkpoint, or one that gets its weights later.
//! - [`engine`]: the only place that puts weights, sampler, decoder and aggregator together, on a block of images.
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
