//! Options of `shards simulate`.

use std::path::PathBuf;

use locdiff_core::protocol::{CellSplit, SimulatedWorld};
use tch::Device;

/// Options of [`simulate`](super::simulate).
#[derive(Debug, Clone)]
pub struct Simulation {
    /// Number of photos. `None` means one photo per place.
    pub rows: Option<u64>,
    /// The rule by which the photos are simulated.
    pub world: SimulatedWorld,
    /// Seed of all random numbers, except those of the map to stored embeddings, which is the same for all seeds.
    pub seed: u64,
    /// Views per photo.
    pub views: u32,
    /// Table of the places where photos are taken. `None` means the places of GeoCLIP's gallery.
    pub coordinates: Option<PathBuf>,
    /// The part of the places to use. `None` means all places.
    pub cells: Option<CellSplit>,
    /// Folder with GeoCLIP's weights and gallery.
    pub geoclip: PathBuf,
    /// Whether to replace an existing output folder.
    pub overwrite: bool,
    /// Number of rows per file. `None` means files of about 512 MiB.
    pub rows_per_file: Option<u64>,
    /// Device that computes the embeddings.
    pub device: Device,
    /// Number of CPU threads.
    pub threads: usize,
    /// Number of photos to compute at a time. `None` means a default that bounds memory. The number does not affect the
    /// output.
    pub chunk_rows: Option<usize>,
}
