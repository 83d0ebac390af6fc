//! GeoCLIP 1.3.0: frozen encoders that embed places and images in one space of 512 dimensions, and a gallery of places.
//!
//! In reading order:
//! - `projection`: projects places to the plane.
//! - `location`: encodes places.
//! - `tiles`: encodes many places, bit-identically for any number of threads and any batch.
//! - `head`: maps CLIP features of images to the same space.
//! - `gallery`: the embeddings of a list of places.
//! - `folder`: stores weights and gallery on disk.
//! - `wheel`: imports weights and gallery from the wheel of the Python package `geoclip`.
//!
//! Invariant: all weights in use were verified against the checksums in the folder's manifest. [`import`] writes the
//! folder only from a wheel with the pinned hash.
//!
//! Source: Vivanco Cepeda, Nayak, Shah, "GeoCLIP: Clip-inspired alignment between locations and images for effective
//! worldwide geo-localization", NeurIPS 2023; weights and gallery from PyPI's `geoclip` 1.3.0 (MIT).

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
