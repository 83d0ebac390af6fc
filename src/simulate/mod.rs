//! Makes simulated data sets: shards with the embeddings of simulated photos.
//!
//! In reading order: `photo` (a photo, and the trait of a world), `world1` and `world2` (decide what each photo shows,
//! without I/O), `look_map` (maps what a photo shows to the stored embedding), `options`, `cells` (divides places into
//! training and test places), `encoder` (computes the embeddings of photos), `simulation` (writes a folder of shards).

mod cells;
mod encoder;
mod look_map;
mod options;
mod photo;
mod simulation;
mod world1;
mod world2;

pub use cells::places_of_part;
pub use options::Simulation;
pub use photo::{Photo, Source};
pub use simulation::{join_pieces, simulate, simulate_pieces};
pub use world1::{BLOCK_PHOTOS, Candidates, World1};
pub use world2::World2;
