//! From embeddings to places. [`crate::eval::locate`] calls this module with a checkpoint, the quick evaluation of
//! [`crate::train`] with the current weights.
//!
//! In reading order:
//! - [`rows`]: a data set in fixed blocks of images. `Dataset::read_usable` of [`crate::shards`] leaves out unusable
//!   rows.
//! - [`saved`]: the state and the weights of a checkpoint. Training and evaluation both read them here.
//! - [`trained`]: the network of a checkpoint, or a network that gets its weights later.
//! - [`engine`]: combines weights, sampler, decoder and aggregator to locate a block of images.
//! - [`retrieve`]: retrieval and LocDiff-H on top of it. [`retrieval_data`] opens the gallery and the head that they
//!   need.
//! - [`anchors`]: the candidate points of decoding.
//!
//! Invariant: the answer for an image is a function of weights, settings, seed, the image and its block. It does not
//! depend on the number of workers.

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
pub use rows::{BLOCK_IMAGES, Image, ImageBlock, ImageRows};
pub use saved::{Saved, SavedState, Weights};
pub use trained::{Denoiser, Trained};
