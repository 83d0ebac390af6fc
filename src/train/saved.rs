//! Writes the state of a run as parts of a checkpoint, and restores it.
//!
//! Four parts hold named tensors: the weights, their moving average, and the first and second moments. The fifth part
//! is `state.json`. Random numbers need no saved state, because they are a function of seed and step.
//!
//! Data-parallel ranks hold the same tensors, so only one of them writes each part. With tensor parallelism, each rank
//! of a replica writes one piece of a tensor part, and only the first piece contains the replicated tensors. A run that
//! resumes joins the pieces and splits the tensors again for its own layout, so it can resume with any layout.

use std::collections::BTreeMap;

use locdiff_core::config::{DiffusionConfig, RunConfig, TrainMethod};
use tch::{Device, Tensor};

use super::error::TrainError;
use super::step::Trainer;
use crate::checkpoint::{
    CheckpointError, Division, EMA, FIRST_MOMENTS, NamedTensors, Part, SECOND_MOMENTS, STATE, WEIGHTS,
    divisions_metadata, piece_name,
};
use crate::comm::{Layout, LayoutPosition};
use crate::diffusion::NoiseSchedule;
use crate::infer::{Saved, SavedState, Weights};
use crate::model::{ModelError, Split};
use crate::native::cuda;

impl Saved {
    /// Checks that the degree, the width of embeddings and the number of kept dimensions are the same in the checkpoint
    /// and in this run.
    pub(super) fn check_network(&self, config: &RunConfig, embedding_width: u32) -> Result<(), TrainError> {
        let (state, dims) = (&self.state, (u64::from(self.state.degree) + 1).pow(2));
        let kept = state.kept_dimensions.as_ref().map_or(dims, |kept| kept.len() as u64);
        self.check("the width of embeddings", state.embedding_width.into(), embedding_width.into())?;
        if config.train.method != TrainMethod::Locdiff {
            return Ok(());
        }
        self.check("model.degree", state.degree.into(), config.model.degree.into())?;
        self.check("model.low_pass_dims", kept, config.model.kept_dims())
    }

    /// Checks that the number of threads has not changed, because the last bits of results depend on it.
    pub(super) fn check_threads(&self, config: &RunConfig) -> Result<(), TrainError> {
        self.check("train.threads", self.state.threads.into(), config.train.threads().into())
    }

    fn check(&self, field: &str, got: u64, want: u64) -> Result<(), TrainError> {
        if got == want {
            return Ok(());
        }
        let checkpoint = self.folder.display();
        Err(TrainError::Mismatch(format!(
            "{checkpoint}: {field} is {got}, but this run has {want}; use another checkpoint, or start a new --run"
        )))
    }

    /// A warning if the noise schedule of the checkpoint differs from the noise schedule of this run; else `None`.
    pub(super) fn noise_warning(&self, config: &RunConfig) -> Option<String> {
        let was: DiffusionConfig = serde_json::from_value(self.state.config.get("diffusion")?.clone()).ok()?;
        let is = &config.diffusion;
        let settings =
            |of: &DiffusionConfig| serde_json::to_string(&(of.schedule, of.shift, of.timesteps)).unwrap_or_default();
        (NoiseSchedule::new(&was, &config.model) != NoiseSchedule::new(is, &config.model)).then(|| {
            format!(
                "{} was trained with the diffusion settings [schedule, shift, timesteps] = {}, but this run has {}; \
                 the network must relearn its timesteps",
                self.folder.display(),
                settings(&was),
                settings(is)
            )
        })
    }
}

