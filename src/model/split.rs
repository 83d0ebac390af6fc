//! How a parameter is split over tensor-parallel ranks.
//!
//! A replicated parameter is whole on every rank. Any other parameter is divided into pieces of equal size, one per
//! rank in the order of ranks.

use tch::Tensor;

use super::error::ModelError;

/// The part of a parameter that one rank of a tensor-parallel group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// The whole parameter. Its gradient is the same on all ranks, so a norm over ranks must count it only once.
    Replicated,
    /// A piece of the first dimension: the weights of some of the layer's outputs.
    Rows,
    /// Two pieces of the first dimension, at the same position in its first half and in its second half. Used for a
    /// layer whose output is two concatenated vectors.
    RowHalves,
    /// A piece of the second dimension: the weights of some of the layer's inputs.
    Columns,
}

impl Split {
    /// The piece of the tensor `whole` that rank `rank` of `ranks` holds. Errors call the parameter
    /// `name`.
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

    /// Reassembles the whole tensor from the pieces of all ranks, in the order of ranks.
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
        return Err(ModelError::Bad(format!("{name}: {problem}; choose another number of ranks")));
    }
    Ok(whole.f_narrow(dim, rank * (length / ranks), length / ranks)?)
}
