//! The shard format: writes and decodes Parquet files and their manifest. The decoder works on bytes in memory, which
//! module `source` has read.
//!
//! In reading order:
//! - `columns`: the size of a number, and the column names of views.
//! - `manifest`: parses and encodes the manifest; uses `checksum` and `statistics`.
//! - `writer`: writes a folder of shards; uses `file_writer` and `checks`.
//! - `footer`: finds the columns of a file and the places of their chunks.
//! - `decode`: decodes a column chunk; uses `levels`.
//! - `page_header`: parses the header of a page.
//! - `careful`: decodes the chunks that `decode` does not support.

mod careful;
mod checks;
mod checksum;
mod columns;
mod decode;
mod file_writer;
mod footer;
mod levels;
mod manifest;
mod page_header;
mod statistics;
mod writer;

pub use checksum::Checksum;
pub use columns::ELEMENT_BYTES;
pub use file_writer::WriterRows;
pub use footer::Coordinates;
pub use manifest::{ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup, SCHEMA_VERSION};
pub use statistics::{MomentSums, Statistics};
pub use writer::{FILE_BYTES, ROWS_PER_GROUP, ShardWriter, WriterOptions, check_target};

pub(super) use careful::{BadValue, CarefulChunk};
pub(super) use checks::{first_not_finite, is_within, outside};
pub(super) use decode::{Chunk, ChunkBytes, DecodedNumber, Number, split_levels};
pub(super) use footer::{Column, Footer, footer_bytes};
pub(super) use page_header::split_plain_page;
