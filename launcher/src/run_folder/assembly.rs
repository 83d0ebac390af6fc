//! Gathers what the ranks have written until a checkpoint can be committed. Pure: no file is touched.

use std::collections::BTreeMap;

use crate::protocol::PartsWritten;

/// Parts of checkpoints that some ranks have written and others not yet.
#[derive(Debug)]
pub struct Assembly {
    world: usize,
    attempt: u32,
    waiting: BTreeMap<u64, BTreeMap<u32, PartsWritten>>,
}

/// What a message of a rank means.
#[derive(Debug, Clone, PartialEq)]
pub enum Gathered {
    /// Others have not written theirs yet.
    Waiting,
    /// All have: to be committed.
    Complete {
        /// Steps made.
        step: u64,
        /// Of each rank, in order.
        parts: Vec<PartsWritten>,
    },
    /// It is of another attempt, and refused.
    Stale(String),
}

impl Assembly {
    /// Of the ranks of one attempt.
    pub fn new(world: usize, attempt: u32) -> Self {
        Self { world, attempt, waiting: BTreeMap::new() }
    }

    /// Takes in what a rank says.
    pub fn add(&mut self, rank: u32, parts: PartsWritten) -> Gathered {
        let step = parts.step;
        if parts.attempt != self.attempt || rank as usize >= self.world {
            return Gathered::Stale(format!(
                "rank {rank} of attempt {} wrote parts of step {step}, the present attempt is {}; they are not committed",
                parts.attempt, self.attempt
            ));
        }
        let ranks = self.waiting.entry(step).or_default();
        ranks.insert(rank, parts);
        if ranks.len() < self.world {
            return Gathered::Waiting;
        }
        let parts = self.waiting.remove(&step).unwrap_or_default().into_values().collect();
        Gathered::Complete { step, parts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_complete_when_every_rank_of_this_attempt_has_written() {
        let parts = |step, attempt| PartsWritten { step, attempt, files: Vec::new(), score: None };
        let mut assembly = Assembly::new(2, 3);
        assert_eq!(assembly.add(0, parts(10, 3)), Gathered::Waiting);
        assert_eq!(assembly.add(0, parts(20, 3)), Gathered::Waiting, "a fast rank may be ahead");
        assert!(matches!(assembly.add(1, parts(10, 2)), Gathered::Stale(text) if text.contains("attempt 2")));
        assert!(matches!(assembly.add(7, parts(10, 3)), Gathered::Stale(_)));
        let complete = Gathered::Complete { step: 10, parts: vec![parts(10, 3), parts(10, 3)] };
        assert_eq!(assembly.add(1, parts(10, 3)), complete);
        assert_eq!(assembly.add(1, parts(10, 3)), Gathered::Waiting, "it is not committed twice");
    }
}
