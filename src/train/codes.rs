//! Codes of points where the network computes: on the CPU by its fast form, on CUDA by the kernel; filtered where asked.
// n points · d dimensions of the code

use locdiff_core::geo::UnitVector;
use tch::{Device, Tensor};

use super::error::TrainError;
use crate::shdd::gpu::{Encoder, upload};
use crate::shdd::{Basis, Filter, Selection};

/// Points where they are encoded.
#[derive(Debug)]
pub(super) enum Points {
    /// For the CPU.
    Host(Vec<UnitVector>),
    /// For CUDA: `[n, 3]` of f64 there.
    Device(Tensor),
}

impl Points {
    /// Takes other points; as many as before are put where those were.
    pub(super) fn put(&mut self, points: Vec<UnitVector>, device: Device) -> Result<(), TrainError> {
        match self {
            Self::Device(points_n3) if points_n3.size()[0] == points.len() as i64 => {
                points_n3.f_copy_(&upload(&points, Device::Cpu)?)?;
            }
            _ if device.is_cuda() => *self = Self::Device(upload(&points, device)?),
            _ => *self = Self::Host(points),
        }
        Ok(())
    }

    /// Some of them.
    pub(super) fn narrow(&self, first: u64, count: u64) -> Result<Self, TrainError> {
        Ok(match self {
            Self::Host(points) => Self::Host(points[first as usize..(first + count) as usize].to_vec()),
            Self::Device(points_n3) => Self::Device(points_n3.f_narrow(0, first as i64, count as i64)?),
        })
    }
}

/// From points to codes on one device.
#[derive(Debug)]
pub(super) struct Codes {
    basis: Basis,
    device: Device,
    threads: usize,
    encoder: Option<Encoder>,
    filter: Option<(Selection, Filter)>,
}

impl Codes {
    /// On CUDA `device` must be the current one.
    pub(super) fn new(degree: u32, filter: Option<Filter>, device: Device, threads: usize) -> Result<Self, TrainError> {
        let basis = Basis::new(degree)?;
        let encoder = if device.is_cuda() { Some(Encoder::new(&basis, device)?) } else { None };
        let filter = filter.map(|filter| Ok::<_, TrainError>((filter.on(device)?, filter))).transpose()?;
        Ok(Self { basis, device, threads, encoder, filter })
    }

    /// The filter, where there is one.
    pub(super) fn filter(&self) -> Option<&Filter> {
        self.filter.as_ref().map(|(_, filter)| filter)
    }

    /// Plain codes of points, f32 `[n, d]`; the host does not wait.
    pub(super) fn of(&self, points: &Points) -> Result<Tensor, TrainError> {
        let codes_nd = match (points, &self.encoder) {
            (Points::Device(points_n3), Some(encoder)) => encoder.encode_unchecked(points_n3)?,
            (Points::Device(points_n3), None) => {
                return Err(TrainError::Config(format!("points on {:?} for codes on the CPU", points_n3.device())));
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
