//! LocDiff's control plane: what starts, watches and ends workers. It never links libtorch.
//!
//! In reading order:
//! - [`cli`]: the command line, as clap sees it.
//! - [`config`]: TOML and flags into one validated [`config::RunConfig`] that knows where each value came from.
//! - [`exit_code`] and [`error`]: what a script sees when something goes wrong.
//! - [`gpus`]: the GPUs of this machine, counted without libtorch.
//! - [`rendezvous`]: which rank runs where.
//! - [`protocol`]: what launcher and worker say to each other.
//! - [`coordinator`]: the state machine of a gang of workers; pure.
//! - [`supervisor`]: the processes and sockets around it.
//! - [`progress`]: how training goes, on a terminal or in a log.
//! - [`report`]: what is said of a gang that failed.
//! - [`files`]: files that survive a crash, and crashes on purpose.
//! - [`run_folder`]: a run on disk: who holds it, what it was configured with, its checkpoints.
//! - [`verbs`]: one function per verb; [`output`] is how they speak.

#![forbid(unsafe_code)]

pub mod cli;
pub mod coordinator;
pub mod error;
pub mod gpus;
pub mod output;
pub mod progress;
pub mod rendezvous;
pub mod report;
pub mod run_folder;
pub mod supervisor;
pub mod verbs;
