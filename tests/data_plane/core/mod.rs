//! The core crate as the data plane uses it.

mod geo;
mod metrics;
mod philox;
mod tables;
mod tensorboard;
