//! The harmonics of anchors, computed on the device on which scores are computed. If there is a filter, only the kept
//! dimensions are returned.
//!
//! On CUDA, the points are uploaded once and the kernel of [`gpu`](crate::shdd::gpu) encodes them, so the harmonics are
//! never copied from the host. On the CPU, [`Basis`] encodes the points. The filter is applied on the device that
//! encodes the points. Invariant: the harmonics from the kernel and from [`Basis`] differ by at most 1e-6 of the
//! largest value.

use std::ops::Range;

use locdiff_core::geo::UnitVector;
use tch::{Device, Kind, TchError, Tensor};

use crate::shdd::gpu::{Encoder, upload};
use crate::shdd::{Basis, Filter, Selection, ShddError};

// Letters in tensor names: a anchors, b codes, c kept coefficients, n points.

/// The anchors, and everything that is needed to compute their harmonics.
#[derive(Debug)]
pub(super) struct SourcePoints {
    basis: Basis,
    points: Vec<UnitVector>,
    device: Device,
    filter: Option<(Filter, Selection)>,
    /// The kernel and the points on the device. `None` on the CPU.
    kernel: Option<(Encoder, Tensor)>,
}

impl SourcePoints {
    /// If `device` is a CUDA device, it must be the current device, because the kernel is compiled for the current
    /// device.
    pub(super) fn new(
        basis: Basis,
        points: Vec<UnitVector>,
        filter: Option<Filter>,
        device: Device,
    ) -> Result<Self, ShddError> {
        if let Some(filter) = filter.as_ref().filter(|filter| filter.dims() != basis.dims()) {
            let (got, dims) = (filter.dims(), basis.dims());
            return Err(ShddError::Bad(format!("decoder: the filter is for codes of {got} dimensions, wanted {dims}")));
        }
        let filter = match filter {
            Some(filter) => {
                let selection = filter.to_device(device)?;
                Some((filter, selection))
            }
            None => None,
        };
        let kernel =
            if device.is_cuda() { Some((Encoder::new(&basis, device)?, upload(&points, device)?)) } else { None };
        Ok(Self { basis, points, device, filter, kernel })
    }

    pub(super) fn basis(&self) -> &Basis {
        &self.basis
    }

    pub(super) fn points(&self) -> &[UnitVector] {
        &self.points
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    pub(super) fn filter(&self) -> Option<&Filter> {
        self.filter.as_ref().map(|(filter, _)| filter)
    }

    /// Number of dimensions of a code: those that the filter keeps, or all if there is no filter.
    pub(super) fn dims(&self) -> usize {
        self.filter().map_or(self.basis.dims(), Filter::kept)
    }

    /// The harmonics of a range of anchors, `[a, c]` in f32 on the device.
    pub(super) fn tile(&self, range: &Range<usize>) -> Result<Tensor, ShddError> {
        let whole_ac = match &self.kernel {
            Some((encoder, points_n3)) => {
                encoder.encode_unchecked(&points_n3.f_narrow(0, range.start as i64, range.len() as i64)?)?
            }
            None => self.basis.tensor(&self.points[range.clone()], self.device)?,
        };
        self.filtered(whole_ac)
    }

    /// The scores of the anchors `anchors_bk` (i64 on the device) for each code in `codes_bc` (f32 on the device). On
    /// CUDA, products and sums are f64, otherwise f32.
    pub(super) fn scores_at(&self, codes_bc: &Tensor, anchors_bk: &Tensor) -> Result<Tensor, ShddError> {
        if let Some((encoder, points_n3)) = &self.kernel {
            let whole_bc = match &self.filter {
                Some((_, selection)) => selection.scatter(codes_bc)?,
                None => codes_bc.shallow_clone(),
            };
            return encoder.scores(points_n3, anchors_bk, &whole_bc);
        }
        let mut scores = Vec::new();
        for code in 0..codes_bc.size()[0] {
            let indices: Vec<i64> = flat(&anchors_bk.f_get(code)?)?;
            let points: Vec<UnitVector> = indices.iter().map(|anchor| self.points[*anchor as usize]).collect();
            let product_kc = self.filtered(self.basis.tensor(&points, self.device)?)?.f_mul(&codes_bc.f_get(code)?)?;
            scores.push(product_kc.f_sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float)?);
        }
        Ok(Tensor::f_stack(&scores, 0)?)
    }

    /// Expands codes `[b, c]` to whole codes in row-major order, with zeros in the dimensions that the filter dropped.
    pub(super) fn whole_codes<T: tch::kind::Element>(&self, codes_bc: &Tensor) -> Result<Vec<T>, ShddError>
    where
        Vec<T>: TryFrom<Tensor, Error = TchError>,
    {
        let codes_bc = codes_bc.f_to_device(Device::Cpu)?.f_to_kind(T::KIND)?;
        let whole = match self.filter() {
            Some(filter) => filter.scatter(&codes_bc)?,
            None => codes_bc,
        };
        Ok(flat(&whole)?)
    }

    fn filtered(&self, whole_ac: Tensor) -> Result<Tensor, ShddError> {
        match &self.filter {
            Some((_, selection)) => Ok(selection.apply(&whole_ac)?),
            None => Ok(whole_ac),
        }
    }
}

/// All values of a tensor in row-major order.
pub(super) fn flat<T: tch::kind::Element>(tensor: &Tensor) -> Result<Vec<T>, TchError>
where
    Vec<T>: TryFrom<Tensor, Error = TchError>,
{
    Vec::try_from(tensor.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?)
}
