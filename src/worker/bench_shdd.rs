//! `bench shdd`: compares the fast code for spherical harmonics with the scalar code on one core, in speed and values.
//! If the worker has a GPU, the code for GPUs is timed too, and its values are compared with those of the fast code.
//!
//! Each reported time is the minimum over several runs with the same points and the same memory, because other load on
//! the machine can only add time.

use std::time::Instant;

use locdiff_core::geo::UnitVector;
use locdiff_core::protocol::{ShddRow, WorkerSlot};
use locdiff_core::random::Stream;
use tch::{Device, Kind, Tensor};

use crate::native::cuda;
use crate::shdd::gpu::{Encoder, upload};
use crate::shdd::points::uniform_points_of;
use crate::shdd::{Basis, ShddError};

const DEGREES: [u32; 3] = [23, 47, 95];
/// Locations per run on the CPU.
const POINTS: usize = 2048;
/// Locations per run on the GPU.
const POINTS_GPU: usize = 1 << 18;
/// Number of runs. Only the fastest run counts.
const RUNS: usize = 15;
/// Largest difference allowed between GPU and CPU, relative to the largest value.
const GPU_ERROR_MAX: f64 = 1e-6;

/// Measures encoding for every degree.
pub(super) fn run(slot: &WorkerSlot) -> anyhow::Result<Vec<ShddRow>> {
    let points = uniform_points_of(Stream::Test(0), 0, 0, 0, POINTS)?;
    DEGREES.iter().map(|degree| measure(*degree, &points, slot.gpu)).collect()
}

fn measure(degree: u32, points: &[UnitVector], gpu: Option<u32>) -> anyhow::Result<ShddRow> {
    let basis = Basis::new(degree)?;
    let mut fast = vec![0.0_f32; points.len() * basis.dims()];
    let mut scalar = fast.clone();
    let us_per_location = best_us(|| basis.encode_into(points, &mut fast))? / points.len() as f64;
    let us_per_location_scalar = best_us(|| encode_scalar(&basis, points, &mut scalar))? / points.len() as f64;
    let mut ok = fast == scalar;
    let us_per_location_gpu = match gpu {
        None => None,
        Some(gpu) => {
            let (us, error) = measure_gpu(&basis, gpu, points, &fast)?;
            ok &= error <= GPU_ERROR_MAX;
            Some(us)
        }
    };
    Ok(ShddRow { degree, dims: basis.dims() as u64, us_per_location, us_per_location_scalar, us_per_location_gpu, ok })
}

/// Encodes with the scalar code into rows of f32.
fn encode_scalar(basis: &Basis, points: &[UnitVector], out: &mut [f32]) -> Result<(), ShddError> {
    let mut code = vec![0.0; basis.dims()];
    for (point, row) in points.iter().zip(out.chunks_exact_mut(basis.dims())) {
        basis.encode_scalar(*point, &mut code)?;
        row.iter_mut().zip(&code).for_each(|(narrow, wide)| *narrow = *wide as f32);
    }
    Ok(())
}

/// Measures encoding on a GPU. Returns the microseconds per location, and the largest difference of a result from
/// `want`, relative to the largest value.
fn measure_gpu(basis: &Basis, gpu: u32, points: &[UnitVector], want: &[f32]) -> anyhow::Result<(f64, f64)> {
    cuda::set_device(gpu as usize)?;
    let device = Device::Cuda(gpu as usize);
    let encoder = Encoder::new(basis, device)?;
    let points_n3 = upload(points, device)?;
    let got = encoder.encode(&points_n3)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_view([-1])?;
    let want = Tensor::f_from_slice(want)?.f_to_kind(Kind::Double)?;
    let error = (got - &want).abs().max().f_double_value(&[])? / want.abs().max().f_double_value(&[])?;
    let many = points_n3.f_repeat([(POINTS_GPU / points.len()) as i64, 1])?;
    let us = best_us(|| -> anyhow::Result<()> {
        let _codes = encoder.encode_unchecked(&many)?;
        Ok(cuda::synchronize()?)
    })?;
    Ok((us / POINTS_GPU as f64, error))
}

/// The time of the fastest of several runs, in microseconds.
fn best_us<E>(mut work: impl FnMut() -> Result<(), E>) -> anyhow::Result<f64>
where
    anyhow::Error: From<E>,
{
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let began = Instant::now();
        work()?;
        best = best.min(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(best)
}
