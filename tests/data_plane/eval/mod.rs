//! Tests of evaluation: the scoring of prediction files, and the perturbation suite.

mod perturbation;
mod predictions;
