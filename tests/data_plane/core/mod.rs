//! The core crate: geography, metrics, random numbers, tables, TensorBoard files.

mod geo;
mod metrics;
mod philox;
mod tables;
mod tensorboard;
