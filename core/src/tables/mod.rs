//! Tables of ids and coordinates in files that users provide: truths, predictions, galleries, lists of places, and the
//! tables that accompany embeddings.
//!
//! The modules in reading order:
//! - `names`: the accepted column names.
//! - `reader`: reads a table row by row.
//! - `ids`: converts identifiers to text.
//! - `table`: reads a whole table into memory.
//! - `matrix`: reads matrices of numbers (`.npy` and safetensors).
//! - `embeddings`: copies embeddings to a Parquet file.
//! - `split`: cuts a table into parts that share neither a place nor an author.
//! - `select`: copies some rows of a table to a new file.
//!
//! Invariant: no row is dropped silently, and no value is clamped. A longitude outside of -180 to 180 is an error (180
//! is stored as -180, which is the same meridian). An error names the file, and also the row if a single row is
//! invalid. Rows are counted from 0, without the header.

mod embeddings;
mod error;
mod ids;
mod matrix;
mod names;
mod reader;
mod select;
mod split;
mod table;

pub use embeddings::{CopiedRows, copy_embeddings, copy_lines, needs_copy, to_halves};
pub use error::TableError;
pub use ids::id;
pub use matrix::Matrix;
pub use names::{AUTHOR_NAMES, ColumnNames, EMBEDDING_NAMES, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, columns_named};
pub use reader::{PlacesPresent, TableReader, TableRow};
pub use select::copy_rows;
pub use split::{CutTable, PartCounts, PartShare, TableCut};
pub use table::{Table, read, read_places};
