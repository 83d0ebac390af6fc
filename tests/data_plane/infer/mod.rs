//! Tests of inference: its input rows.

mod rows;
