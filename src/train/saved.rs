//! The state of a run as parts of a checkpoint, and back.
//!
//! Four files of tensors by name (weights, their average, first and second moments) and `state.json`. Data-parallel ranks hold
//! the same: each part is written by one of them. Random numbers need no state of their own: they are named by seed and step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use locdiff_launch::config::RunConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Tensor};

use super::error::TrainError;
use super::step::{Trainer, duplicate};
use crate::checkpoint::{
    Checkpoint, CheckpointError, EMA, FIRST_MOMENTS, Part, SECOND_MOMENTS, STATE, WEIGHTS, piece_name,
};
use crate::model::ModelError;
use crate::shards::Bookmark;
use crate::shdd::Filter;

/// `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedState {
    /// Steps made.
    pub(super) step: u64,
    /// Optimiser updates made: steps that were not skipped.
    pub(super) updates: u64,
    /// Steps skipped in all.
    pub(super) skipped_steps: u64,
    /// Steps skipped just before this one.
    pub(super) skipped_in_a_row: u32,
    /// Degree of the codes.
    pub(super) degree: u32,
    /// Width of the embeddings.
    pub(super) embedding_width: u32,
    /// Dimensions of the code that are kept; none: all.
    pub(super) kept_dimensions: Option<Vec<u32>>,
    /// The next batch, and what its rows depend on.
    pub(super) bookmark: Bookmark,
    /// Seed of everything random.
    pub(super) seed: u64,
    /// CPU threads of each worker, on which the last bits depend.
    pub(super) threads: u32,
    /// The configuration at this step.
    pub(super) config: Value,
}

impl SavedState {
    /// The filter that the run began with.
    pub(super) fn filter(&self) -> Result<Option<Filter>, TrainError> {
        let dims = (self.degree as usize + 1).pow(2);
        Ok(self.kept_dimensions.as_ref().map(|kept| Filter::from_indices(kept, dims)).transpose()?)
    }

    /// That the configuration has the same network.
    pub(super) fn check(&self, folder: &Path, config: &RunConfig, embedding_width: u32) -> Result<(), TrainError> {
        let misfit = |field, got: u64, want: u64| TrainError::Misfit {
            checkpoint: folder.display().to_string(),
            field,
            got: got.to_string(),
            want: want.to_string(),
        };
        let kept = |kept: u64, dims: u64| if kept == 0 { dims } else { kept };
        let dims = (u64::from(self.degree) + 1).pow(2);
        for (field, got, want) in [
            ("model.degree", u64::from(self.degree), u64::from(config.model.degree)),
            ("the width of embeddings", u64::from(self.embedding_width), u64::from(embedding_width)),
            (
                "model.low_pass_dims",
                kept(self.kept_dimensions.as_ref().map_or(0, |kept| kept.len() as u64), dims),
                config.model.kept_dims(),
            ),
        ] {
            if got != want {
                return Err(misfit(field, got, want));
            }
        }
        Ok(())
    }
}

/// A checkpoint and the state that it says.
pub(super) struct Saved {
    pub(super) folder: PathBuf,
    pub(super) checkpoint: Checkpoint,
    pub(super) state: SavedState,
}

impl Saved {
    /// Reads manifest and state; tensors are read when they are needed.
    pub(super) fn open(folder: &Path) -> Result<Self, TrainError> {
        let checkpoint = Checkpoint::open(folder)?;
        let bad =
            |error: serde_json::Error| CheckpointError::Bad { path: folder.join(STATE), reason: error.to_string() };
        let state = serde_json::from_value(checkpoint.json(STATE)?).map_err(bad)?;
        Ok(Self { folder: folder.to_owned(), checkpoint, state })
    }
}

impl Trainer {
    /// The parts that data-parallel rank `rank` of `ranks` writes, copied so that training may go on.
    pub(super) fn parts(&self, state: &SavedState, (rank, ranks): (u32, u32)) -> Result<Vec<Part>, TrainError> {
        let names = || self.network.parameters().iter().map(|parameter| parameter.name.clone());
        let named = |tensors: &[Tensor]| copied(names().zip(tensors.iter().map(Tensor::shallow_clone)).collect());
        let is_mine = |index: u32| index % ranks == rank;
        let mut parts = Vec::new();
        if is_mine(0) {
            let weights = joined(self.network.parameters().named(), self.network.buffers());
            parts.push(of_tensors(WEIGHTS, copied(weights)?));
        }
        if is_mine(1) {
            let averages = joined(self.averaged(), self.network.buffers());
            parts.push(of_tensors(EMA, copied(averages)?));
        }
        if is_mine(2) {
            parts.push(of_tensors(FIRST_MOMENTS, named(&self.moments.exp_avgs)?));
        }
        if is_mine(3) {
            parts.push(of_tensors(SECOND_MOMENTS, named(&self.moments.exp_avg_sqs)?));
        }
        if is_mine(4) {
            let value = serde_json::to_value(state).map_err(|error| CheckpointError::Internal(error.to_string()))?;
            parts.push(Part::Json { name: STATE.to_owned(), value });
        }
        Ok(parts)
    }

