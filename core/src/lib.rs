//! Code shared by the control plane (launcher) and the data plane (worker).
//!
//! No libtorch, no async runtime, no command line.
//!
//! In reading order:
//! - [`config`]: merges TOML and flags into one validated [`config::RunConfig`] and records where each value came from.
//! - [`protocol`]: the messages between launcher and worker.
//! - [`exit_code`]: the exit codes that scripts see.
//! - [`files`]: crash-safe file writing, with fault injection for tests.
//! - [`geo`]: points on the Earth, distances, grids.
//! - [`random`]: counter-based random numbers, addressed by where they are used. The only unsafe code outside
//!   `locdiff::native`.
//! - [`metrics`]: scores and their confidence intervals.
//! - [`tables`]: CSV and Parquet files with ids and coordinates.
//! - [`predictions`]: matches predictions from a file with the true locations.
//! - [`tuning`]: the settings of LocDiff-H that tuning tries, and the choice of the best.
//! - [`draw`]: draws maps as PNG images.
//! - [`tensorboard`]: reads and writes event files.

#![deny(unsafe_code)]

pub mod config;
pub mod draw;
pub mod exit_code;
pub mod files;
pub mod geo;
pub mod metrics;
pub mod predictions;
pub mod protocol;
pub mod random;
pub mod tables;
pub mod tensorboard;
pub mod tuning;

/// Version of the crate, from `Cargo.toml`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Git revision of the build; "unknown" if it was not built in a checkout.
pub const REVISION: &str = env!("LOCDIFF_REVISION");
