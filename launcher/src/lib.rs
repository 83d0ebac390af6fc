//! LocDiff's control plane: what starts, watches and ends workers. It never links libtorch.
//!
//! Configuration, messages, exit codes and files are in `locdiff_core`. In reading order:
//! - [`cli`]: the command line, as clap sees it.
//! - [`error`]: every expected error, with its exit code.
//! - [`gpus`]: the GPUs of this machine, counted without libtorch.
//! - [`rendezvous`]: which rank runs where.
//! - [`coordinator`]: the state machine of a gang of workers; pure.
//! - [`supervisor`]: the processes and sockets around it.
//! - [`progress`]: how training goes, on a terminal or in a log.
//! - [`report`]: what is said of a gang that failed.
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
