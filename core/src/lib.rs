//! What both planes know. No libtorch, no async runtime, no command line.
//!
//! In reading order:
//! - [`config`]: TOML and flags into one validated [`config::RunConfig`] that knows where each value came from.
//! - [`protocol`]: the messages between launcher and worker.
//! - [`exit_code`]: the exit codes that scripts see.
//! - [`files`]: files that survive a crash, and crashes on purpose.
//! - [`geo`]: points on the Earth, distances, grids.
//! - [`random`]: random numbers named by where they are used. The only unsafe code outside `locdiff::native`.
//! - [`metrics`]: scores and their intervals.
//! - [`tables`]: CSV and Parquet with ids and coordinates.
//! - [`predictions`]: anybody's predictions against the truth.
//! - [`tuning`]: the settings of LocDiff-H, and the choice among them.
//! - [`draw`]: maps as PNG.
//! - [`tensorboard`]: event files.

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

/// The version in `Cargo.toml`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The git revision of the build, "unknown" outside a checkout.
pub const REVISION: &str = env!("LOCDIFF_REVISION");
