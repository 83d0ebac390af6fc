//! The paper's low-pass filter: only the k dimensions of a code that vary most over the training set.
//!
//! Codes of the training set, harmonics of the anchors and predictions all go through the same filter, so that the product of
//! two filtered codes is that of the whole ones with zeros where nothing was kept: loss and decoder need know no more.
//!
//! Invariant: the kept dimensions are distinct, in rising order and below the size of a code. List and size are all there is
//! to save: [`Filter::indices`] and [`Filter::dims`] out, [`Filter::from_indices`] back.

use tch::{Device, Tensor};

use super::ShddError;
use super::harmonics::expect_length;

/// Which dimensions of a code are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    kept: Vec<i64>,
    dims: usize,
}

impl Filter {
    /// Keeps the `count` dimensions with the largest variances; of equal ones, the first.
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

    /// A filter that was saved: rising indices below `dims`.
    pub fn from_indices(indices: &[u32], dims: usize) -> Result<Self, ShddError> {
        expect_kept(indices.len(), dims)?;
        if let Some(before) = indices.windows(2).position(|pair| pair[0] >= pair[1]) {
            let place = before + 1;
            let text =
                format!("filter: index at position {place} is not above the one before it, wanted rising indices");
            return Err(ShddError::Bad(text));
        }
        if let Some(last) = indices.last().filter(|last| **last as usize >= dims) {
            return Err(ShddError::Bad(format!("filter: index is {last}, wanted below {dims}")));
        }
        Ok(Self { kept: indices.iter().map(|index| i64::from(*index)).collect(), dims })
    }

    /// The kept dimensions, rising: the form in which a filter is saved.
    pub fn indices(&self) -> Vec<u32> {
        self.kept.iter().map(|index| u32::try_from(*index).expect("codes have fewer than 2^32 dimensions")).collect()
    }

    /// How many are kept.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Dimensions of a whole code.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// The filter with its indices on a device, for who applies it often or within a capture.
    pub fn on(&self, device: Device) -> Result<Selection, ShddError> {
        let index_k = Tensor::f_from_slice(&self.kept)?.f_to_device(device)?;
        Ok(Selection { index_k, kept: self.kept(), dims: self.dims })
    }

    /// Whole codes `[..., dims]` from filtered ones `[..., kept]`, with zeros where nothing was kept.
    pub fn scatter(&self, filtered: &Tensor) -> Result<Tensor, ShddError> {
        self.on(filtered.device())?.scatter(filtered)
    }
}

/// A [`Filter`] on a device: the host copies nothing and does not wait.
#[derive(Debug)]
pub struct Selection {
    index_k: Tensor,
    kept: usize,
    dims: usize,
}

impl Selection {
    /// The kept dimensions of codes `[..., dims]`: `[..., kept]`.
    pub fn apply(&self, codes: &Tensor) -> Result<Tensor, ShddError> {
        expect_last(codes, self.dims)?;
        Ok(codes.f_index_select(-1, &self.index_k)?)
    }

    /// As [`Filter::scatter`].
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
