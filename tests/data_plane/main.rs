//! The data plane as others see it: real libtorch, real workers, real processes that talk to each other.
#![allow(clippy::print_stdout, reason = "tests print what they measured")]

mod checkpoint;
mod checkpoint_export;
mod checkpoint_hostile;
mod comm;
mod decode;
mod decode_aggregate;
mod diffusion;
mod eval_predictions;
mod eval_rows;
mod export_python;
mod geo;
mod geoclip;
mod geoclip_support;
mod gpu_model;
mod layers;
mod loss;
mod loss_split;
mod metrics;
mod model;
mod model_golden;
mod model_split;
mod model_support;
mod native_gemm;
mod native_optim;
mod native_philox;
mod native_random;
mod perturbation;
mod python_support;
mod retrieval;
mod retrieval_hybrid;
mod shards_build;
mod shards_contents;
mod shards_foreign;
mod shards_format;
mod shards_hostile;
mod shards_memory;
mod shards_placed;
mod shards_plan;
mod shards_prefetch;
mod shards_read_back;
#[cfg(feature = "s3")]
mod shards_s3;
#[cfg(feature = "s3")]
mod shards_s3_server;
mod shards_support;
mod shdd;
mod shdd_derivatives;
mod simulate;
mod tensorboard;
mod worker;

/// Memory of this process that is in RAM, from the kernel.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages: u64 = text.split_whitespace().nth(1).expect("a second field").parse().expect("a number");
    pages * 4096
}
