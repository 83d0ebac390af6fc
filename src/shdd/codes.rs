//! Encodes points on the device of the network, with the fast CPU implementation or the CUDA kernel. Applies the
//! low-pass filter if there is one.
// Letters in tensor names: n points, d dimensions of the code.

use locdiff_core::geo::UnitVector;
use tch::{Device, Tensor};

use super::ShddError;
use super::filter::{Filter, Selection};
use super::gpu::{Encoder, upload};
use super::harmonics::Basis;

/// Points in the memory of the device that encodes them.
#[derive(Debug)]
pub enum Points {
    /// In main memory.
    Host(Vec<UnitVector>),
    /// On the GPU: `[n, 3]`, f64.
    Device(Tensor),
}

impl Points {
    /// Replaces the points. If their number does not change, device memory is reused.
    pub fn put(&mut self, points: Vec<UnitVector>, device: Device) -> Result<(), ShddError> {
        match self {
            Self::Device(points_n3) if points_n3.size()[0] == points.len() as i64 => {
                points_n3.f_copy_(&upload(&points, Device::Cpu)?)?;
            }
            _ if device.is_cuda() => *self = Self::Device(upload(&points, device)?),
            _ => *self = Self::Host(points),
        }
        Ok(())
    }

    /// `count` consecutive points, starting at index `first`.
    pub fn narrow(&self, first: u64, count: u64) -> Result<Self, ShddError> {
        Ok(match self {
            Self::Host(points) => Self::Host(points[first as usize..(first + count) as usize].to_vec()),
            Self::Device(points_n3) => Self::Device(points_n3.f_narrow(0, first as i64, count as i64)?),
        })
    }
}

/// Encodes points on one device.
#[derive(Debug)]
pub struct Codes {
    basis: Basis,
    device: Device,
    threads: usize,
    encoder: Option<Encoder>,
    filter: Option<(Selection, Filter)>,
}

impl Codes {
    /// Prepares to encode points on `device`. If `device` is a GPU, it must be the current device.
    pub fn new(degree: u32, filter: Option<Filter>, device: Device, threads: usize) -> Result<Self, ShddError> {
        let basis = Basis::new(degree)?;
        let encoder = if device.is_cuda() { Some(Encoder::new(&basis, device)?) } else { None };
        let filter = filter.map(|filter| Ok::<_, ShddError>((filter.to_device(device)?, filter))).transpose()?;
        Ok(Self { basis, device, threads, encoder, filter })
    }

    /// The low-pass filter, if there is one.
    pub fn filter(&self) -> Option<&Filter> {
        self.filter.as_ref().map(|(_, filter)| filter)
    }

    /// Unscaled codes `[n, d]` of points, f32. Does not wait for the device.
    pub fn encode(&self, points: &Points) -> Result<Tensor, ShddError> {
        let codes_nd = match (points, &self.encoder) {
            (Points::Device(points_n3), Some(encoder)) => encoder.encode_unchecked(points_n3)?,
            (Points::Device(points_n3), None) => {
                let device = points_n3.device();
                return Err(ShddError::Bad(format!("the points are on {device:?}, but codes are computed on the CPU")));
            }
            (Points::Host(points), Some(encoder)) => encoder.encode_unchecked(&upload(points, self.device)?)?,
            (Points::Host(points), None) => {
                let shape = [points.len() as i64, self.basis.dims() as i64];
                Tensor::f_from_slice(&self.basis.encode_f32(points, self.threads))?.f_view(shape)?
            }
        };
        match &self.filter {
            Some((selection, _)) => Ok(selection.apply(&codes_nd)?),
            None => Ok(codes_nd),
        }
    }
}
