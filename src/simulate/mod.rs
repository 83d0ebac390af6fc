//! Makes simulated data sets: shards with the embeddings of simulated photos.
//!
//! In reading order: `world` (decides what each photo shows, without I/O), `options`, `encoder` (computes the
//! embeddings of photos), `simulation` (writes a folder of shards).

mod encoder;
mod options;
mod simulation;
mod world;

pub use options::Simulation;
pub use simulation::simulate;
pub use world::{BLOCK_PHOTOS, Candidates, Photo, Source, World};