    /// Takes everything back from a checkpoint: the next step will be that of the run that was interrupted, to the bit.
    pub(super) fn restore(&mut self, saved: &Saved) -> Result<(), TrainError> {
        let (weights, buffers) = self.weights_of(saved, WEIGHTS)?;
        self.network.parameters_mut().load(&weights).map_err(|source| network_misfit(saved, source))?;
        self.standardise_as(saved, &buffers)?;
        let (averages, _) = self.weights_of(saved, EMA)?;
        let names: Vec<String> = self.network.parameters().iter().map(|parameter| parameter.name.clone()).collect();
        copy_into(saved, &names, &mut self.ema, &averages)?;
        copy_into(saved, &names, &mut self.moments.exp_avgs, &saved.checkpoint.tensors(FIRST_MOMENTS)?)?;
        copy_into(saved, &names, &mut self.moments.exp_avg_sqs, &saved.checkpoint.tensors(SECOND_MOMENTS)?)?;
        let _ = self.moments.step.f_fill_(saved.state.updates as f64)?;
        self.updates = saved.state.updates;
        Ok(())
    }

    /// Starts from the averaged weights of another run, standardised as they were trained.
    pub(super) fn start_from(&mut self, saved: &Saved) -> Result<(), TrainError> {
        let (averages, buffers) = self.weights_of(saved, EMA)?;
        self.network.parameters_mut().load(&averages).map_err(|source| network_misfit(saved, source))?;
        self.standardise_as(saved, &buffers)?;
        self.ema = self.network.parameters().tensors().iter().map(duplicate).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Weights and buffers of a part, apart.
    fn weights_of(&self, saved: &Saved, part: &str) -> Result<(Named, Named), TrainError> {
        let own: Vec<String> = self.network.buffers().into_iter().map(|(name, _)| name).collect();
        let (buffers, weights) = saved.checkpoint.tensors(part)?.into_iter().partition(|(name, _)| own.contains(name));
        Ok((weights, buffers))
    }

    fn standardise_as(&mut self, saved: &Saved, buffers: &Named) -> Result<(), TrainError> {
        let names: Vec<String> = self.network.buffers().into_iter().map(|(name, _)| name).collect();
        let (mean, deviation) = (found(saved, buffers, &names[0])?, found(saved, buffers, &names[1])?);
        Ok(self.network.standardise(mean, deviation)?)
    }
}

type Named = Vec<(String, Tensor)>;

/// One list after the other.
fn joined(first: Named, second: Named) -> Named {
    first.into_iter().chain(second).collect()
}

/// Owned copies in main memory.
fn copied(tensors: Named) -> Result<Named, TrainError> {
    let copy = |(name, tensor): (String, Tensor)| match tensor.device() {
        Device::Cpu => Ok((name, duplicate(&tensor)?)),
        _ => Ok((name, tensor.f_detach()?.f_to_device(Device::Cpu)?)),
    };
    tensors.into_iter().map(copy).collect()
}

fn network_misfit(saved: &Saved, source: ModelError) -> TrainError {
    TrainError::Network { checkpoint: saved.folder.display().to_string(), source }
}

fn of_tensors(part: &str, tensors: Named) -> Part {
    Part::Tensors { name: piece_name(part, 0, 1), tensors, metadata: BTreeMap::new() }
}

fn copy_into(saved: &Saved, names: &[String], into: &mut [Tensor], from: &Named) -> Result<(), TrainError> {
    let _without_gradients = tch::no_grad_guard();
    for (name, own) in names.iter().zip(into) {
        let tensor = found(saved, from, name)?;
        if tensor.size() != own.size() {
            return Err(TrainError::Misfit {
                checkpoint: saved.folder.display().to_string(),
                field: "the shape of a tensor",
                got: format!("{:?} of {name}", tensor.size()),
                want: format!("{:?}", own.size()),
            });
        }
        own.f_copy_(tensor)?;
    }
    Ok(())
}

fn found<'a>(saved: &Saved, among: &'a Named, name: &str) -> Result<&'a Tensor, TrainError> {
    let tensor = among.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor);
    let reason = || format!("it has no tensor {name}");
    Ok(tensor.ok_or_else(|| CheckpointError::Bad { path: saved.folder.clone(), reason: reason() })?)
}
