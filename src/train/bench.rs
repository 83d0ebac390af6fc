//! `bench train`: times training steps on random rows in the memory of the device. If asked, it also times a whole
//! training on `shards.train`: the steps and everything else that a training does, except checkpoints and evaluations.
//!
//! The speed limits of the device are measured in the same run, so that times from different machines can be compared.
// Letters in tensor names: b rows of this rank, e width of an embedding.

use std::time::Instant;

use locdiff_core::config::RunConfig;
use locdiff_core::geo::Place;
use locdiff_core::protocol::{Ceilings, StepProfile, StepSpeed, ToLauncher, TrainBench, TrainBenched, TrainJob};
use locdiff_core::pulse;
use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::data::share;
use super::error::TrainError;
use super::observe::{Launcher, Meter};
use super::profile::profile_steps;
use super::run::run;
use super::step::{StepOptions, Trainer};
use crate::comm::Communicator;
use crate::native::random::{RandomTensors, RowDraw, Step};
use crate::native::{NativeError, cuda};
use crate::shards::{Batch, Position};
use crate::shdd::points::uniform_points_of;

/// Steps before the timed ones: eager steps, the recording of the graph, and a few replays.
const WARM_UP: u32 = 20;
/// Number of different batches. The steps use these batches in turn.
const BATCHES: u64 = 4;
/// Width of the random embeddings if `model.embedding_width` is "auto": the width of CLIP ViT-L/14 features.
const WIDTH: u32 = 768;
/// A training on `shards.train` reports at least this many times during the timed steps, if there are enough steps.
const REPORTS_MIN: u64 = 4;
/// A matrix product and a copy measure the speed limits. Each is repeated this many times, and the fastest time counts.
const REPETITIONS: usize = 10;
/// Number of profiled steps.
const PROFILED_STEPS: u64 = 5;

/// The work of a step. All fields except `global_batch` count the work of one rank.
#[derive(Debug, Clone, Copy)]
struct StepCost {
    /// Rows over all ranks.
    global_batch: f64,
    /// Operations of the matrix products.
    flops: f64,
    /// Minimum number of bytes that the update of the parameters moves.
    update_bytes: f64,
}

/// Times training. All ranks must call this function. Every rank returns its own times.
pub fn bench(job: &TrainBench, ranks: &Communicator) -> Result<TrainBenched, TrainError> {
    let config = &job.config;
    let device = ranks.world().device();
    if let Device::Cuda(index) = device {
        cuda::set_device(index)?;
    }
    let width = embedding_width(config);
    let mut trainer = Trainer::new(config, width, None, ranks)?;
    let kind = trainer.work.method.placement().compute_kind();
    let parameters: usize = trainer.work.method.parameters().tensors().iter().map(Tensor::numel).sum();
    let cost = StepCost {
        global_batch: f64::from(config.train.global_batch),
        flops: Meter::new(config, &trainer, ranks).step_flops(),
        update_bytes: parameters as f64 * update_bytes(kind),
    };
    let batches = (0..BATCHES).map(|index| batch(job, index, width, ranks)).collect::<Result<Vec<_>, _>>()?;
    let ahead = usize::from(trainer.work.can_run_ahead());
    let (mut times_ms, mut begun) = (Vec::new(), Instant::now());
    for step in 0..u64::from(WARM_UP + job.steps) {
        pulse::begin_step(step + 1);
        trainer.launch(step, &batches[(step % BATCHES) as usize], &StepOptions::default())?;
        while trainer.in_flight() > ahead {
            trainer.finish()?;
        }
        times_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        begun = Instant::now();
    }
    while trainer.in_flight() > 0 {
        trainer.finish()?;
    }
    let memory = speed(times_ms.split_off(WARM_UP as usize), cost, 0.0);
    // A training also holds a copy of its state, from which a checkpoint is written.
    let copy = trainer.copied_state()?;
    let (peak_gib, graph_nodes, path) = (peak_gib(device)?, trainer.graph_nodes(), trainer.work.path());
    drop(copy);
    let profile = if job.profile { profile(&mut trainer, &batches, ranks)? } else { None };
    drop((trainer, batches));
    Ok(TrainBenched {
        path: path.to_owned(),
        graph_nodes: graph_nodes.map(|nodes| nodes as u64),
        memory,
        end_to_end: end_to_end(job, ranks, cost)?,
        peak_gib,
        ceilings: ceilings(device, kind)?,
        profile,
    })
}

/// Profiles a few steps of rank 0. Returns `None` on the other ranks.
fn profile(trainer: &mut Trainer, batches: &[Batch], ranks: &Communicator) -> Result<Option<StepProfile>, TrainError> {
    let is_graph = trainer.graph_nodes().is_some();
    let mut steps = || {
        (0..PROFILED_STEPS).try_for_each(|step| {
            trainer.launch(step, &batches[(step % BATCHES) as usize], &StepOptions::default())?;
            trainer.finish().map(drop)
        })
    };
    if ranks.rank() != 0 {
        // All ranks must take part in the steps.
        return steps().map(|()| None);
    }
    Ok(Some(StepProfile { is_graph, rows: profile_steps(ranks.world().device(), PROFILED_STEPS, steps)? }))
}

/// Width of the random embeddings.
pub(crate) fn embedding_width(config: &RunConfig) -> u32 {
    config.model.embedding_width.value().unwrap_or(WIDTH)
}

/// Largest amount of GPU memory that libtorch allocated in this process, GiB; `None` on the CPU.
pub(crate) fn peak_gib(device: Device) -> Result<Option<f64>, NativeError> {
    let Device::Cuda(index) = device else { return Ok(None) };
    Ok(Some(cuda::memory(index)?.allocated_peak_bytes as f64 / (1_u64 << 30) as f64))
}

