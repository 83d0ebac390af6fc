//! Rows that share a true place. The bootstrap draws places instead of rows, because answers at the same place are not
//! independent: photos of one sight are usually all located, or all missed.

use std::collections::HashMap;

use crate::geo::UnitVector;

/// Which rows share a true place. Places are numbered from 0, in the order of their first rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceGroups {
    of_row: Vec<u32>,
    count: usize,
}

impl PlaceGroups {
    /// Groups the rows with exactly equal true places.
    pub fn of(truth: &[UnitVector]) -> Self {
        let mut numbers: HashMap<[u64; 3], u32> = HashMap::with_capacity(truth.len());
        let number = |place: &UnitVector| {
            let next = numbers.len() as u32;
            // Adding 0 turns -0 into 0: both are the same place, but their bits differ.
            *numbers.entry(place.xyz().map(|value| (value + 0.0).to_bits())).or_insert(next)
        };
        let of_row = truth.iter().map(number).collect();
        Self { of_row, count: numbers.len() }
    }

    /// Number of different places.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number of the place of each row.
    pub fn of_row(&self) -> &[u32] {
        &self.of_row
    }
}
