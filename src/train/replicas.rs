//! Finds silent corruption by comparing values that must be bit-identical on several ranks.
//!
//! All replicas of the model must have the same weights, averages and moments, so they compare a digest of these
//! tensors. The digest does not reveal a wrong gradient, because the reduction spreads the gradient to all replicas. A
//! replay finds a wrong gradient: each rank computes the gradient of its neighbour's rows once more and compares the
//! bits. A replay is possible because random numbers depend on the position of a row in the global batch, and not on
//! the rank.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use tch::{Device, Kind, Tensor};

use super::error::TrainError;
use crate::comm::Group;

/// A digest of the bits of f32 or bf16 tensors. The bits of each number are read as an integer, the integers of each
/// tensor are added up, and the digest is a hash of the sums of all tensors. A single flipped bit always changes a sum.
/// The device computes the sums, and only the sums are copied to the host.
pub(super) fn digest(tensors: &[Tensor]) -> Result<u64, TrainError> {
    let _without_gradients = tch::no_grad_guard();
    let sum = |tensor: &Tensor| tensor.f_detach()?.f_view_dtype(integer(tensor))?.f_sum(Kind::Int64);
    let sums = tensors.iter().map(sum).collect::<Result<Vec<_>, _>>()?;
    let sums = Vec::<i64>::try_from(Tensor::f_stack(&sums, 0)?.f_to_device(Device::Cpu)?)?;
    let mut hasher = DefaultHasher::new();
    sums.hash(&mut hasher);
    Ok(hasher.finish())
}

/// The type of integers that have as many bits as the numbers of `tensor`.
fn integer(tensor: &Tensor) -> Kind {
    if tensor.kind() == Kind::BFloat16 { Kind::Int16 } else { Kind::Int }
}

/// Gathers `numbers` from all ranks of `group`. The result has one list per rank.
pub(super) fn gather<const N: usize>(group: &Group, numbers: [u64; N]) -> Result<Vec<[u64; N]>, TrainError> {
    let own = Tensor::f_from_slice(&numbers.map(u64::cast_signed))?.f_to_device(group.device())?;
    let all = group.all_gather(&own)?.f_to_device(Device::Cpu)?.f_view([-1])?;
    let all: Vec<u64> = Vec::<i64>::try_from(all)?.into_iter().map(i64::cast_unsigned).collect();
    Ok(all.as_chunks::<N>().0.to_vec())
}

/// Given one number per rank, returns the ranks that do not have the majority's number. If no number has a majority,
/// returns all ranks.
pub(super) fn minority(numbers: &[u64]) -> Vec<usize> {
    let count = |number: &u64| numbers.iter().filter(|other| *other == number).count();
    let majority = numbers.iter().find(|number| 2 * count(number) > numbers.len());
    (0..numbers.len()).filter(|rank| majority != Some(&numbers[*rank])).collect()
}

/// The digests that one rank contributes to a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replayed {
    /// Digest of the gradient of the rank's own rows.
    pub(super) own: u64,
    /// Digest of the gradient of the next rank's rows.
    pub(super) next: u64,
    /// Digest of the gradient of the previous rank's rows. There are two other digests of the same gradient. If these
    /// two differ, this digest shows which of them is wrong.
    pub(super) previous: u64,
}

/// The ranks that computed a wrong gradient. The gradient of a rank's rows was computed three times: by this rank, by
/// the previous rank and by the next rank. The value that two of them agree on is right. If no two agree, all three
/// count as wrong. With two ranks, the previous and the next rank are the same rank, which computed the gradient twice.
pub(super) fn wrong_ranks(replayed: &[Replayed]) -> Vec<usize> {
    let ranks = replayed.len();
    let mut wrong: Vec<usize> = Vec::new();
    for rank in 0..ranks {
        let (before, after) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
        let opinions = [(rank, replayed[rank].own), (before, replayed[before].next), (after, replayed[after].previous)];
        let differing = minority(&opinions.map(|(_, digest)| digest));
        wrong.extend(differing.into_iter().map(|index| opinions[index].0));
    }
    wrong.sort_unstable();
    wrong.dedup();
    wrong
}

/// Injected fault: flips the lowest bit of the first number of an f32 or bf16 tensor.
pub(super) fn flip_bit(tensor: &Tensor) -> Result<(), TrainError> {
    let _without_gradients = tch::no_grad_guard();
    let mut bits = tensor.f_detach()?.f_view([-1])?.f_narrow(0, 0, 1)?.f_view_dtype(integer(tensor))?;
    let flipped = bits.f_bitwise_xor(1)?;
    bits.f_copy_(&flipped)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flipped_bit_changes_the_digest() {
        let tensors = [Tensor::from_slice(&[1.0_f32, -2.0, 3.5]), Tensor::from_slice(&[0.0_f32; 1000])];
        let before = digest(&tensors).expect("the tensors are f32");
        assert_eq!(digest(&tensors).expect("the tensors are f32"), before);
        flip_bit(&tensors[1]).expect("the tensor is f32");
        assert_ne!(digest(&tensors).expect("the tensors are f32"), before);
    }

    #[test]
    fn majority_decides_who_differs() {
        assert_eq!(minority(&[5, 5, 5, 5]), [0_usize; 0]);
        assert_eq!(minority(&[5, 5, 7, 5]), [2]);
        assert_eq!(minority(&[5, 7]), [0, 1]);
        assert_eq!(minority(&[5, 7, 9]), [0, 1, 2]);
    }

    #[test]
    fn rank_with_a_wrong_gradient_is_found_by_its_neighbours() {
        let right = |ranks: usize| -> Vec<Replayed> {
            let digest = |rank: usize| 100 + (rank % ranks) as u64;
            let of = |rank| Replayed { own: digest(rank), next: digest(rank + 1), previous: digest(rank + ranks - 1) };
            (0..ranks).map(of).collect()
        };
        for ranks in 2..6 {
            assert_eq!(wrong_ranks(&right(ranks)), [0_usize; 0]);
        }
        let mut once = right(4);
        once[2].own = 7;
        assert_eq!(wrong_ranks(&once), [2]);
        let mut always = right(4);
        always[2] = Replayed { own: 7, next: 8, previous: 9 };
        assert_eq!(wrong_ranks(&always), [2]);
        let mut two = right(2);
        two[1].own = 7;
        assert_eq!(wrong_ranks(&two), [1]);
        two[1] = Replayed { own: 7, next: 8, previous: 9 };
        assert_eq!(wrong_ranks(&two), [0, 1], "if all digests of one rank are wrong, its peer looks wrong too");
    }
}
