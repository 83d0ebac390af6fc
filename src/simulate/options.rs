//! Options of `shards simulate`.

use std::path::PathBuf;

use tch::Device;

/// Options of [`simulate`](super::simulate).
#[derive(Debug, Clone)]
pub struct Simulation {
    /// Number of photos. `None`: one per place.
    pub rows: Option<u64>,
    /// Seed of all random numbers except those of Q.
    pub seed: u64,
    /// Views per photo.
    pub views: u32,
    /// Table of places to use instead of GeoCLIP's gallery.
    pub coordinates: Option<PathBuf>,
    /// Folder with GeoCLIP's weights and gallery.
    pub geoclip: PathBuf,
    /// Whether to replace an existing output folder.
    pub overwrite: bool,
    /// Device that computes the embeddings.
    pub device: Device,
    /// Number of CPU threads.
    pub threads: usize,
    /// Photos computed at a time. `None`: a default that bounds memory. Does not affect the output.
    pub chunk_rows: Option<usize>,
}
