//! End-to-end tests of the launcher: the real binary, its messages and its exit codes. Workers are real, or a script that
//! misbehaves on demand.

mod command_line;
mod eval;
mod gang;
mod perturbation;
#[path = "../data_plane/python_support.rs"]
mod python_support;
mod run_folder;
mod small_shards;
mod stage;
mod train;
mod world;
