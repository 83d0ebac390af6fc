//! Evaluation: predictions, rows, perturbation.

mod perturbation;
mod predictions;
mod rows;
