//! Gathers the rows of a time table (one row per timestep) for the samples of a mini-batch, with a reproducible
//! backward pass.
//!
//! If several samples have the same timestep, the backward pass adds their gradients, and the order of these additions
//! must always be the same. The backward pass of `index_select` has a fixed order on the CPU, but uses atomic
//! additions on CUDA. Indexing (`table[t]`) has a fixed order on CUDA, but not on the CPU. (The documentation of
//! `torch.use_deterministic_algorithms` lists both.) A product with a one-hot matrix is reproducible on every device.
//! It is exact in the forward pass, because all terms except one are 0, and it is cheap on tensor cores. On CUDA, this
//! module therefore uses the product instead of `index_select`.
//!
//! Invariant: a timestep outside the table is always reported. On the CPU, an error names the row. On CUDA, a check
//! would make the host wait. Instead, the sample's row of the product becomes NaN. The loss is then not finite, and
//! this is reported as an error.
// Letters in tensor names: b batch, t timesteps, h columns of the table.

use tch::{Kind, Tensor};

use super::error::ModelError;

/// How to find each sample's row in a time table (one row per timestep).
#[derive(Debug)]
pub(super) enum RowLookup {
    /// Selects rows by index. The tensor holds one row index per sample: i64 `[b]`.
    Numbers(Tensor),
    /// Multiplies this one-hot matrix `[b, t]` by a table. The matrix and the tables have the same number type.
    OneHot(Tensor),
    /// Uses the same row for all samples.
    One(i64),
}

impl RowLookup {
    /// Creates a lookup for the timesteps `t_b`. Chooses a kind of lookup that is reproducible on the device of `t_b`.
    pub(super) fn new(t_b: &Tensor, timesteps: i64, kind: Kind) -> Result<Self, ModelError> {
        if t_b.device().is_cuda() {
            return Self::one_hot(t_b, timesteps, kind);
        }
        check_in_table(&Vec::<i64>::try_from(t_b)?, timesteps)?;
        Ok(Self::Numbers(t_b.shallow_clone()))
    }

    // libtorch's own `one_hot` is not used, because it reads the values back and makes the host wait.
    fn one_hot(t_b: &Tensor, timesteps: i64, kind: Kind) -> Result<Self, ModelError> {
        let all_t = Tensor::f_arange(timesteps, (Kind::Int64, t_b.device()))?;
        let found_bt = t_b.f_unsqueeze(1)?.f_eq_tensor(&all_t)?;
        let lost_b1 = found_bt.f_any_dim(1, true)?.f_logical_not()?;
        Ok(Self::OneHot(found_bt.f_to_kind(kind)?.f_masked_fill(&lost_b1, f64::NAN)?))
    }

    /// Takes the rows from one table. The result has shape `[b, h]`, or `[1, h]` for [`RowLookup::One`].
    pub(super) fn gather_from(&self, table_th: &Tensor) -> Result<Tensor, ModelError> {
        Ok(match self {
            Self::Numbers(t_b) => table_th.f_index_select(0, t_b)?,
            Self::OneHot(one_hot_bt) => one_hot_bt.f_matmul(table_th)?,
            Self::One(t) => table_th.f_narrow(0, *t, 1)?,
        })
    }
}

/// Checks that every timestep is in `0..timesteps`. The error names the first row whose timestep is outside this range.
fn check_in_table(t_b: &[i64], timesteps: i64) -> Result<(), ModelError> {
    match t_b.iter().position(|t| !(0..timesteps).contains(t)) {
        Some(row) => {
            let got = t_b[row];
            Err(ModelError::Bad(format!("row {row}: timestep {got} is not in 0..{timesteps}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn one_hot_product_equals_index_select() {
        let t_b = Tensor::from_slice(&[3_i64, 0, 3, 3, 4]);
        let weight_bh = Tensor::randn([5, 8], (Kind::Double, Device::Cpu));
        let start_th = Tensor::randn([5, 8], (Kind::Double, Device::Cpu));
        let run = |rows: Result<RowLookup, ModelError>| {
            let table_th = start_th.copy().set_requires_grad(true);
            let gathered_bh =
                rows.and_then(|rows| rows.gather_from(&table_th)).expect("every timestep is in the table");
            (&gathered_bh * &weight_bh).sum(Kind::Double).backward();
            (gathered_bh, table_th.grad())
        };
        let numbers = run(RowLookup::new(&t_b, 5, Kind::Double));
        let product = run(RowLookup::one_hot(&t_b, 5, Kind::Double));
        assert!(product.0.equal(&numbers.0));
        assert!((product.1 - numbers.1).abs().max().double_value(&[]) < 1e-14);
    }

    #[test]
    fn timestep_outside_the_table_is_an_error_or_nan() {
        let table_th = Tensor::ones([5, 8], (Kind::Double, Device::Cpu));
        for outside in [5_i64, -1] {
            let t_b = Tensor::from_slice(&[3_i64, outside, 4]);
            let error = RowLookup::new(&t_b, 5, Kind::Double).expect_err("a timestep is outside the table").to_string();
            assert_eq!(error, format!("row 1: timestep {outside} is not in 0..5"));
            let gathered_bh = RowLookup::one_hot(&t_b, 5, Kind::Double).and_then(|rows| rows.gather_from(&table_th));
            let nan_bh = gathered_bh.expect("the one-hot lookup does not check timesteps").isnan();
            let all_nan = [0, 1, 2].map(|row| nan_bh.get(row).all().int64_value(&[]) == 1);
            let any_nan = [0, 1, 2].map(|row| nan_bh.get(row).any().int64_value(&[]) == 1);
            assert_eq!((all_nan, any_nan), ([false, true, false], [false, true, false]));
        }
    }
}
