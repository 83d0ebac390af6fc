//! The paper's low-pass filter, which keeps only the dimensions of a code that vary most over the training set.
//!
//! Training codes, predictions and the harmonics of the anchors all hold the same kept dimensions. The dot product of
//! two filtered codes is the same as if both were filled up to whole codes with zeros in the dropped dimensions. The
//! loss and the decoder can therefore use filtered codes directly.
//!
//! Invariant: the indices of the kept dimensions are strictly ascending and below the number of dimensions of a code.
//! To save a filter, store [`Filter::indices`] and [`Filter::dims`]. [`Filter::from_indices`] restores the filter.

use tch::{Device, Tensor};

use super::ShddError;
use super::harmonics::expect_length;

/// The dimensions of a code that are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    kept: Vec<i64>,
    dims: usize,
}

impl Filter {
    /// Keeps the `count` dimensions with the largest variances. Among equal variances, the dimension with the lower
    /// index is kept.
    pub fn choose(variances: &[f64], count: usize) -> Result<Self, ShddError> {
        expect_kept(count, variances.len())?;
        if let Some(index) = variances.iter().position(|variance| !(variance.is_finite() && *variance >= 0.0)) {
            let got = variances[index];
            let text = format!("filter: variance of dimension {index} is {got}, wanted a finite number of at least 0");
            return Err(ShddError::Bad(text));
        }
        let mut order: Vec<usize> = (0..variances.len()).collect();
        order.sort_by(|a, b| variances[*b].total_cmp(&variances[*a]).then(a.cmp(b)));
        order.truncate(count);
        order.sort_unstable();
        Ok(Self { kept: order.into_iter().map(|index| index as i64).collect(), dims: variances.len() })
    }

    /// Restores a saved filter. The indices must be strictly ascending and below `dims`.
    pub fn from_indices(indices: &[u32], dims: usize) -> Result<Self, ShddError> {
        expect_kept(indices.len(), dims)?;
        if let Some(before) = indices.windows(2).position(|pair| pair[0] >= pair[1]) {
            let place = before + 1;
            let text =
                format!("filter: index at position {place} is not above the previous one, wanted ascending indices");
            return Err(ShddError::Bad(text));
        }
        if let Some(last) = indices.last().filter(|last| **last as usize >= dims) {
            return Err(ShddError::Bad(format!("filter: index is {last}, wanted below {dims}")));
        }
        Ok(Self { kept: indices.iter().map(|index| i64::from(*index)).collect(), dims })
    }

    /// The kept dimensions in ascending order, for saving the filter.
    pub fn indices(&self) -> Vec<u32> {
        self.kept.iter().map(|index| u32::try_from(*index).expect("codes have fewer than 2^32 dimensions")).collect()
    }

    /// Number of kept dimensions.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Number of dimensions of a whole code.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Copies the indices to a device, so that the filter can be applied repeatedly or in a CUDA graph capture.
    pub fn to_device(&self, device: Device) -> Result<Selection, ShddError> {
        let index_k = Tensor::f_from_slice(&self.kept)?.f_to_device(device)?;
        Ok(Selection { index_k, kept: self.kept(), dims: self.dims })
    }

    /// Expands filtered codes `[..., kept]` to whole codes `[..., dims]`, with zeros in the dropped dimensions.
    pub fn scatter(&self, filtered: &Tensor) -> Result<Tensor, ShddError> {
        self.to_device(filtered.device())?.scatter(filtered)
    }
}

/// A [`Filter`] whose indices are on a device. Applying a `Selection` copies nothing from the host and does not make
/// the host wait.
#[derive(Debug)]
pub struct Selection {
    index_k: Tensor,
    kept: usize,
    dims: usize,
}

impl Selection {
    /// Reduces codes `[..., dims]` to the kept dimensions, `[..., kept]`.
    pub fn apply(&self, codes: &Tensor) -> Result<Tensor, ShddError> {
        expect_last(codes, self.dims)?;
        Ok(codes.f_index_select(-1, &self.index_k)?)
    }

    /// Like [`Filter::scatter`].
    pub fn scatter(&self, filtered: &Tensor) -> Result<Tensor, ShddError> {
        expect_last(filtered, self.kept)?;
        let mut shape = filtered.size();
        if let Some(last) = shape.last_mut() {
            *last = self.dims as i64;
        }
        let zeros = Tensor::f_zeros(shape.as_slice(), (filtered.kind(), filtered.device()))?;
        Ok(zeros.f_index_copy(-1, &self.index_k, filtered)?)
    }
}

fn expect_kept(got: usize, dims: usize) -> Result<(), ShddError> {
    let text = || ShddError::Bad(format!("filter: {got} dimensions kept, wanted 1 to {dims}"));
    (1..=dims).contains(&got).then_some(()).ok_or_else(text)
}

fn expect_last(tensor: &Tensor, want: usize) -> Result<(), ShddError> {
    expect_length("last dimension of codes", tensor.size().last().map_or(0, |last| *last as usize), want)
}
