//! Tables of ids and coordinates in the user's own files: truths, predictions, galleries, lists of places, and the tables
//! that accompany embeddings.
//!
//! In reading order:
//! - `names`: the accepted column names.
//! - `reader`: a table, row by row.
//! - `ids`: identifiers as text.
//! - `table`: a whole table in memory.
//! - `matrix`: files with one matrix of numbers (`.npy` and safetensors).
//!
//! Invariant: no row is dropped and no value is clamped or wrapped. Anything invalid is an error that names the file and the
//! row. Rows count from 0, without the header.

mod error;
mod ids;
mod matrix;
mod names;
mod reader;
mod table;

pub use error::TableError;
pub use ids::id;
pub use matrix::Matrix;
pub use names::{ColumnNames, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, columns_named};
pub use reader::{TableReader, TableRow};
pub use table::{Table, read, read_places};
