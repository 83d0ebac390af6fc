//! Simulated worlds: embeddings of photos that nobody took, as shards.
//!
//! In reading order: `world` (what a photo shows: pure), `options`, `studio` (photos of a world into embeddings), `simulation` (a folder of them).

mod options;
mod simulation;
mod studio;
mod world;

pub use options::Simulation;
pub use simulation::simulate;
pub use world::{BLOCK_PHOTOS, Candidates, Photo, Source, World};
