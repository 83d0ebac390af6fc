//! LocDiff's data plane: everything that runs inside a worker process.
//!
//! In reading order:
//! - [`worker`]: the life cycle of a worker. It receives a job from the launcher and calls the other modules.
//! - [`native`]: a C++ shim over libtorch, with safe wrappers.
//! - [`shdd`]: encodes points on the sphere as spherical-harmonic coefficients, and decodes coefficients to points.
//! - [`comm`]: process groups, collectives with timeouts, the data-parallel × tensor-parallel layout, gradient buckets.
//! - [`diffusion`]: noise schedules, the forward process, samplers.
//! - [`model`]: the CS-UNet, on one rank or split over several.
//! - [`loss`]: the training loss.
//! - [`geoclip`]: GeoCLIP's frozen encoders of places and images, and their weights.
//! - [`shards`]: reads embeddings from Parquet files, in an order that does not depend on the number of workers.
//! - [`simulate`]: writes simulated photos as shards.
//! - [`checkpoint`]: writes the parts of a checkpoint in the background and reads them back.
//! - [`retrieval`]: answers with the gallery point that is most similar to a photo. LocDiff-H uses gallery points to
//!   refine LocDiff's answers.
//! - [`infer`]: turns embeddings into places. Training and evaluation both locate photos with this module.
//! - [`methods`]: the methods that can be trained: LocDiff, and GeoCLIP's image head.
//! - [`train`]: the training loop.
//! - [`eval`]: locates photos for an evaluation, and repeats the paper's perturbation experiment.

pub mod checkpoint;
pub mod comm;
pub mod diffusion;
pub mod eval;
pub mod geoclip;
pub mod infer;
pub mod loss;
pub mod methods;
pub mod model;
pub mod native;
pub mod retrieval;
pub mod shards;
pub mod shdd;
pub mod simulate;
pub mod train;
pub mod worker;
