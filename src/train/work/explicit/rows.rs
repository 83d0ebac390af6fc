//! The order of rows within a micro-batch. Rows are sorted by timestep, so that the gradient of a timestep's scale and
//! shift is a sum over adjacent rows.

use std::ops::Range;

use locdiff_core::random::{Draw, Philox, RangeError, Stream};

/// The sorted rows of all micro-batches of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SortedRows {
    /// For each sorted row, its index in this rank's slice.
    pub(super) order: Vec<i32>,
    /// For each sorted row, its timestep.
    pub(super) timesteps: Vec<i32>,
    /// For each micro-batch and timestep, the first sorted row of this timestep, counted from the first row of the
    /// micro-batch. The last entry of a micro-batch is its number of rows.
    pub(super) segments: Vec<i32>,
}

impl SortedRows {
    /// Draws the timesteps of the rows `slice` of the global batch, and sorts the rows of each micro-batch of `micro`
    /// rows. Rows with the same timestep keep their order.
    pub(super) fn draw(
        philox: Philox,
        step: u64,
        slice: &Range<u64>,
        micro: u64,
        timesteps: u32,
    ) -> Result<Self, RangeError> {
        let rows = (slice.end - slice.start) as usize;
        let mut drawn = vec![0; rows];
        let draw = Draw { stream: Stream::Timestep, step, first_sample: slice.start, elements: 1 };
        philox.fill_int(draw, timesteps, &mut drawn)?;
        let mut sorted = Self { order: vec![0; rows], timesteps: vec![0; rows], segments: Vec::new() };
        for first in (0..rows).step_by(micro as usize) {
            sorted.sort(first, &drawn[first..rows.min(first + micro as usize)], timesteps as usize);
        }
        Ok(sorted)
    }

    /// Sorts the rows of one micro-batch by counting. `first` is its first row in the slice.
    fn sort(&mut self, first: usize, drawn: &[i64], timesteps: usize) {
        let mut next = vec![0; timesteps + 1];
        for t in drawn {
            next[*t as usize + 1] += 1;
        }
        for t in 0..timesteps {
            next[t + 1] += next[t];
        }
        self.segments.extend(&next);
        for (row, t) in drawn.iter().enumerate() {
            let at = &mut next[*t as usize];
            let place = first + *at as usize;
            self.order[place] = (first + row) as i32;
            self.timesteps[place] = *t as i32;
            *at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_within_each_micro_batch() {
        let (philox, timesteps) = (Philox::new(3), 5);
        let sorted = SortedRows::draw(philox, 7, &(20..31), 4, timesteps).expect("the draw is in range");
        let mut drawn = vec![0; 11];
        let draw = Draw { stream: Stream::Timestep, step: 7, first_sample: 20, elements: 1 };
        philox.fill_int(draw, timesteps, &mut drawn).expect("the draw is in range");
        assert_eq!(sorted.segments.len(), 3 * 6);
        for (micro, segments) in sorted.segments.chunks(6).enumerate() {
            let rows = 4 * micro..11.min(4 * micro + 4);
            assert_eq!((segments[0], segments[5]), (0, rows.len() as i32));
            let mut order = sorted.order[rows.clone()].to_vec();
            for t in 0..5 {
                let segment = segments[t] as usize..segments[t + 1] as usize;
                let of_t = &order[segment];
                assert!(of_t.is_sorted(), "rows with the same timestep changed their order: {of_t:?}");
                assert!(of_t.iter().all(|row| drawn[*row as usize] == t as i64));
            }
            order.sort_unstable();
            assert_eq!(order, rows.clone().map(|row| row as i32).collect::<Vec<_>>());
            assert!(rows.clone().all(|row| i64::from(sorted.timesteps[row]) == drawn[sorted.order[row] as usize]));
        }
    }
}
