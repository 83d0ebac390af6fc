//! Tests of the data plane through its public interface, with real libtorch, real workers and real processes.
#![allow(clippy::print_stdout, reason = "tests print their measurements")]

mod checkpoint;
mod comm;
mod core;
mod diffusion;
mod eval;
mod geoclip;
mod infer;
mod layers;
mod loss;
mod methods;
mod model;
mod native;
mod python_support;
mod retrieval;
mod shards;
mod shdd;
mod simulate;
mod worker;

/// Resident memory of this process in bytes, read from `/proc/self/statm`. Pages have 4096 bytes.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages: u64 =
        text.split_whitespace().nth(1).expect("statm has several fields").parse().expect("statm holds numbers");
    pages * 4096
}
