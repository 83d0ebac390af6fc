//! Codes of points where the network computes: on the CPU by its fast form, on CUDA by the kernel; filtered where asked.
// n points · d dimensions of the code

use tch::{Device, Tensor};

use super::error::TrainError;
use crate::geo::UnitVector;
use crate::shdd::gpu::{Encoder, upload};
use crate::shdd::{Basis, Filter, Selection};

/// From points to codes on one device.
#[derive(Debug)]
pub struct Codes {
    basis: Basis,
    device: Device,
    threads: usize,
    encoder: Option<Encoder>,
    filter: Option<(Filter, Selection)>,
}

impl Codes {
    /// On CUDA `device` must be the current one.
    pub fn new(degree: u32, filter: Option<Filter>, device: Device, threads: usize) -> Result<Self, TrainError> {
        let basis = Basis::new(degree)?;
        let encoder = if device.is_cuda() { Some(Encoder::new(&basis, device)?) } else { None };
        let filter = match filter {
            Some(filter) => {
                let selection = filter.on(device)?;
                Some((filter, selection))
            }
            None => None,
        };
        Ok(Self { basis, device, threads, encoder, filter })
    }

    /// The filter, where there is one.
    pub fn filter(&self) -> Option<&Filter> {
        self.filter.as_ref().map(|(filter, _)| filter)
    }

    /// Plain codes of points, f32 `[n, d]`.
    pub fn of(&self, points: &[UnitVector]) -> Result<Tensor, TrainError> {
        let codes_nd = match &self.encoder {
            Some(encoder) => encoder.encode_unchecked(&upload(points, self.device)?)?,
            None => {
                let shape = [points.len() as i64, self.basis.dims() as i64];
                Tensor::f_from_slice(&self.basis.encode_f32(points, self.threads))?.f_view(shape)?
            }
        };
        match &self.filter {
            Some((_, selection)) => Ok(selection.apply(&codes_nd)?),
            None => Ok(codes_nd),
        }
    }
}
