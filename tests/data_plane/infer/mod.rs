//! From embeddings to places: rows in blocks.

mod rows;
