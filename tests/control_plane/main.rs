//! End-to-end tests of the launcher. They run the real binary and check its messages and exit codes. The worker is the
//! real program, or a script that misbehaves as the test demands. `run_folder` also tests the library directly.

mod bench;
mod command_line;
mod eval;
mod first_hour;
mod gang;
mod nodes;
mod perturbation;
#[path = "../data_plane/python_support.rs"]
mod python_support;
mod run_folder;
mod small_shards;
mod stage;
mod train;
mod world;
