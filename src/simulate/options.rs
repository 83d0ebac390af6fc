//! What to simulate.

use std::path::PathBuf;

use tch::Device;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Simulation {
    /// Photos; none: one per place.
    pub rows: Option<u64>,
    /// Seed of everything random but Q.
    pub seed: u64,
    /// Views per photo.
    pub views: u32,
    /// Places instead of GeoCLIP's gallery.
    pub coordinates: Option<PathBuf>,
    /// Folder with GeoCLIP's weights and gallery.
    pub geoclip: PathBuf,
    /// Replace the folder if it exists.
    pub overwrite: bool,
    /// Where embeddings are computed.
    pub device: Device,
    /// Threads.
    pub threads: usize,
    /// Photos computed at once; none: as memory suggests. Changes no byte.
    pub chunk_rows: Option<usize>,
}
