//! GeoCLIP 1.3.0: frozen encoders that put places and images into one space of 512 dimensions, and the gallery.
//!
//! In reading order: `projection` (degrees to the plane), `location` (places to embeddings), `tiles` (many places, bits that do
//! not depend on who computes them), `head` (CLIP features to the same space), `gallery`, `folder` (all of it on disk,
//! checked), `wheel` (from the Python package to that folder).
//!
//! Invariant: what is computed with was checked against the folder's checksums, and the folder came from a wheel with the
//! pinned hash. Source: Vivanco Cepeda, Nayak, Shah, "GeoCLIP: Clip-inspired alignment between locations and images for
//! effective worldwide geo-localization", NeurIPS 2023; weights and gallery from PyPI's `geoclip` 1.3.0 (MIT).

mod error;
mod folder;
mod gallery;
mod head;
mod location;
mod projection;
mod tiles;
mod wheel;

pub use error::GeoclipError;
pub use folder::{Geoclip, Manifest, write_folder};
pub use gallery::Gallery;
pub use head::ImageHead;
pub use location::LocationEncoder;
pub use projection::equal_earth;
pub use tiles::{Embedder, for_each_tile, tile_rows};
pub use wheel::{WHEEL_SHA256, import};

/// Numbers of an embedding in the space that places and images share.
pub const EMBEDDING_WIDTH: usize = 512;
/// Numbers of a CLIP ViT-L/14 feature, which the image head takes.
pub const FEATURE_WIDTH: usize = 768;
