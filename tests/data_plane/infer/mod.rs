//! Tests of the input rows of inference.

mod rows;