/// Minimum number of bytes that an update moves per parameter, if gradients have type `kind`. The gradient is read
/// twice: for its norm and for the update. Four f32 numbers are read and written: the weight, its average and two
/// moments. If `kind` has fewer bits than f32, a copy of the weight is written too.
fn update_bytes(kind: Kind) -> f64 {
    let (gradient, copy) = if kind == Kind::Float { (4.0, 0.0) } else { (2.0, 2.0) };
    2.0 * gradient + 2.0 * 16.0 + copy
}

/// This rank's slice of a batch of random rows.
fn batch(job: &TrainBench, index: u64, width: u32, ranks: &Communicator) -> Result<Batch, TrainError> {
    let train = &job.config.train;
    let slice = share(ranks).rows(train.global_batch);
    let (first_sample, samples) = (slice.start, (slice.end - slice.start) as usize);
    let draw =
        RowDraw { stream: Stream::Test(0), step: Step::At(index), first_sample, samples, elements: width as usize };
    let image_be = Philox::new(train.seed).normal(ranks.world().device(), draw)?.f_to_kind(Kind::Half)?;
    let points = uniform_points_of(Stream::Test(1), train.seed, index, first_sample, samples)?;
    let places: Vec<Place> = points.into_iter().map(Place::from).collect();
    let coordinates = [
        places.iter().map(|place| place.latitude().0).collect(),
        places.iter().map(|place| place.longitude().0).collect(),
    ];
    let position = Position { seed: train.seed, epoch: 0, step: index, global_batch: train.global_batch };
    Ok(Batch::of(image_be, coordinates, position, slice))
}

/// Times a training on `shards.train`. Returns `None` if `job` does not ask for it. Only rank 0 knows the times; all
/// other ranks return `None`.
fn end_to_end(job: &TrainBench, ranks: &Communicator, cost: StepCost) -> Result<Option<StepSpeed>, TrainError> {
    let Some(run_dir) = &job.scratch else { return Ok(None) };
    let mut config = job.config.clone();
    config.train.steps = u64::from(WARM_UP + job.steps);
    config.checkpoint.every = config.train.steps;
    config.shards.validation = String::new();
    let log_every = config.train.log_every.min(u64::from(job.steps) / REPORTS_MIN).max(1);
    config.train.log_every = log_every;
    let train = TrainJob { config, run_dir: run_dir.clone(), ..TrainJob::default() };
    let mut reports = Vec::new();
    let mut send = |message: ToLauncher| {
        if let ToLauncher::Progress(progress) = message {
            reports.push(progress);
        }
        Ok(())
    };
    run(&train, 0, ranks, false, Launcher { send: &mut send, next_fault: &mut || None })?;
    let timed = reports.iter().filter(|report| report.step >= u64::from(WARM_UP) + log_every);
    let (times_ms, waits): (Vec<f64>, Vec<f64>) =
        timed.map(|report| (1e3 * cost.global_batch / report.samples_per_s, report.data_wait)).unzip();
    if times_ms.is_empty() {
        return Ok(None);
    }
    let data_wait = waits.iter().sum::<f64>() / waits.len() as f64;
    Ok(Some(speed(times_ms, cost, data_wait)))
}

fn speed(mut times_ms: Vec<f64>, cost: StepCost, data_wait: f64) -> StepSpeed {
    let [ms_lo, ms_per_step, ms_hi] = spread(&mut times_ms);
    StepSpeed {
        ms_per_step,
        ms_lo,
        ms_hi,
        samples_per_s: 1e3 * cost.global_batch / ms_per_step,
        tflops: cost.flops / ms_per_step / 1e9,
        gb_per_s: cost.update_bytes / ms_per_step / 1e6,
        data_wait,
    }
}

/// The 10th percentile, the median and the 90th percentile. NaN if there are no values.
pub(crate) fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    [0.1, 0.5, 0.9].map(|share| values.get((share * last).round() as usize).copied().unwrap_or(f64::NAN))
}

/// Measures the speed limits of a device for products of numbers of type `kind`.
pub(crate) fn ceilings(device: Device, kind: Kind) -> Result<Ceilings, TrainError> {
    let (size, bytes): (i64, i64) = if device.is_cuda() { (8192, 1 << 30) } else { (1024, 64 << 20) };
    let factor = Tensor::f_ones([size, size], (kind, device))?;
    let product = || Ok(factor.f_matmul(&factor)?);
    let source = Tensor::f_zeros([bytes], (Kind::Uint8, device))?;
    let mut target = source.f_empty_like()?;
    let product_s = fastest(product)?;
    let copy_s = fastest(|| {
        target.f_copy_(&source)?;
        Ok(target.f_narrow(0, 0, 1)?)
    })?;
    Ok(Ceilings {
        product_tflops: 2.0 * (size as f64).powi(3) / product_s / 1e12,
        memory_gb_per_s: 2.0 * bytes as f64 / copy_s / 1e9,
    })
}

/// The shortest time of `work`, seconds. Each run ends with reading a number of the result, which waits for the device.
fn fastest(mut work: impl FnMut() -> Result<Tensor, TrainError>) -> Result<f64, TrainError> {
    let mut shortest_s = f64::MAX;
    for _ in 0..REPETITIONS {
        let begun = Instant::now();
        work()?.f_flatten(0, -1)?.f_narrow(0, 0, 1)?.f_to_kind(Kind::Float)?.f_double_value(&[0])?;
        shortest_s = shortest_s.min(begun.elapsed().as_secs_f64());
    }
    Ok(shortest_s)
}
