//! `bench collectives`: checks the values of every collective on real processes and measures its bandwidth.
//!
//! Bandwidth is the size of one rank's tensor divided by the time of the slowest rank.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use anyhow::ensure;
use locdiff_core::protocol::CollectiveRow;
use tch::{Device, Kind, Tensor};

use super::error::JobError;
use crate::comm::{Communicator, Group, ReduceOp};

/// Tensor sizes, bytes: 1 KiB to 64 MiB.
const SIZES_BYTES: [usize; 9] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];

/// Bytes that a measurement should transfer. The number of repetitions (2 to 50, the same on every rank) is chosen
/// accordingly.
const VOLUME_BYTES: usize = 16 << 20;

const OPERATIONS: [Operation; 7] = [
    Operation::AllReduce(ReduceOp::Sum),
    Operation::AllReduce(ReduceOp::Max),
    Operation::AllReduce(ReduceOp::Mean),
    Operation::Broadcast,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Barrier,
];

#[derive(Debug, Clone, Copy)]
enum Operation {
    AllReduce(ReduceOp),
    Broadcast,
    AllGather,
    ReduceScatter,
    Barrier,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce(ReduceOp::Sum) => "all_reduce_sum",
            Self::AllReduce(ReduceOp::Max) => "all_reduce_max",
            Self::AllReduce(ReduceOp::Mean) => "all_reduce_mean",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Barrier => "barrier",
        }
    }

    /// The largest error that a correct result may have. To compute a mean, NCCL divides each value before it adds. The
    /// values are at most 50, and the division rounds if the number of ranks is not a power of two. All other
    /// operations are exact.
    fn rounding(self) -> f64 {
        match self {
            Self::AllReduce(ReduceOp::Mean) => 50.0 * f64::from(f32::EPSILON),
            _ => 0.0,
        }
    }

    /// The tensor sizes to measure. One size is enough for a barrier, which transfers no data.
    fn sizes_bytes(self) -> &'static [usize] {
        match self {
            Self::Barrier => &SIZES_BYTES[..1],
            _ => &SIZES_BYTES,
        }
    }

    /// Runs the operation. Takes the input by value, because some operations work in place.
    fn apply(self, group: &Group, mut input: Tensor) -> Result<Tensor, JobError> {
        match self {
            Self::AllReduce(op) => group.all_reduce(&mut input, op)?,
            Self::Broadcast => group.broadcast(&mut input, group.size() - 1)?,
            Self::AllGather => return Ok(group.all_gather(&input)?),
            Self::ReduceScatter => {
                let parts = input.reshape([i64::from(group.size()), -1]);
                return Ok(group.reduce_scatter(&parts, ReduceOp::Sum)?);
            }
            Self::Barrier => group.barrier()?,
        }
        Ok(input)
    }

    /// The expected result of `apply`, computed without the other ranks. The inputs are small integers, so every result
    /// is exact in f32, except a mean if the number of ranks is not a power of two.
    fn expected(self, group: &Group, elements: usize) -> anyhow::Result<Tensor> {
        let ranks = || (0..group.size()).map(|rank| integers(rank, elements));
        let sum = || ranks().reduce(|sum, next| sum + next).unwrap_or_default();
        let tensor = match self {
            Self::AllReduce(ReduceOp::Sum) => sum(),
            Self::AllReduce(ReduceOp::Max) => ranks().reduce(|most, next| most.maximum(&next)).unwrap_or_default(),
            Self::AllReduce(ReduceOp::Mean) => sum() / f64::from(group.size()),
            Self::Broadcast => integers(group.size() - 1, elements),
            Self::AllGather => Tensor::f_cat(&ranks().collect::<Vec<_>>(), 0)?,
            Self::ReduceScatter => {
                let part = (elements / group.size() as usize) as i64;
                sum().f_narrow(0, part * i64::from(group.rank()), part)?
            }
            Self::Barrier => integers(group.rank(), elements),
        };
        Ok(tensor)
    }
}

