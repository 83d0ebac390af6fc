//! LocDiff's control plane: starts, supervises and stops workers. It never links libtorch.
//!
//! Configuration, messages, exit codes and file access are in `locdiff_core`. Modules in reading order:
//! - [`cli`]: the command line, defined with clap.
//! - [`error`]: expected errors and their exit codes.
//! - [`gpus`]: the GPUs of this machine, listed without libtorch.
//! - [`rendezvous`]: assigns ranks to devices.
//! - [`coordinator`]: the state machine of a gang, the workers of one attempt. Pure.
//! - [`supervisor`]: the processes and sockets that the coordinator controls.
//! - [`progress`]: training progress, on a terminal or in a log.
//! - [`report`]: the error report of a failed gang.
//! - [`run_folder`]: a run on disk: its lock, configuration, attempts and checkpoints.
//! - [`verbs`]: one function per verb. They print through [`output`].

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
