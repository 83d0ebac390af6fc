//! Tests of captured steps: they give the same results as eager steps, they fail and time out cleanly, and they leak
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use locdiff_core::random::{self, Philox};
use tch::{Device, Kind, Tensor};

use super::kernels::Spin;
use super::{CheckOutcome, GPU, largest_difference, resident_bytes};
use crate::native::cuda::{self, CudaEvent, CudaStream, Graph, GraphError, WaitError};
use crate::native::optim::{AdamW, Moments, UpdateInputs, clip_divisor, not_finite, squared_norm};
use crate::native::random::{DeviceCounter, RandomTensors, RowDraw, Step};

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
const PHILOX: Philox = Philox::new(77);

/// A small network that is trained to output the first eight elements of its random input.
struct ToyTrainer {
    params: Vec<Tensor>,
    moments: Moments,
    counter: DeviceCounter,
    learning_rate: Tensor,
}

impl ToyTrainer {
    fn new() -> anyhow::Result<Self> {
        let weights = |index: u64, samples: usize, elements: usize| -> anyhow::Result<Tensor> {
            let rows =
                RowDraw { stream: random::Stream::Weights, step: Step::At(index), first_sample: 0, samples, elements };
            Ok((PHILOX.normal(GPU, rows)? * 0.1).set_requires_grad(true))
        };
        let params = vec![weights(0, 64, 256)?, weights(1, 256, 64)?, weights(2, 64, 8)?];
        let learning_rate = Tensor::from(1e-3_f32).to_device(GPU);
        Ok(Self { moments: Moments::zeros(&params), params, counter: DeviceCounter::new(GPU, 0)?, learning_rate })
    }

    /// Runs one training step (forward, backward, clipping, update) without waiting for the device. Returns the loss.
    fn step(&mut self) -> anyhow::Result<Tensor> {
        let step = Step::Counter(&self.counter);
        let rows = RowDraw { stream: random::Stream::Noise, step, first_sample: 0, samples: 128, elements: 64 };
        let input = PHILOX.normal(GPU, rows)?;
        let hidden = input.f_matmul(&self.params[0])?.f_tanh()?.f_matmul(&self.params[1])?.f_tanh()?;
        let output = hidden.f_matmul(&self.params[2])?;
        let loss = output.f_mse_loss(&input.f_narrow(1, 0, 8)?, tch::Reduction::Mean)?;
        let grads = Tensor::f_run_backward(&[&loss], &self.params, false, false)?;
        let squares = squared_norm(&grads)?;
        let (divisor, flag) = (clip_divisor(&squares, 0.5)?, not_finite(&squares)?);
        let control =
            UpdateInputs { learning_rate: &self.learning_rate, grad_divisor: Some(&divisor), found_inf: Some(&flag) };
        ADAMW.update(&self.params, &grads, &mut self.moments, control)?;
        Ok(loss.detach())
    }

    /// Advances the counter, so that the next step draws new random numbers.
    fn advance(&mut self) -> anyhow::Result<()> {
        let next = self.counter.get()? + 1;
        Ok(self.counter.set(next)?)
    }

    fn warm_up(&mut self) -> anyhow::Result<()> {
        (0..3).try_for_each(|_| {
            let _ = self.step()?;
            self.advance()
        })
    }
}

/// A second thread that allocates on the device and copies to the host, as the prefetch and checkpoint threads do.
struct Neighbour {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Result<(), tch::TchError>>>,
}

impl Neighbour {
    fn start() -> Self {
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, stopped) = (rounds.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut held = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let round = counted.load(Ordering::Relaxed) as i64;
                // Keep the first 50 tensors, so that the allocator has to ask CUDA for more memory.
                if round < 50 {
                    held.push(Tensor::f_zeros([1 << 20, round + 21], (Kind::Uint8, GPU))?);
                }
                let there = Tensor::f_full([1 << 16], round, (Kind::Float, GPU))?;
                let back = there.f_to_device(Device::Cpu)?;
                let _ = back.f_double_value(&[0])?;
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { rounds, stop, thread: Some(thread) }
    }

