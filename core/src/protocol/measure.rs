//! Results of the jobs that check or measure something.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;

/// Result of [`Job::Probe`](super::Job::Probe). The result is empty, because `Hello` contains all the information.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probed {}

/// Result of [`Job::SelfCheck`](super::Job::SelfCheck).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SelfCheck {
    /// Device that computed the product.
    pub device: String,
    /// Number of rows and columns of the multiplied matrices.
    pub size: u32,
    /// Largest difference from the exact product.
    pub error_max: f64,
}

/// One row of the result of [`Job::BenchCollectives`](super::Job::BenchCollectives).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CollectiveRow {
    /// Name of the operation.
    pub op: String,
    /// Size of one rank's tensor.
    pub bytes: u64,
    /// Whether every rank got the expected values.
    pub ok: bool,
    /// Mean time per operation on the slowest rank, microseconds.
    pub us: f64,
    /// `bytes` divided by the time per operation, in GB/s; 0 for a barrier.
    pub gb_per_s: f64,
    /// Hash of the bits of rank 0's result for pseudo-random inputs. Sums of these inputs are rounded, so adding them
    /// in another order changes the hash.
    pub digest: String,
}

/// One row of the result of [`Job::BenchShdd`](super::Job::BenchShdd).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShddRow {
    /// Degree of the harmonics.
    pub degree: u32,
    /// Dimensions of a code.
    pub dims: u64,
    /// Time that the fast implementation takes per location on one core, microseconds.
    pub us_per_location: f64,
    /// Time that the scalar implementation takes per location on one core, microseconds.
    pub us_per_location_scalar: f64,
    /// Time that the kernel on the worker's GPU takes per location, microseconds; `None` if the worker has no GPU.
    pub us_per_location_gpu: Option<f64>,
    /// Whether the fast and scalar implementations agree to the bit, and the GPU agrees to 1e-6 of the largest value.
    pub ok: bool,
}

/// Result of [`Job::Perturbation`](super::Job::Perturbation) for one block of points. The drift of a point is the
/// distance by which noise moves the mode of its code. Neither the blocks nor their sums depend on the number of
/// workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PerturbationBlock {
    /// Degree of the codes.
    pub degree: u32,
    /// Index of the block, from 0.
    pub block: u32,
    /// Number of points in the block.
    pub points: u32,
    /// Sum of the drifts, km.
    pub drift_km_sum: f64,
    /// Sum of the squared drifts, km².
    pub drift_km2_sum: f64,
    /// Largest drift, km.
    pub drift_km_max: f64,
    /// Mean drift predicted by first-order theory, km.
    pub theory_km: f64,
    /// Number of points for which a second search, on a grid over the whole sphere, confirmed the mode.
    pub searched: u32,
}

/// What `bench train` measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainBench {
    /// The resolved configuration.
    pub config: RunConfig,
    /// Number of steps to time.
    pub steps: u32,
    /// Folder for the files of a training on `shards.train`. `None`: train only on random rows.
    pub scratch: Option<PathBuf>,
    /// Whether to profile a few steps after the timed ones.
    pub profile: bool,
}

/// The times of training steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepSpeed {
    /// Median time of a step, milliseconds.
    pub ms_per_step: f64,
    /// Time that 10 % of the steps undercut, milliseconds.
    pub ms_lo: f64,
    /// Time that 10 % of the steps exceed, milliseconds.
    pub ms_hi: f64,
    /// Rows per second over all workers, from the median.
    pub samples_per_s: f64,
    /// Operations of the matrix products per second and worker, in TFLOP/s, from the median.
    pub tflops: f64,
    /// Memory traffic of the parameter update per worker, in GB/s, from the median. This is a lower bound.
    /// It counts 38 bytes per parameter with bf16 products and 40 with f32 products. The gradient is read twice. The
    /// weight, its average and its two moments (all f32) are each read once and written once. With bf16 products, the
    /// gradient is bf16, and a bf16 copy of the weight is written too.
    pub gb_per_s: f64,
    /// Fraction of the time that rank 0 spent waiting for data, 0 to 1.
    pub data_wait: f64,
}

