//! Evaluation: predictions, perturbation.

mod perturbation;
mod predictions;
