//! Inference: reading the rows to locate, in blocks.

mod rows;
