//! Tables of ids and coordinates in files that users provide: truths, predictions, galleries, lists of places, and the
//! tables that accompany embeddings.
//!
//! The modules in reading order:
//! - `names`: the accepted column names.
//! - `reader`: reads a table row by row.
//! - `ids`: converts identifiers to text.
//! - `table`: reads a whole table into memory.
//! - `matrix`: reads matrices of numbers (`.npy` and safetensors).
//!
//! Invariant: no row is dropped silently, and no value is clamped. A longitude outside of -180 to 180 is an error (180
//! is stored as -180, which is the same meridian). An error names the file, and also the row if a single row is
//! invalid. Rows are counted from 0, without the header.

mod error;
mod ids;
mod matrix;
mod names;
mod reader;
mod table;

pub use error::TableError;
pub use ids::id;
pub use matrix::Matrix;
pub use names::{ColumnNames, EMBEDDING_NAMES, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, columns_named};
pub use reader::{TableReader, TableRow};
pub use table::{Table, read, read_places};
