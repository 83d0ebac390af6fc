//! The launcher as a user meets it: the real binary, its messages and exit codes, with a worker that misbehaves on demand.

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
