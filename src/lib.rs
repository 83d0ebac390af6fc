//! LocDiff's data plane: everything that runs inside a worker process.
//!
//! In reading order:
//! - [`worker`]: the life cycle of a worker. It talks to the launcher and calls everything else.
//! - [`native`]: a C++ shim over libtorch, with safe wrappers.
//! - [`shdd`]: encodes points as spherical-harmonic coefficients and decodes them.
//! - [`comm`]: process groups, collectives with timeouts, the data-parallel × tensor-parallel layout, gradient buckets.
//! - [`diffusion`]: noise schedules, the forward process, samplers.
//! - [`model`]: the CS-UNet, on one rank or split over several.
//! - [`loss`]: the training loss.
//! - [`geoclip`]: GeoCLIP's frozen encoders of places and images, and their weights.
//! - [`shards`]: Parquet embeddings, in an order that does not depend on the number of workers.
//! - [`simulate`]: simulated photos, written as shards.
//! - [`checkpoint`]: writes the parts of a checkpoint in the background and reads them back.
//! - [`retrieval`]: answers from a gallery, and LocDiff-H, which refines LocDiff's answers with them.
//! - [`infer`]: from embeddings to places. All locating goes through it.
//! - [`train`]: the training loop.
//! - [`eval`]: computes the tables of the paper.

pub mod checkpoint;
pub mod comm;
pub mod diffusion;
pub mod eval;
pub mod geoclip;
pub mod infer;
pub mod loss;
pub mod model;
pub mod native;
pub mod retrieval;
pub mod shards;
pub mod shdd;
pub mod simulate;
pub mod train;
pub mod worker;
