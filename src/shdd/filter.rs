//! The paper's low-pass filter: only the k dimensions of a code that vary most over the training set.
//!
//! Invariant: the kept dimensions are distinct, in rising order and below the size of a code. The list is all there is
//! to save: [`Filter::indices`] out, [`Filter::from_indices`] back.

use tch::{Kind, Tensor};

use super::{ShddError, torch_error};

/// Which dimensions of a code are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    kept: Vec<i64>,
    dims: usize,
}

impl Filter {
    /// Keeps the `count` dimensions with the largest variances; of equal ones, the first.
    pub fn choose(variances: &[f64], count: usize) -> Result<Self, ShddError> {
        if count == 0 || count > variances.len() {
            return Err(ShddError::Kept { got: count, dims: variances.len() });
        }
        if let Some(index) = variances.iter().position(|variance| !(variance.is_finite() && *variance >= 0.0)) {
            return Err(ShddError::Variance { index, got: variances[index] });
        }
        let mut order: Vec<usize> = (0..variances.len()).collect();
        order.sort_by(|a, b| variances[*b].total_cmp(&variances[*a]).then(a.cmp(b)));
        order.truncate(count);
        order.sort_unstable();
        Ok(Self { kept: order.into_iter().map(|index| index as i64).collect(), dims: variances.len() })
    }

    /// A filter that was saved: rising indices below `dims`.
    pub fn from_indices(indices: &[u32], dims: usize) -> Result<Self, ShddError> {
        if indices.is_empty() || indices.len() > dims {
            return Err(ShddError::Kept { got: indices.len(), dims });
        }
        let rising = |pair: &[u32]| pair[0] < pair[1];
        if let Some(position) = indices.windows(2).position(|pair| !rising(pair)) {
            return Err(ShddError::Unsorted { position: position + 1 });
        }
        if let Some(last) = indices.last().filter(|last| **last as usize >= dims) {
            return Err(ShddError::Index { got: *last, dims });
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

    /// The kept dimensions of codes `[..., dims]`: `[..., kept]`.
    pub fn apply(&self, codes: &Tensor) -> Result<Tensor, ShddError> {
        self.expect_last(codes, self.dims)?;
        let index = Tensor::f_from_slice(&self.kept).and_then(|index| index.f_to_device(codes.device()));
        index.and_then(|index| codes.f_index_select(-1, &index)).map_err(|error| torch_error("filter of codes", &error))
    }

    /// Whole codes `[..., dims]` from filtered ones `[..., kept]`, with zeros where nothing was kept.
    pub fn scatter(&self, filtered: &Tensor) -> Result<Tensor, ShddError> {
        self.expect_last(filtered, self.kept())?;
        let mut shape = filtered.size();
        if let Some(last) = shape.last_mut() {
            *last = self.dims as i64;
        }
        let index = Tensor::f_from_slice(&self.kept).and_then(|index| index.f_to_device(filtered.device()));
        index
            .and_then(|index| {
                let zeros = Tensor::f_zeros(shape.as_slice(), (filtered.kind(), filtered.device()))?;
                zeros.f_index_copy(-1, &index, filtered)
            })
            .map_err(|error| torch_error("scatter of filtered codes", &error))
    }

    fn expect_last(&self, tensor: &Tensor, want: usize) -> Result<(), ShddError> {
        let got = tensor.size().last().map_or(0, |last| *last as usize);
        if got == want { Ok(()) } else { Err(ShddError::Length { what: "last dimension of codes", got, want }) }
    }
}

/// Variances of each dimension of codes `[n, dims]`, in f64: what [`Filter::choose`] takes.
pub fn variances(codes_nc: &Tensor) -> Result<Vec<f64>, ShddError> {
    codes_nc
        .f_to_kind(Kind::Double)
        .and_then(|codes| codes.f_var_dim([0_i64].as_slice(), false, false))
        .and_then(Vec::<f64>::try_from)
        .map_err(|error| torch_error("variances of codes", &error))
}
