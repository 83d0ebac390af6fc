//! Divides the ranks of the world into replicas of the model (data parallel), and each replica into parts (tensor
//! parallel).
//!
//! The ranks of one replica have adjacent numbers. These ranks exchange the most data, and ranks with adjacent numbers
//! usually run on the same node. All functions are pure.

use super::error::CommError;

/// How the ranks of the world are divided. The number of a rank is `data_rank * tensor_parallel + tensor_rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    data_parallel: u32,
    tensor_parallel: u32,
}

/// Position of one rank in the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutPosition {
    /// Index of the replica to which the rank belongs. All ranks of a replica get the same rows of data.
    pub data_rank: u32,
    /// Index of the rank within its replica. It selects the part of the split layers that the rank holds.
    pub tensor_rank: u32,
}

impl Layout {
    /// Divides `world` ranks into replicas of `tensor_parallel` ranks each.
    pub fn new(world: u32, tensor_parallel: u32) -> Result<Self, CommError> {
        if world == 0 || tensor_parallel == 0 || !world.is_multiple_of(tensor_parallel) {
            let text = format!("{world} ranks cannot be divided into tensor-parallel groups of {tensor_parallel}");
            return Err(CommError::Bad(text));
        }
        Ok(Self { data_parallel: world / tensor_parallel, tensor_parallel })
    }

    /// Number of ranks in the world.
    pub fn world(&self) -> u32 {
        self.data_parallel * self.tensor_parallel
    }

    /// Number of replicas of the model.
    pub fn data_parallel(&self) -> u32 {
        self.data_parallel
    }

    /// Number of ranks that together hold one replica of the model.
    pub fn tensor_parallel(&self) -> u32 {
        self.tensor_parallel
    }

    /// Position of `rank`.
    pub fn place(&self, rank: u32) -> Result<LayoutPosition, CommError> {
        if rank >= self.world() {
            return Err(CommError::Bad(format!("the rank is {rank}, wanted 0 to {}", self.world() - 1)));
        }
        Ok(LayoutPosition { data_rank: rank / self.tensor_parallel, tensor_rank: rank % self.tensor_parallel })
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} data x {} tensor", self.data_parallel, self.tensor_parallel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All layouts of up to 64 ranks.
    fn every_layout() -> impl Iterator<Item = Layout> {
        (1..=64).flat_map(|world| (1..=world).filter_map(move |tensor| Layout::new(world, tensor).ok()))
    }

    #[test]
    fn every_place_has_one_rank_and_tensor_parallel_ranks_are_adjacent() {
        for layout in every_layout() {
            let places = (0..layout.world()).map(|rank| layout.place(rank).expect("the rank is in the world"));
            let data_ranks = 0..layout.data_parallel();
            let wanted = data_ranks.flat_map(|data_rank| {
                (0..layout.tensor_parallel()).map(move |tensor_rank| LayoutPosition { data_rank, tensor_rank })
            });
            assert!(places.eq(wanted), "layout {layout}: the positions are not in the order of the ranks");
        }
    }

    #[test]
    fn impossible_layouts_are_errors_that_name_the_numbers() {
        let error = Layout::new(6, 4).expect_err("6 is not divisible by 4");
        assert_eq!(error.to_string(), "6 ranks cannot be divided into tensor-parallel groups of 4");
        assert!(Layout::new(0, 1).is_err());
        assert!(Layout::new(4, 0).is_err());
        let error = Layout::new(4, 2).expect("4 is divisible by 2").place(4).expect_err("there is no rank 4");
        assert_eq!(error.to_string(), "the rank is 4, wanted 0 to 3");
    }
}
