//! What of a parameter each tensor-parallel rank holds.
//!
//! Splits are equal pieces in the order of ranks; the pieces of all ranks put together are the whole tensor again.

use tch::Tensor;

use super::error::ModelError;

/// What of a parameter one rank of a tensor-parallel group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// All of it, like every other rank; gradients are equal on all, and count once in a norm.
    Replicated,
    /// A piece of the first dimension: some of a layer's outputs.
    Rows,
    /// A piece of the first half of the first dimension and the same piece of the second: some of two sets of outputs.
    RowHalves,
    /// A piece of the second dimension: some of a layer's inputs.
    Columns,
}

impl Split {
    /// The piece of rank `rank` of `ranks`; `name` is for the error.
    pub fn piece(self, name: &str, whole: &Tensor, rank: i64, ranks: i64) -> Result<Tensor, ModelError> {
        if ranks == 1 {
            return Ok(whole.shallow_clone());
        }
        match self {
            Self::Replicated => Ok(whole.shallow_clone()),
            Self::Rows => slice(name, whole, 0, rank, ranks),
            Self::Columns => slice(name, whole, 1, rank, ranks),
            Self::RowHalves => {
                let halves = whole.f_chunk(2, 0)?;
                let pieces: Result<Vec<_>, _> = halves.iter().map(|half| slice(name, half, 0, rank, ranks)).collect();
                Ok(Tensor::f_cat(&pieces?, 0)?)
            }
        }
    }

    /// The whole of what [`Split::piece`] made, from the pieces of all ranks in order.
    pub fn whole(self, pieces: &[Tensor]) -> Result<Tensor, ModelError> {
        match (self, pieces) {
            (_, [only]) => Ok(only.shallow_clone()),
            (Self::Replicated, [first, ..]) => Ok(first.shallow_clone()),
            (Self::Columns, _) => Ok(Tensor::f_cat(pieces, 1)?),
            (Self::RowHalves, _) => {
                let halves: Result<Vec<_>, _> = pieces.iter().map(|piece| piece.f_chunk(2, 0)).collect();
                let halves = halves?;
                let ordered: Vec<&Tensor> =
                    [0, 1].into_iter().flat_map(|half| halves.iter().map(move |pair| &pair[half])).collect();
                Ok(Tensor::f_cat(&ordered, 0)?)
            }
            (Self::Rows | Self::Replicated, _) => Ok(Tensor::f_cat(pieces, 0)?),
        }
    }
}

fn slice(name: &str, whole: &Tensor, dim: i64, rank: i64, ranks: i64) -> Result<Tensor, ModelError> {
    let length = whole.size()[usize::from(dim == 1)];
    if length % ranks != 0 {
        let problem = format!("{length} units cannot be divided among {ranks} tensor-parallel ranks");
        return Err(ModelError::Bad(format!("{name}: {problem}; choose another number")));
    }
    Ok(whole.f_narrow(dim, rank * (length / ranks), length / ranks)?)
}
