//! Ids and coordinates as people have them: truths, predictions, galleries, lists of places, tables beside embeddings.
//!
//! In reading order: `names` (what a column may be called), `reader` (a table row by row), `ids` (identifiers as text), `table`
//! (a whole table in memory), `matrix` (files with one matrix of numbers: `.npy` and safetensors).
//!
//! Invariant: nothing is left out, clamped or wrapped. What is not as it should be is an error that names file and row, from 0,
//! the header not counted.

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