impl Trainer {
    /// The parts that this rank writes. The tensors are copies, so that training can continue while they are written.
    pub(super) fn parts(
        &self,
        state: &SavedState,
        place: LayoutPosition,
        layout: Layout,
    ) -> Result<Vec<Part>, TrainError> {
        let (parameters, piece) = (self.work.method.parameters(), (place.tensor_rank, layout.tensor_parallel()));
        let is_mine = |index: u32| index % layout.data_parallel() == place.data_rank;
        let of_tensors = |part: &str, tensors: &[Tensor], buffers: NamedTensors| {
            let is_written = |split: Split| piece.0 == 0 || split != Split::Replicated;
            let own = parameters.iter().zip(tensors).filter(|(parameter, _)| is_written(parameter.split));
            let own = own.map(|(parameter, tensor)| (parameter.name.clone(), tensor.shallow_clone()));
            let tensors = copied(&own.chain(buffers).collect::<NamedTensors>())?;
            let metadata = if piece == (0, 1) { BTreeMap::new() } else { divisions_metadata(&self.divisions()) };
            Ok::<_, TrainError>(Part::Tensors { name: piece_name(part, piece.0, piece.1), tensors, metadata })
        };
        let (work, weights) = (&self.work, parameters.tensors());
        let files: [(&str, &[Tensor]); 4] = [
            (WEIGHTS, &weights),
            (EMA, &work.ema),
            (FIRST_MOMENTS, &work.moments.exp_avgs),
            (SECOND_MOMENTS, &work.moments.exp_avg_sqs),
        ];
        let mut parts = Vec::new();
        for (index, (part, tensors)) in (0..).zip(files).filter(|(index, _)| is_mine(*index)) {
            let has_buffers = index < 2 && piece.0 == 0;
            let buffers = if has_buffers { work.method.standardisation().named() } else { Vec::new() };
            parts.push(of_tensors(part, tensors, buffers)?);
        }
        if is_mine(4) && piece.0 == 0 {
            let value = serde_json::to_value(state).map_err(|error| CheckpointError::Internal(error.to_string()))?;
            parts.push(Part::Json { name: STATE.to_owned(), value });
        }
        Ok(parts)
    }

    /// Copies the tensors that a checkpoint holds, just as they are copied before a checkpoint is written.
    pub(super) fn copied_state(&self) -> Result<Vec<NamedTensors>, TrainError> {
        let (work, weights) = (&self.work, self.work.method.parameters().tensors());
        let lists = [&weights, &work.ema, &work.moments.exp_avgs, &work.moments.exp_avg_sqs];
        let named = |list: &Vec<Tensor>| list.iter().map(|tensor| (String::new(), tensor.shallow_clone())).collect();
        lists.into_iter().map(|list| copied(&named(list))).collect()
    }

    /// How the split tensors are divided among tensor-parallel ranks.
    fn divisions(&self) -> BTreeMap<String, Division> {
        let division = |split: Split| match split {
            Split::Replicated => None,
            Split::Rows => Some(Division { dim: 0, sections: 1 }),
            Split::RowHalves => Some(Division { dim: 0, sections: 2 }),
            Split::Columns => Some(Division { dim: 1, sections: 1 }),
        };
        let parameters = self.work.method.parameters().iter();
        parameters.filter_map(|parameter| Some((parameter.name.clone(), division(parameter.split)?))).collect()
    }

    /// The averaged weights, as whole tensors. All ranks of a replica must call this function, because each rank may
    /// hold only pieces of them.
    pub(super) fn averaged(&self) -> Result<Weights, TrainError> {
        let method = &self.work.method;
        let group = method.placement().tensor_parallel.as_ref();
        let parameters = method.parameters().gather_whole(&self.work.ema, group)?;
        let standardisation = [0, 1].map(|index| method.standardisation().named()[index].1.shallow_clone());
        Ok(Weights { parameters, standardisation })
    }

    /// Restores the state from a checkpoint. With the same layout, the next step is bit-identical to the same step of a
    /// run that was not interrupted.
    pub(super) fn restore(&mut self, saved: &Saved) -> Result<(), TrainError> {
        self.load(saved, WEIGHTS)?;
        let averages = saved.weights(EMA)?.parameters;
        let (firsts, seconds) = (saved.checkpoint.tensors(FIRST_MOMENTS)?, saved.checkpoint.tensors(SECOND_MOMENTS)?);
        let (parameters, work) = (self.work.method.parameters(), &self.work);
        for (own, whole) in
            [(&work.ema, averages), (&work.moments.exp_avgs, firsts), (&work.moments.exp_avg_sqs, seconds)]
        {
            let pieces = parameters.pieces(&whole).map_err(|error| network_mismatch(saved, &error))?;
            copy_into(own, &pieces)?;
        }
        let _ = self.work.moments.step.f_fill_(saved.state.updates as f64)?;
        self.updates = saved.state.updates;
        Ok(())
    }

