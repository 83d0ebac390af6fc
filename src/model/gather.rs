//! Rows of a time table for the samples of a mini-batch, with a backward that is the same from run to run.
//!
//! Several samples share a timestep, so backward adds several rows of the gradient into one, and the order of those sums
//! must be fixed. `index_select` does so on the CPU but adds atomically on CUDA; indexing (`table[t]`) is the other way
//! round (`torch.use_deterministic_algorithms` lists both). A product with a one-hot matrix is right everywhere, exact
//! in forward (one term and zeros) and cheap where there are tensor cores: on CUDA it takes the place of `index_select`.
// b batch · t timesteps · h columns of the table

use tch::{Kind, Tensor};

use super::error::ModelError;

/// How to find the rows of a mini-batch in any table.
#[derive(Debug)]
pub(super) enum Rows {
    /// By their numbers, i64 `[b]`.
    Numbers(Tensor),
    /// By a product: one-hot rows `[b, t]` in the kind of the tables.
    OneHot(Tensor),
    /// One row for all.
    One(i64),
}

impl Rows {
    /// The way that is reproducible where `t_b` lives. On CUDA a timestep outside the table finds a row of zeros.
    pub(super) fn of(t_b: &Tensor, timesteps: i64, kind: Kind) -> Result<Self, ModelError> {
        if t_b.device().is_cuda() {
            Self::one_hot(t_b, timesteps, kind)
        } else {
            Ok(Self::Numbers(t_b.shallow_clone()))
        }
    }

    // Not libtorch's own one_hot: that one looks at the values, for which the host waits.
    fn one_hot(t_b: &Tensor, timesteps: i64, kind: Kind) -> Result<Self, ModelError> {
        let all_t = Tensor::f_arange(timesteps, (Kind::Int64, t_b.device()))?;
        Ok(Self::OneHot(t_b.f_unsqueeze(1)?.f_eq_tensor(&all_t)?.f_to_kind(kind)?))
    }

    /// The rows of one table, `[b or 1, h]`.
    pub(super) fn of_table(&self, table_th: &Tensor) -> Result<Tensor, ModelError> {
        Ok(match self {
            Self::Numbers(t_b) => table_th.f_index_select(0, t_b)?,
            Self::OneHot(one_hot_bt) => one_hot_bt.f_matmul(table_th)?,
            Self::One(t) => table_th.f_narrow(0, *t, 1)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn product_gathers_what_numbers_gather() {
        let t_b = Tensor::from_slice(&[3_i64, 0, 3, 3, 4]);
        let weight_bh = Tensor::randn([5, 8], (Kind::Double, Device::Cpu));
        let start_th = Tensor::randn([5, 8], (Kind::Double, Device::Cpu));
        let run = |rows: Result<Rows, ModelError>| {
            let table_th = start_th.copy().set_requires_grad(true);
            let gathered_bh = rows.and_then(|rows| rows.of_table(&table_th)).expect("gathered");
            (&gathered_bh * &weight_bh).sum(Kind::Double).backward();
            (gathered_bh, table_th.grad())
        };
        let numbers = run(Rows::of(&t_b, 5, Kind::Double));
        let product = run(Rows::one_hot(&t_b, 5, Kind::Double));
        assert!(product.0.equal(&numbers.0));
        assert!((product.1 - numbers.1).abs().max().double_value(&[]) < 1e-14);
    }
}
