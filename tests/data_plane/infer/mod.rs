//! Tests of inference, which reads the rows to locate in blocks.

mod rows;
