//! Tests of inference: the rows to locate are read in blocks.

mod rows;
