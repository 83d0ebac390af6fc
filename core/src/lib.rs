//! Code shared by the control plane (launcher) and the data plane (worker).
//!
//! This crate uses no libtorch and no async runtime, and it has no command line.
//!
//! The modules in reading order:
//! - [`config`]: merges TOML and flags into one validated [`config::RunConfig`] and records where each value came from.
//! - [`protocol`]: the messages between launcher and worker.
//! - [`pulse`]: what a worker is doing, for the launcher to watch.
//! - [`stop`]: the launcher's request to stop early.
//! - [`exit_code`]: the exit codes that scripts see.
//! - [`cgroup`]: memory limits of this process.
//! - [`files`]: crash-safe file writing, with fault injection for tests.
//! - [`geo`]: points on the Earth, distances, grids.
//! - [`random`]: counter-based random numbers. Each number is a function of the seed and of its position (stream, step,
//!   sample, element). This module contains the only unsafe code outside `locdiff::native`.
//! - [`metrics`]: scores and their confidence intervals.
//! - [`tables`]: CSV and Parquet files with ids and coordinates.
//! - [`predictions`]: matches predictions from a file with the true locations.
//! - [`prior_file`]: reads what is known already about the places of photos, from GeoJSON.
//! - [`calibration`]: radii that hold the truth with a known probability.
//! - [`answers`]: writes predictions as Parquet, CSV, GeoJSON or lines of JSON.
//! - [`cells`]: writes the densities of predictions as Parquet.
//! - [`exported`]: the metadata and the checksum of exported models.
//! - [`tuning`]: the LocDiff-H settings that `eval --tune` tries, and the choice of the best one.
//! - [`draw`]: draws maps as PNG images.
//! - [`tensorboard`]: reads and writes event files.
//! - [`parallel`]: runs a function on several threads.
//! - [`text`]: helpers for messages: readable durations, similar names.

#![deny(unsafe_code)]

pub mod answers;
pub mod calibration;
pub mod cells;
pub mod cgroup;
pub mod config;
pub mod draw;
pub mod exit_code;
pub mod exported;
pub mod files;
pub mod geo;
pub mod metrics;
pub mod parallel;
pub mod predictions;
pub mod prior_file;
pub mod protocol;
pub mod pulse;
pub mod random;
pub mod stop;
pub mod tables;
pub mod tensorboard;
pub mod text;
pub mod tuning;

/// Version of the crate, from `Cargo.toml`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Git revision of the source code; "unknown" if the program was not built in a git checkout.
pub const REVISION: &str = env!("LOCDIFF_REVISION");
