//! Results of the jobs that check or measure something.

use serde::{Deserialize, Serialize};

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
