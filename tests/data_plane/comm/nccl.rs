//! NCCL between two real processes that share one GPU. The tests check values, gradients, collectives in captured CUDA
//! graphs, and errors after the other process has died.
//!
//! These tests are ignored in the CPU variant. In the CUDA variant they need a GPU.

use std::time::{Duration, Instant};

use locdiff::comm::{Buckets, Communicator, ReduceOp, differentiable};
use locdiff::native::cuda::{self, CudaEvent, CudaStream, Graph, WaitError};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tch::{Device, Kind, Tensor};

use super::harness::{PATIENCE, Rank, run_ranks, run_ranks_with_losses};

const GPU: Device = Device::Cuda(0);
/// How long the surviving rank waits for a rank that was killed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// An error may come this much later than the timeout, because an abort waits for the threads of NCCL.
const GRACE: Duration = Duration::from_secs(2);

fn connect(me: &Rank, timeout: Duration) -> Communicator {
    cuda::set_device(0).expect("the machine has a GPU");
    me.connect_on_one_gpu(1, timeout)
}

fn numbers(rank: u32, elements: i64) -> Tensor {
    let index = Tensor::arange(elements, (Kind::Int64, GPU));
    ((index * 7 + i64::from(rank) * 13).remainder(101) - 50).to_kind(Kind::Float)
}

