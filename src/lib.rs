//! LocDiff's data plane: what one worker process does.
//!
//! In reading order:
//! - [`worker`]: the life of a worker; it speaks with the launcher and calls everything else.
//! - [`native`]: the C++ shim over libtorch and its safe face.
//! - [`shdd`]: points as coefficients of spherical harmonics, and back.
//! - [`comm`]: process groups, collectives with timeouts, the data × tensor layout, gradient buckets.
//! - [`diffusion`]: noise schedules, the forward process, samplers.
//! - [`model`]: the CS-UNet, whole or split over ranks.
//! - [`loss`]: what training minimises.
//! - [`geoclip`]: frozen encoders of places and images, and their weights.
//! - [`shards`]: Parquet embeddings, in an order that never depends on who reads.
//! - [`simulate`]: worlds of photos that nobody took, as shards.
//! - [`checkpoint`]: parts of a checkpoint, written in the background and read back.
//! - [`retrieval`]: answers from a gallery, and LocDiff-H, which lets them refine LocDiff's.
//! - [`infer`]: from embeddings to places; the one way to locate.
//! - [`train`]: the loop.
//! - [`eval`]: tables of the paper, computed.

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
