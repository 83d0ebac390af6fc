//! Turns embeddings into places. [`crate::eval::locate`] calls this module with the weights of a checkpoint. The quick
//! evaluation of [`crate::train`] calls it with the current averaged weights.
//!
//! In reading order:
//! - [`rows`]: divides the usable rows of a data set into fixed blocks of images.
//! - [`saved`]: reads trained models: checkpoints and exported files.
//! - [`trained`]: the network of such a model, or a network that gets its weights later.
//! - [`engine`]: combines weights, sampler, decoder and aggregator to locate a block of images.
//! - [`pass`]: locates many blocks. On a GPU, it collapses the network and captures its steps in a CUDA graph.
//! - [`retrieve`]: locates images with retrieval and with LocDiff-H, which uses the samples of [`engine`].
//!   [`retrieval_data`] opens the gallery and the head.
//! - [`anchors`]: the points among which the decoder selects.
//! - [`prior`]: what the user knows about the places of photos.
//! - [`overlap`]: distances from test places to training places and gallery points.
//!
//! Invariant: the answer for an image is a function of the weights, the settings, the seed and the embeddings of the
//! image. It depends neither on the other images nor on the number of workers.

pub mod anchors;
pub mod engine;
mod error;
pub mod overlap;
pub mod pass;
pub mod prior;
pub mod retrieval_data;
pub mod retrieve;
pub mod rows;
pub mod saved;
pub mod trained;

pub use engine::Engine;
pub use error::InferError;
pub use pass::Located;
pub use prior::PreparedPrior;
pub use rows::{BLOCK_IMAGES, Image, ImageBlock, ImageRows, block_images};
pub use saved::{Saved, SavedModel, SavedState, Weights};
pub use trained::{Denoiser, Trained};
