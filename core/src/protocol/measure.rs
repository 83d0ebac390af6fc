//! Results of the jobs that check and measure.

use serde::{Deserialize, Serialize};

/// The result of [`Job::Probe`](super::Job::Probe), which says all in its hello.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probed {}

/// The result of [`Job::SelfCheck`](super::Job::SelfCheck).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SelfCheck {
    /// Where it was computed.
    pub device: String,
    /// Rows and columns of the matrices that were multiplied.
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
    /// Every rank found the values that it expected.
    pub ok: bool,
    /// Time of one operation on the slowest rank, microseconds.
    pub us: f64,
    /// `bytes` over that time.
    pub gb_per_s: f64,
    /// Fingerprint of the bits that rank 0 got from numbers whose sums round.
    pub digest: String,
}

/// One row of the result of [`Job::BenchShdd`](super::Job::BenchShdd).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShddRow {
    /// Degree of the harmonics.
    pub degree: u32,
    /// Numbers per location.
    pub dims: u64,
    /// The fast form on one core, microseconds.
    pub us_per_location: f64,
    /// The scalar form on one core, microseconds.
    pub us_per_location_scalar: f64,
    /// The kernel on the worker's GPU, microseconds; none on the CPU.
    pub us_per_location_gpu: Option<f64>,
    /// Fast and scalar form gave the same bits, and the GPU the same numbers to 1e-6 of the largest.
    pub ok: bool,
}

/// One block of points of [`Job::Perturbation`](super::Job::Perturbation): the blocks are the same for any number of workers, and so are their sums.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PerturbationBlock {
    /// Degree of the codes.
    pub degree: u32,
    /// Which block, from 0.
    pub block: u32,
    /// Points in it.
    pub points: u32,
    /// Sum of their drifts, km.
    pub drift_km_sum: f64,
    /// Sum of the squares of their drifts, km².
    pub drift_km2_sum: f64,
    /// Largest drift, km.
    pub drift_km_max: f64,
    /// What the mean should be to first order, km.
    pub theory_km: f64,
    /// Points whose mode was also searched on a grid over the whole sphere, and found to be the same.
    pub searched: u32,
}
