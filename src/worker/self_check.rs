//! Checks that libtorch computes correctly in this process, on this device.

use anyhow::ensure;
use locdiff_core::protocol::{SelfCheck, WorkerSlot};
use tch::{Device, Kind, Tensor};

use crate::eval::locate::device;

/// Rows and columns of the matrices.
const SIZE: u32 = 256;

/// Multiplies matrices of small integers, whose product is exact in f32, and compares the result with a plain loop.
pub(super) fn run(slot: &WorkerSlot) -> anyhow::Result<SelfCheck> {
    let device = device(slot);
    if let Device::Cuda(index) = device {
        let gpus = tch::Cuda::device_count();
        ensure!((index as i64) < gpus, "no GPU {index}: the number of GPUs that this worker can use is {gpus}");
    }
    let size = SIZE as usize;
    let entry = |row: usize, column: usize| ((row * 7 + column * 3 + slot.rank as usize) % 11) as f32 - 5.0;
    let values: Vec<f32> = (0..size * size).map(|index| entry(index / size, index % size)).collect();
    let matrix = Tensor::f_from_slice(&values)?.f_reshape([SIZE.into(), SIZE.into()])?.f_to_device(device)?;
    let product = matrix.f_matmul(&matrix)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
    let found: Vec<f32> = product.f_reshape([-1])?.try_into()?;
    let exact = |row: usize, column: usize| -> f32 { (0..size).map(|k| entry(row, k) * entry(k, column)).sum() };
    let errors = found.iter().enumerate().map(|(index, value)| (value - exact(index / size, index % size)).abs());
    let error_max = f64::from(errors.fold(0.0, f32::max));
    ensure!(
        error_max == 0.0,
        "libtorch's product of integer matrices is off by {error_max} on {device:?}, wanted an exact result"
    );
    Ok(SelfCheck { device: format!("{device:?}"), size: SIZE, error_max })
}
