//! Selects the largest columns of each row of a matrix.
//!
//! libtorch's `topk` over a wide row takes longer than the matrix product that computed the row. The columns of a wide
//! row are therefore divided into blocks. `topk` first selects the k blocks with the largest maxima and then k columns
//! of these blocks. This gives the same k values: a block that holds one of the k largest values has a maximum at least
//! as large, and fewer than k other blocks can have a larger maximum.
//!
//! If there are n blocks, block i holds the columns i, i + n, i + 2n and so on. libtorch computes the maxima of such
//! blocks several times faster than the maxima of blocks of adjacent columns, because adjacent threads read adjacent
//! columns.
// Letters in tensor names: b rows, a columns, k selected columns.

use tch::{Kind, TchError, Tensor};

/// Columns of a block.
const BLOCK: usize = 32;

/// Whether it is faster to select blocks by their maxima first, if the largest `count` of `columns` columns are wanted.
fn is_wide(columns: usize, count: usize) -> bool {
    columns > 4 * BLOCK * count && columns.is_multiple_of(BLOCK)
}

/// The memory that [`largest_columns`] needs for each row, in 32-bit numbers.
pub(super) fn numbers_needed(columns: usize, count: usize) -> usize {
    if is_wide(columns, count) { columns / BLOCK + 6 * BLOCK * count } else { 2 * count }
}

/// The values and positions of the `count` largest columns of each row, in any order.
pub(super) fn largest_columns(values_ba: &Tensor, count: usize) -> Result<(Tensor, Tensor), TchError> {
    let (rows, columns, selected) = (values_ba.size()[0], values_ba.size()[1], count as i64);
    if !is_wide(columns as usize, count) {
        return values_ba.f_topk(selected, 1, true, false);
    }
    let maxima = values_ba.f_view([rows, BLOCK as i64, -1])?.f_amax([1_i64].as_slice(), false)?;
    let (_, blocks_bk) = maxima.f_topk(selected, 1, true, false)?;
    let steps = Tensor::f_arange(BLOCK as i64, (Kind::Int64, values_ba.device()))?.f_mul_scalar(maxima.size()[1])?;
    let positions = blocks_bk.f_unsqueeze(2)?.f_add(&steps)?.f_view([rows, -1])?;
    let (values_bk, order_bk) = values_ba.f_gather(1, &positions, false)?.f_topk(selected, 1, true, false)?;
    Ok((values_bk, positions.f_gather(1, &order_bk, false)?))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn largest_columns_of_wide_rows_are_those_of_topk() {
        // Many values occur more than once.
        let values_ba = Tensor::arange(3 * 4096, (Kind::Float, Device::Cpu)).view([3, 4096]);
        let values_ba = (values_ba * 12.9898).sin().view([3, 4096]) * 1000.0;
        let values_ba = values_ba.round();
        for count in [1, 7, 31] {
            assert!(is_wide(4096, count));
            let (values_bk, positions_bk) = largest_columns(&values_ba, count).expect("the columns fill whole blocks");
            assert!(values_ba.gather(1, &positions_bk, false).equal(&values_bk));
            let (want_bk, _) = values_ba.topk(count as i64, 1, true, true);
            assert!(values_bk.sort(1, true).0.equal(&want_bk), "wrong columns for a count of {count}");
        }
    }
}