/// Checks and measures every operation. A row is `ok` only if the values are correct on every rank.
pub(super) fn run(communicator: &Communicator, bytes_max: u64) -> anyhow::Result<Vec<CollectiveRow>> {
    let group = communicator.world();
    let mut rows = Vec::new();
    for operation in OPERATIONS {
        for bytes in operation.sizes_bytes().iter().filter(|bytes| **bytes as u64 <= bytes_max) {
            // Round down to a multiple of the number of ranks.
            let elements = bytes / 4 / group.size() as usize * group.size() as usize;
            ensure!(elements > 0, "{bytes} bytes are too few to split over {} ranks", group.size());
            rows.push(measure(operation, group, elements)?);
        }
    }
    Ok(rows)
}

fn measure(operation: Operation, group: &Group, elements: usize) -> anyhow::Result<CollectiveRow> {
    let device = group.device();
    let input = integers(group.rank(), elements).f_to_device(device)?;
    let found = operation.apply(group, input.copy())?.f_to_device(Device::Cpu)?;
    let expected = operation.expected(group, elements)?;
    let difference = (found.f_reshape([-1])? - expected.f_reshape([-1])?).f_abs()?.f_max()?.f_double_value(&[])?;
    let is_correct = difference <= operation.rounding();
    let ok = is_true_on_all_ranks(group, is_correct)?;
    let random = fractions(group.rank(), elements).f_to_device(device)?;
    let digest = digest(&operation.apply(group, random)?)?;

    let bytes = elements * 4;
    let repetitions = (VOLUME_BYTES / bytes).clamp(2, 50);
    group.barrier().map_err(JobError::from)?;
    let mut mine = Duration::ZERO;
    for _ in 0..repetitions {
        let own = input.copy();
        synchronize(device);
        let began = Instant::now();
        let _result = operation.apply(group, own)?;
        synchronize(device);
        mine += began.elapsed();
    }
    let seconds = max_over_ranks(group, mine.as_secs_f64() / repetitions as f64)?;
    Ok(CollectiveRow {
        op: operation.name().to_owned(),
        bytes: bytes as u64,
        ok,
        us: seconds * 1e6,
        gb_per_s: if matches!(operation, Operation::Barrier) { 0.0 } else { bytes as f64 / seconds / 1e9 },
        digest,
    })
}

fn integers(rank: u32, elements: usize) -> Tensor {
    let index = Tensor::arange(elements as i64, (Kind::Int64, Device::Cpu));
    ((index * 7 + i64::from(rank) * 13).remainder(101) - 50).to_kind(Kind::Float)
}

/// Fractions from a hash of rank and index. Adding such fractions causes rounding errors, so the bits of a sum reveal
/// the order of summation.
fn fractions(rank: u32, elements: usize) -> Tensor {
    let index = Tensor::arange(elements as i64, (Kind::Int64, Device::Cpu));
    let mixed = (index + (i64::from(rank) << 40)) * 0x9E37_79B9_7F4A_7C15_u64.cast_signed();
    (mixed.bitwise_right_shift(&Tensor::from(40_i64)).to_kind(Kind::Float)) / f64::from(1 << 23)
}

/// A hash of the bits of a tensor.
fn digest(tensor: &Tensor) -> anyhow::Result<String> {
    let values: Vec<f32> = tensor.f_to_device(Device::Cpu)?.f_reshape([-1])?.try_into()?;
    let mut hasher = DefaultHasher::new();
    values.iter().for_each(|value| value.to_bits().hash(&mut hasher));
    Ok(format!("{:016x}", hasher.finish()))
}

fn is_true_on_all_ranks(group: &Group, mine: bool) -> anyhow::Result<bool> {
    Ok(max_over_ranks(group, if mine { 0.0 } else { 1.0 })? == 0.0)
}

fn max_over_ranks(group: &Group, mine: f64) -> anyhow::Result<f64> {
    let mut tensor = Tensor::from_slice(&[mine]).f_to_device(group.device())?;
    group.all_reduce(&mut tensor, ReduceOp::Max).map_err(JobError::from)?;
    Ok(tensor.f_double_value(&[0])?)
}

fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}