/// Result of [`Job::BenchTrain`](super::Job::BenchTrain).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainBenched {
    /// How gradients are computed.
    pub path: String,
    /// Number of nodes of the CUDA graph of a step; `None` without a graph.
    pub graph_nodes: Option<u64>,
    /// Steps on random rows in the memory of the device.
    pub memory: StepSpeed,
    /// Training on `shards.train` with TensorBoard files; `None` if this measurement was not requested.
    pub end_to_end: Option<StepSpeed>,
    /// Largest amount of GPU memory that libtorch allocated, GiB; `None` on the CPU.
    pub peak_gib: Option<f64>,
    /// Speed limits of the device.
    pub ceilings: Ceilings,
    /// Profile of rank 0; `None` if it was not asked for.
    pub profile: Option<StepProfile>,
}

/// Where the time of a training step or a sampler step goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// Whether the profiled steps replayed a CUDA graph.
    pub is_graph: bool,
    /// One row for each operator on the CPU, or for each kernel on a GPU. The longest time comes first.
    pub rows: Vec<ProfileRow>,
}

/// One row of a [`StepProfile`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileRow {
    /// Name of the operator or kernel.
    pub name: String,
    /// Mean number of calls per step.
    pub calls: f64,
    /// Mean time per step, milliseconds. The time of an operator does not include the operators that it called.
    pub ms_per_step: f64,
    /// Share of the time of all rows, percent.
    pub percent: f64,
    /// When its first call began, milliseconds after the first call of the first profiled step.
    pub first_ms: f64,
}

/// Speed limits of a device, measured in the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Speed of one large matrix product in the number format of the network, TFLOP/s.
    pub product_tflops: f64,
    /// Bytes read and written per second by a copy within the memory of the device, GB/s.
    pub memory_gb_per_s: f64,
}

/// What `bench sample` measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleBench {
    /// The resolved configuration.
    pub config: RunConfig,
    /// Number of images to locate.
    pub images: u32,
    /// Whether to locate the images once more under a profiler.
    pub profile: bool,
    /// Whether to time retrieval too.
    pub retrieval: bool,
}

/// Result of [`Job::BenchSample`](super::Job::BenchSample): times per image for sampling, decoding and aggregation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleBenched {
    /// How a sampler step is computed.
    pub path: String,
    /// Time for all images divided by their number, seconds. It includes the preparation of the sampler.
    pub s_per_image: f64,
    /// Median over blocks of images of the time per image, milliseconds.
    pub ms_per_image: f64,
    /// Time per image that 10 % of the blocks undercut, milliseconds.
    pub ms_lo: f64,
    /// Time per image that 10 % of the blocks exceed, milliseconds.
    pub ms_hi: f64,
    /// Time to prepare the network and the anchors and to locate a first block, seconds. It is not part of the other
    /// times.
    pub prepare_s: f64,
    /// Speed of the network's matrix products in TFLOP/s, computed from the time for all images. If the network is
    /// collapsed, the products of the collapsed network are counted.
    pub tflops: f64,
    /// Number of places among which samples are decoded. A gallery for retrieval has as many.
    pub anchors: u64,
    /// Time per image of retrieval with GeoCLIP's image head, seconds; `None` if it was not requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retrieval_s_per_image: Option<f64>,
    /// Largest amount of GPU memory that libtorch allocated, GiB; `None` on the CPU.
    pub peak_gib: Option<f64>,
    /// Speed limits of the device.
    pub ceilings: Ceilings,
    /// Profile of all blocks, divided by the number of sampler steps of all blocks. The profile includes the
    /// preparation of the sampler and the decoding. `None` if no profile was requested.
    pub profile: Option<StepProfile>,
}