fn die() -> ! {
    kill(Pid::this(), Signal::SIGKILL).expect("a process may signal itself");
    unreachable!("SIGKILL ends the process")
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn nccl_collectives_and_gradients_are_correct() {
    run_ranks(nccl_collectives_and_gradients_are_correct, 2, |me| {
        let communicator = connect(me, PATIENCE);
        let group = communicator.world();
        let (zero, one) = (numbers(0, 1 << 20), numbers(1, 1 << 20));
        let mut sum = numbers(me.rank, 1 << 20);
        group.all_reduce(&mut sum, ReduceOp::Sum).expect("all ranks take part");
        assert!(sum.equal(&(&zero + &one)));
        let mut mean = numbers(me.rank, 1 << 20);
        group.all_reduce(&mut mean, ReduceOp::Mean).expect("all ranks take part");
        assert!(mean.equal(&((&zero + &one) / 2.0)));
        let gathered = group.all_gather(&numbers(me.rank, 1 << 10)).expect("all ranks take part");
        assert!(gathered.reshape([-1]).equal(&Tensor::cat(&[numbers(0, 1 << 10), numbers(1, 1 << 10)], 0)));

        // Each rank has half of a batch. The gradient of sum(weight * input) is the input of the rank. Hooks then
        // replace the gradient by its mean over both ranks.
        let weight = Tensor::ones([1 << 10], (Kind::Float, GPU)).set_requires_grad(true);
        let buckets =
            Buckets::new(communicator.data(), &[weight.shallow_clone()], 1 << 20).expect("the parameters are valid");
        (&weight * numbers(me.rank, 1 << 10)).sum(Kind::Float).f_backward().expect("the loss has a graph");
        buckets.finish().expect("all ranks take part");
        assert!(weight.grad().equal(&((numbers(0, 1 << 10) + numbers(1, 1 << 10)) / 2.0)));

        let input = numbers(me.rank, 64).set_requires_grad(true);
        let output = differentiable::reduce(group, &input).expect("all ranks take part");
        (output * 3.0).sum(Kind::Float).f_backward().expect("the loss has a graph");
        assert!(input.grad().equal(&Tensor::full([64], 3.0, (Kind::Float, GPU))));
    });
}

/// A training step with a collective. It computes a gradient of a small model, takes the mean over ranks, and updates
/// the weight in place.
struct Step {
    weight: Tensor,
    input: Tensor,
    gradient: Tensor,
}

impl Step {
    fn new(rank: u32) -> Self {
        let weight = numbers(7, 256 * 256).reshape([256, 256]) / 1000.0;
        let input = numbers(rank, 64 * 256).reshape([64, 256]) / 50.0;
        let gradient = Tensor::zeros([256, 256], (Kind::Float, GPU));
        Self { weight, input, gradient }
    }

    fn run(&mut self, communicator: &Communicator) -> anyhow::Result<()> {
        let output = self.input.f_matmul(&self.weight)?.f_tanh()?;
        self.gradient.f_copy_(&self.input.f_tr()?.f_matmul(&output)?)?;
        communicator.data().start_all_reduce(&mut self.gradient, ReduceOp::Mean)?.wait_stream()?;
        let _ = self.weight.f_sub_(&(&self.gradient * 1e-4))?;
        Ok(())
    }
}

/// Launches the captured step and waits until it has finished, but not longer than `limit`.
fn replay_within(graph: &mut Graph, limit: Duration) -> Result<(), WaitError> {
    graph.replay().expect("the graph can be replayed");
    let mut finished = CudaEvent::new()?;
    finished.record(&CudaStream::current()?)?;
    finished.wait_for(limit)
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn captured_step_with_an_all_reduce_replays_to_the_eager_result() {
    run_ranks(captured_step_with_an_all_reduce_replays_to_the_eager_result, 2, |me| {
        let communicator = connect(me, PATIENCE);
        let (mut eager, mut captured) = (Step::new(me.rank), Step::new(me.rank));
        for _ in 0..3 {
            eager.run(&communicator).expect("both ranks run the step");
            captured.run(&communicator).expect("both ranks run the step");
        }
        let (mut graph, ()) = Graph::capture("step", || captured.run(&communicator)).expect("the step can be captured");
        for _ in 0..20 {
            eager.run(&communicator).expect("both ranks run the step");
            replay_within(&mut graph, PATIENCE).expect("both ranks replay the step");
        }
        cuda::synchronize().expect("no kernel has failed");
        let difference = (&eager.weight - &captured.weight).abs().max().double_value(&[]);
        assert_eq!(difference, 0.0, "eager and replayed weights differ");
        assert!(eager.weight.isfinite().all().int64_value(&[]) == 1);
        me.report(&format!("{} nodes, 20 replays bit-equal to eager", graph.nodes()));
    });
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn peer_killed_during_an_nccl_collective_is_an_error_on_the_other_rank() {
    let outcomes =
        run_ranks_with_losses(peer_killed_during_an_nccl_collective_is_an_error_on_the_other_rank, 2, &[1], |me| {
            let communicator = connect(me, TIMEOUT);
            let group = communicator.world();
            let mut tensor = numbers(me.rank, 64 << 20);
            group.all_reduce(&mut tensor, ReduceOp::Sum).expect("all ranks take part");
            cuda::synchronize().expect("no kernel has failed");
            let started = Instant::now();
            let pending = group.start_all_reduce(&mut tensor, ReduceOp::Sum).expect("the tensor is valid");
            if me.rank == 1 {
                die();
            }
            let error = pending.wait().expect_err("rank 1 is dead").to_string();
            let elapsed = started.elapsed();
            assert!(error.starts_with("all_reduce of group world, rank 0 of 2: "), "wrong error text: {error}");
            assert!(elapsed < TIMEOUT + GRACE, "the error came only after {elapsed:?}: {error}");
            me.report(&format!("after {:.2} s: {error}", elapsed.as_secs_f64()));
        });
    outcomes[0].assert_success(0);
    assert_eq!(outcomes[1].signal(), Some(Signal::SIGKILL as i32));
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn peer_killed_during_a_replay_is_detected_by_polling() {
    let outcomes = run_ranks_with_losses(peer_killed_during_a_replay_is_detected_by_polling, 2, &[1], |me| {
        let communicator = connect(me, PATIENCE);
        let mut step = Step::new(me.rank);
        for _ in 0..3 {
            step.run(&communicator).expect("both ranks run the step");
        }
        let (mut graph, ()) = Graph::capture("step", || step.run(&communicator)).expect("the step can be captured");
        replay_within(&mut graph, PATIENCE).expect("both ranks replay the step");
        if me.rank == 1 {
            graph.replay().expect("the graph can be replayed");
            die();
        }
        let mut started = Instant::now();
        // The other rank launched one replay before it died. That replay may still complete, so the first replay here
        // may succeed.
        let error = loop {
            match replay_within(&mut graph, TIMEOUT) {
                Ok(()) => started = Instant::now(),
                Err(error) => break error,
            }
        };
        let aborting = communicator.abort_handle().abort_in_background();
        let elapsed = started.elapsed();
        me.report(&format!("after {:.2} s: {error}", elapsed.as_secs_f64()));
        drop(graph);
        me.report(&format!("graph dropped after {:.2} s", started.elapsed().as_secs_f64()));
        aborting.join().expect("the thread does not panic").expect("the abort succeeds");
        me.report(&format!("aborted after {:.2} s", started.elapsed().as_secs_f64()));
        assert!(started.elapsed() < TIMEOUT + GRACE, "the abort ended only after {:?}", started.elapsed());
        assert_eq!(error, WaitError::TimedOut(TIMEOUT));
        assert!(elapsed < TIMEOUT + GRACE, "the error came only after {elapsed:?}: {error}");
        // The abort has ended the collective on the stream, so the GPU can be used again.
        cuda::synchronize().expect("the abort has freed the stream");
        assert_eq!(Tensor::ones([8], (Kind::Float, GPU)).sum(Kind::Float).double_value(&[]), 8.0);
    });
    outcomes[0].assert_success(0);
    assert_eq!(outcomes[1].signal(), Some(Signal::SIGKILL as i32));
}