    /// Waits until the thread has made `more` further rounds.
    fn wait_for_rounds(&self, more: u64) -> anyhow::Result<u64> {
        let (start, from) = (Instant::now(), self.rounds.load(Ordering::Relaxed));
        while self.rounds.load(Ordering::Relaxed) < from + more {
            ensure!(start.elapsed() < Duration::from_secs(20), "the other thread made no progress in 20 s");
            std::thread::yield_now();
        }
        Ok(self.rounds.load(Ordering::Relaxed) - from)
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let joined = self.thread.take().map(std::thread::JoinHandle::join);
        joined
            .context("the thread was already joined")?
            .map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
        Ok(())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Replays the graph and waits until the replay ends, at most for `limit`.
fn replay_within(graph: &mut Graph, limit: Duration) -> anyhow::Result<()> {
    graph.replay()?;
    let mut finished = CudaEvent::new()?;
    finished.record(&CudaStream::current()?)?;
    Ok(finished.wait_for(limit)?)
}

pub(super) fn replay_equals_eager() -> CheckOutcome {
    const STEPS: usize = 20;
    let (mut eager, mut replayed) = (ToyTrainer::new()?, ToyTrainer::new()?);
    eager.warm_up()?;
    replayed.warm_up()?;
    let neighbour = Neighbour::start();
    neighbour.wait_for_rounds(2)?;
    let (mut graph, (loss, rounds)) = Graph::capture("test step", || -> anyhow::Result<_> {
        let before = neighbour.wait_for_rounds(5)?;
        let loss = replayed.step()?;
        Ok((loss, before + neighbour.wait_for_rounds(5)?))
    })?;
    neighbour.finish()?;
    let (mut largest_loss, mut first, mut last) = (0.0_f64, 0.0, 0.0);
    for step in 0..STEPS {
        let eager_loss = eager.step()?;
        replay_within(&mut graph, Duration::from_secs(10))?;
        eager.advance()?;
        replayed.advance()?;
        largest_loss = largest_loss.max(largest_difference(&loss, &eager_loss)?);
        last = eager_loss.f_double_value(&[])?;
        first = if step == 0 { last } else { first };
    }
    let mut largest = 0.0_f64;
    for (a, b) in replayed.params.iter().zip(&eager.params) {
        largest = largest.max(largest_difference(a, b)?);
    }
    ensure!(largest <= 1e-6 && largest_loss <= 1e-6, "parameters differ by {largest:e}, losses by {largest_loss:e}");
    ensure!(replayed.counter.get()? == eager.counter.get()?, "the counters differ");
    ensure!(last < first, "the loss did not fall: it went from {first} to {last}");
    Ok(format!(
        "{STEPS} replays of {} nodes: parameters differ by {largest:e}, losses by {largest_loss:e}; \
         the other thread made {rounds} rounds during the capture",
        graph.nodes()
    ))
}

/// Checks that torch still works after a failed capture: that it can allocate memory, draw from its own generator,
/// capture again and synchronise.
fn check_torch_is_usable() -> anyhow::Result<()> {
    let noise = Tensor::f_randn([1000], (Kind::Float, GPU))?;
    ensure!(noise.f_isfinite()?.all().f_int64_value(&[])? == 1, "torch drew a random number that is not finite");
    let mut total = Tensor::f_zeros([1], (Kind::Float, GPU))?;
    let _ = total.f_add_scalar_(1.0)?;
    let (mut graph, ()) = Graph::capture("after a failure", || total.f_add_scalar_(1.0).map(drop))?;
    replay_within(&mut graph, Duration::from_secs(5))?;
    replay_within(&mut graph, Duration::from_secs(5))?;
    let total = total.f_double_value(&[0])?;
    ensure!(total == 3.0, "one addition and two replays gave {total}, wanted 3");
    cuda::synchronize()?;
    Ok(())
}

pub(super) fn torch_is_usable_after_failed_captures() -> CheckOutcome {
    let value = Tensor::ones([256, 256], (Kind::Float, GPU));
    let _ = value.f_matmul(&value)?.f_double_value(&[0, 0])?;
    let fail = |how: usize| {
        Graph::capture("doomed", || -> anyhow::Result<()> {
            let product = value.f_matmul(&value)?;
            match how {
                0 => anyhow::bail!("the step gives up"),
                1 => panic!("the step panics"),
                // A capture does not allow a value to be read back to the host. The attempt invalidates the capture.
                2 => product.f_double_value(&[0, 0]).map(drop)?,
                // This step also tries to read a value back, but ignores the error.
                _ => drop(product.f_double_value(&[0, 0])),
            }
            Ok(())
        })
    };
    let mut details = Vec::new();
    for how in 0..4 {
        let Err(error) = fail(how) else { anyhow::bail!("the capture succeeded in spite of failure {how}") };
        let expected = match how {
            0 | 2 => matches!(error, GraphError::Step { .. }),
            1 => matches!(error, GraphError::Panicked { .. }),
            _ => matches!(error, GraphError::Native { .. }),
        };
        ensure!(expected, "failure {how} became the wrong error: {error:?}");
        check_torch_is_usable().with_context(|| format!("after failure {how}"))?;
        details.push(format!("{:#}", anyhow::Error::from(error)).lines().next().unwrap_or_default().to_owned());
    }
    cuda::empty_cache()?;
    let before = cuda::memory(0)?;
    (0..100).for_each(|round| drop(fail([0, 2, 3][round % 3])));
    cuda::empty_cache()?;
    let after = cuda::memory(0)?;
    let same = after.allocated_bytes <= before.allocated_bytes && after.reserved_bytes <= before.reserved_bytes;
    ensure!(same, "100 failed captures leaked memory: {before:?} then {after:?}");
    Ok(details.join("; "))
}

pub(super) fn hanging_replay_times_out() -> CheckOutcome {
    let spin = Spin::new()?;
    spin.launch(Duration::from_millis(1))?;
    ensure!(spin.count()? == 1, "the kernel did not count its launch");
    let (mut graph, ()) = Graph::capture("hanging step", || spin.launch(Duration::from_secs(2)))?;
    let (limit, start) = (Duration::from_millis(200), Instant::now());
    let result = replay_within(&mut graph, limit);
    let timed_out_after = start.elapsed();
    let Err(error) = result else { anyhow::bail!("a replay of 2 s ended within 0.2 s") };
    ensure!(error.downcast_ref() == Some(&WaitError::TimedOut(limit)), "wanted a timeout, got {error:?}");
    ensure!(timed_out_after < Duration::from_millis(400), "the timeout came only after {timed_out_after:?}");
    cuda::synchronize()?;
    let ended_after = start.elapsed();
    ensure!(ended_after >= Duration::from_millis(1900) && spin.count()? == 2, "the replay did not run to its end");
    replay_within(&mut graph, Duration::from_secs(10))?;
    ensure!(spin.count()? == 3, "the second replay did not run to its end");
    Ok(format!("`{error}` after {timed_out_after:?}; the replay ended after {ended_after:?}"))
}

pub(super) fn timeout_costs_less_than_20_us() -> CheckOutcome {
    const ROUNDS: u32 = 200;
    let spin = Spin::new()?;
    spin.launch(Duration::ZERO)?;
    let (mut graph, ()) = Graph::capture("1 ms", || spin.launch(Duration::from_millis(1)))?;
    let mut mean_us = |within: bool| -> anyhow::Result<f64> {
        cuda::synchronize()?;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            if within {
                replay_within(&mut graph, Duration::from_secs(10))?;
            } else {
                graph.replay()?;
                cuda::synchronize()?;
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS))
    };
    mean_us(true)?;
    let (plain_us, within_us) = (mean_us(false)?, mean_us(true)?);
    ensure!(within_us - plain_us < 20.0, "a replay took {within_us:.1} us with a timeout and {plain_us:.1} us without");
    Ok(format!("{within_us:.1} us with a timeout, {plain_us:.1} us with a plain wait"))
}

pub(super) fn nothing_leaks() -> CheckOutcome {
    let mut trainer = ToyTrainer::new()?;
    trainer.warm_up()?;
    let (mut graph, _loss) = Graph::capture("leak check", || trainer.step())?;
    let counter = DeviceCounter::new(GPU, 0)?;
    let mut round = || -> anyhow::Result<()> {
        graph.replay()?;
        let rows = RowDraw {
            stream: random::Stream::Test(0),
            step: Step::Counter(&counter),
            first_sample: 0,
            samples: 8,
            elements: 64,
        };
        let noise = PHILOX.normal(GPU, rows)?;
        let _ = squared_norm(&[noise])?;
        let mut event = CudaEvent::new()?;
        event.record(&CudaStream::current()?)?;
        Ok(event.wait_for(Duration::from_secs(10))?)
    };
    (0..1000).try_for_each(|_| round())?;
    cuda::synchronize()?;
    let (before, resident_before) = (cuda::memory(0)?, resident_bytes()?);
    (0..10_000).try_for_each(|_| round())?;
    cuda::synchronize()?;
    let (after, resident_after) = (cuda::memory(0)?, resident_bytes()?);
    let grown = resident_after.saturating_sub(resident_before);
    ensure!(after.allocated_bytes == before.allocated_bytes, "device memory leaks: {before:?} then {after:?}");
    ensure!(after.reserved_bytes == before.reserved_bytes, "reserved memory grows: {before:?} then {after:?}");
    // The limit is about 100 bytes per round, so that a tensor or an event leaked in every round is noticed.
    ensure!(grown < 1 << 20, "the process grew by {grown} bytes, wanted less than 1 MiB");
    Ok(format!("{} bytes allocated before and after; the process grew by {grown} bytes", after.allocated_bytes))
}
