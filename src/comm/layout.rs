//! Which rank stands where: world = data parallel × tensor parallel.
//!
//! Tensor-parallel ranks are adjacent, because they exchange the most and adjacent ranks share a node. Pure.

use super::error::CommError;

/// The division of the world. Rank = data rank × tensor parallel + tensor rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    data_parallel: u32,
    tensor_parallel: u32,
}

/// Where one rank stands in the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which rows: ranks with the same data rank get the same.
    pub data_rank: u32,
    /// Which slice of the split layers.
    pub tensor_rank: u32,
}

impl Layout {
    /// Divides `world` ranks into `world / tensor_parallel` replicas.
    pub fn new(world: u32, tensor_parallel: u32) -> Result<Self, CommError> {
        if world == 0 || tensor_parallel == 0 || !world.is_multiple_of(tensor_parallel) {
            return Err(CommError::Layout { world, tensor_parallel });
        }
        Ok(Self { data_parallel: world / tensor_parallel, tensor_parallel })
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.data_parallel * self.tensor_parallel
    }

    /// The number of replicas of the model.
    pub fn data_parallel(&self) -> u32 {
        self.data_parallel
    }

    /// The number of ranks that hold one replica together.
    pub fn tensor_parallel(&self) -> u32 {
        self.tensor_parallel
    }

    /// Where `rank` stands.
    pub fn place(&self, rank: u32) -> Result<Place, CommError> {
        if rank >= self.world() {
            return Err(CommError::Rank { rank, world: self.world() });
        }
        Ok(Place { data_rank: rank / self.tensor_parallel, tensor_rank: rank % self.tensor_parallel })
    }

    /// Who stands there.
    pub fn rank(&self, place: Place) -> u32 {
        place.data_rank * self.tensor_parallel + place.tensor_rank
    }

    /// The ranks that hold the same slice of the model, in the order of their data ranks: gradients are reduced there.
    pub fn data_group(&self, place: Place) -> Vec<u32> {
        (0..self.data_parallel).map(|data_rank| self.rank(Place { data_rank, ..place })).collect()
    }

    /// The ranks that hold one replica together, in the order of their tensor ranks.
    pub fn tensor_group(&self, place: Place) -> Vec<u32> {
        (0..self.tensor_parallel).map(|tensor_rank| self.rank(Place { tensor_rank, ..place })).collect()
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

    /// Every layout of up to 64 ranks, which is more than a random sample would see.
    fn every_layout() -> impl Iterator<Item = Layout> {
        (1..=64).flat_map(|world| (1..=world).filter_map(move |tensor| Layout::new(world, tensor).ok()))
    }

    #[test]
    fn rank_and_place_are_inverse() {
        for layout in every_layout() {
            for rank in 0..layout.world() {
                assert_eq!(layout.rank(layout.place(rank).expect("in the world")), rank, "{layout}");
            }
        }
    }

    #[test]
    fn tensor_parallel_ranks_are_adjacent() {
        for layout in every_layout() {
            for rank in 0..layout.world() {
                let group = layout.tensor_group(layout.place(rank).expect("in the world"));
                assert!(group.contains(&rank));
                assert!(group.windows(2).all(|pair| pair[1] == pair[0] + 1), "{layout}: {group:?}");
            }
        }
    }

    #[test]
    fn groups_of_a_kind_partition_the_world_and_two_kinds_meet_in_one_rank() {
        for layout in every_layout() {
            for rank in 0..layout.world() {
                let place = layout.place(rank).expect("in the world");
                let (data, tensor) = (layout.data_group(place), layout.tensor_group(place));
                assert_eq!(data[place.data_rank as usize], rank);
                assert_eq!(tensor[place.tensor_rank as usize], rank);
                assert_eq!(data.iter().filter(|member| tensor.contains(member)).count(), 1);
                for member in &data {
                    assert_eq!(layout.data_group(layout.place(*member).expect("in the world")), data);
                }
                for member in &tensor {
                    assert_eq!(layout.tensor_group(layout.place(*member).expect("in the world")), tensor);
                }
            }
        }
    }

    #[test]
    fn impossible_layouts_are_named() {
        let error = Layout::new(6, 4).expect_err("4 does not divide 6");
        assert_eq!(error.to_string(), "6 ranks cannot be divided into tensor-parallel groups of 4");
        assert!(Layout::new(0, 1).is_err());
        assert!(Layout::new(4, 0).is_err());
        let error = Layout::new(4, 2).expect("it divides").place(4).expect_err("outside");
        assert_eq!(error.to_string(), "rank 4 is not one of 4");
    }
}
