//! GeoCLIP 1.3.0: frozen encoders that embed places and images in one space of 512 dimensions, and its gallery.
//!
//! In reading order: `projection` (degrees to the plane), `location` (places to embeddings), `tiles` (embeds many
//! places with bits that do not depend on threads or batches), `head` (CLIP features to the same space), `gallery`,
//! `folder` (weights and gallery on disk), `wheel` (imports the Python package into that folder).
//!
//! Invariant: all weights in use were verified against the checksums of the folder, and the folder came from a wheel
//! with the pinned hash. Source: Vivanco Cepeda, Nayak, Shah, "GeoCLIP: Clip-inspired alignment between locations and
//! images for effective worldwide geo-localization", NeurIPS 2023; weights and gallery from PyPI's `geoclip` 1.3.0
//! (MIT).

mod error;
mod folder;
mod gallery;
mod head;
mod location;
mod projection;
mod tiles;
mod wheel;

pub use error::GeoclipError;
pub use folder::{Geoclip, GeoclipManifest, write_folder};
pub use gallery::GalleryEmbeddings;
pub use head::GeoclipHead;
pub use location::LocationEncoder;
pub use projection::equal_earth;
pub use tiles::{Embedder, for_each_tile, tile_rows};
pub use wheel::{WHEEL_SHA256, import};

/// Width of the embeddings of places and images.
pub const EMBEDDING_WIDTH: usize = 512;
/// Width of a CLIP ViT-L/14 feature, the input of the image head.
pub const FEATURE_WIDTH: usize = 768;
