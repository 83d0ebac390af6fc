//! The data plane as others see it: real libtorch, real workers, real processes that talk to each other.
#![allow(clippy::print_stdout, reason = "tests print what they measured")]

mod checkpoint;
mod comm;
mod core;
mod diffusion;
mod eval;
mod geoclip;
mod infer;
mod layers;
mod loss;
mod model;
mod native;
mod python_support;
mod retrieval;
mod shards;
mod shdd;
mod simulate;
mod worker;

/// Memory of this process that is in RAM, from the kernel.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages: u64 = text.split_whitespace().nth(1).expect("a second field").parse().expect("a number");
    pages * 4096
}
