//! Tests of inference: the rows that it locates.

mod rows;
