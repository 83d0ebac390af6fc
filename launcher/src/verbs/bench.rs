//! `bench`: the benchmarks that need more than one job.

pub(super) mod shdd;
pub(super) mod speed;