    /// Loads the averaged weights and the standardisation of another run as initial weights.
    pub(super) fn load_initial(&mut self, saved: &Saved) -> Result<(), TrainError> {
        self.load(saved, EMA)?;
        copy_into(&self.work.ema, &self.work.method.parameters().tensors())
    }

    fn load(&mut self, saved: &Saved, part: &str) -> Result<(), TrainError> {
        let Weights { parameters, standardisation: [mean_e, deviation_e] } = saved.weights(part)?;
        let method = &mut self.work.method;
        let loaded = method.parameters_mut().load(&parameters);
        loaded
            .and_then(|()| method.standardisation_mut().set(&mean_e, &deviation_e))
            .map_err(|error| network_mismatch(saved, &error))?;
        self.work.weights_changed()
    }
}

/// Allocates memory for a copy of `numbers` numbers, with the same type and on the same device as `like`. If the GPU
/// has no room, the memory is allocated in main memory instead, and training has to wait for the copy.
fn allocate_copy(numbers: i64, like: &Tensor) -> Result<Tensor, TrainError> {
    let on = |device: Device| Tensor::f_empty([numbers], (like.kind(), device));
    if !like.device().is_cuda() {
        return Ok(on(like.device())?);
    }
    if let Ok(block) = on(like.device()) {
        return Ok(block);
    }
    cuda::empty_cache()?;
    on(like.device()).or_else(|_| {
        tracing::warn!(
            "the GPU has no memory for a copy of {numbers} numbers, so training waits until they are in main memory"
        );
        Ok(on(Device::Cpu)?)
    })
}

/// Copies tensors into one block of memory, from which the checkpoint writer reads. The block is on the device of the
/// tensors, or in main memory if the device has no room.
fn copied(tensors: &NamedTensors) -> Result<NamedTensors, TrainError> {
    let _without_gradients = tch::no_grad_guard();
    let Some((_, first)) = tensors.first() else { return Ok(Vec::new()) };
    let numbers: i64 = tensors.iter().map(|(_, tensor)| tensor.numel() as i64).sum();
    if let Some((name, other)) = tensors.iter().find(|(_, tensor)| tensor.kind() != first.kind()) {
        let text =
            format!("tensor {name} has the type {:?}, but the other tensors have {:?}", other.kind(), first.kind());
        return Err(CheckpointError::Internal(text).into());
    }
    // Allocate one block for all tensors, because hundreds of allocations would stall training at the first checkpoint.
    let block = allocate_copy(numbers, first)?;
    let mut begin = 0;
    let mut copy = |(name, tensor): &(String, Tensor)| {
        let mut place = block.f_narrow(0, begin, tensor.numel() as i64)?.f_view(&tensor.size()[..])?;
        place.f_copy_(&tensor.f_detach()?)?;
        begin += tensor.numel() as i64;
        Ok((name.clone(), place))
    };
    tensors.iter().map(&mut copy).collect()
}

fn network_mismatch(saved: &Saved, error: &ModelError) -> TrainError {
    let checkpoint = saved.folder.display();
    TrainError::Mismatch(format!("{checkpoint}: the tensors do not match the network of this run: {error}"))
}

fn copy_into(own: &[Tensor], pieces: &[Tensor]) -> Result<(), TrainError> {
    let _without_gradients = tch::no_grad_guard();
    for (own, piece) in own.iter().zip(pieces) {
        own.shallow_clone().f_copy_(piece)?;
    }
    Ok(())
}
