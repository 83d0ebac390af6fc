//! LocDiff's control plane. It starts, supervises and stops the worker processes, and never links libtorch.
//!
//! Configuration, messages, exit codes and file access are in `locdiff_core`. The modules, in reading order:
//! - [`cli`]: the command line, defined with clap.
//! - [`error`]: expected errors and their exit codes.
//! - [`gpus`]: the GPUs of this machine, listed without libtorch.
//! - [`rendezvous`]: assigns ranks to nodes and devices.
//! - [`cluster`]: the connections between the launchers of several nodes.
//! - [`pulses`]: decides from heartbeats which worker is stuck. It does no I/O.
//! - [`coordinator`]: the state machine of a gang (the workers of one attempt). It does no I/O.
//! - [`supervisor`]: the processes and sockets that the coordinator controls.
//! - [`terminal`]: stderr, stdout and the progress bar, written by threads of their own.
//! - [`report`]: the error report of a failed gang.
//! - [`run_folder`]: the folder of a run, with its lock, configuration, attempts and checkpoints.
//! - [`verbs`]: one function per verb of the command line. The verbs print through [`output`].

#![forbid(unsafe_code)]

pub mod cli;
pub mod cluster;
pub mod coordinator;
pub mod error;
pub mod gpus;
pub mod output;
pub mod pulses;
pub mod rendezvous;
pub mod report;
pub mod run_folder;
pub mod supervisor;
pub mod terminal;
pub mod verbs;
