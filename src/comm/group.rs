//! Collectives of one group, each with a timeout.
//!
//! All ranks of a group must start the same collectives in the same order, with tensors of the same shape and type.
//! Each rank checks its own arguments before it starts a collective.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use locdiff_core::pulse;
use tch::{Device, Kind, Tensor};

use super::error::{CollectiveFailure, CommError};
use crate::native::NativeError;
use crate::native::c10d::{CollectiveWork, ProcessGroup, ReduceOp};

#[derive(Debug)]
struct GroupState {
    process_group: ProcessGroup,
    name: String,
    rank: u32,
    size: u32,
    device: Device,
    aborted: AtomicBool,
}

/// A group of ranks that run collectives together. Each rank of the group has its own `Group`. A clone refers to the
/// same group.
#[derive(Debug, Clone)]
pub struct Group {
    shared: Arc<GroupState>,
    timeout: Duration,
}

impl Group {
    pub(super) fn new(
        process_group: ProcessGroup,
        name: &str,
        (rank, size): (u32, u32),
        device: Device,
        timeout: Duration,
    ) -> Self {
        let name = name.to_owned();
        let shared = GroupState { process_group, name, rank, size, device, aborted: AtomicBool::new(false) };
        Self { shared: Arc::new(shared), timeout }
    }

    /// Name of the group, as used in messages.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    /// Device of the tensors that the group exchanges.
    pub fn device(&self) -> Device {
        self.shared.device
    }

    /// Timeout of each collective.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The same group, with `timeout` as the timeout of its collectives.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), timeout }
    }

    /// Combines the tensors of all ranks with `op`. On every rank, the same result replaces the contents of `tensor`.
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<(), CommError> {
        self.start_all_reduce(tensor, op)?.wait()
    }

    /// Copies the tensor of rank `root` to every rank.
    pub fn broadcast(&self, tensor: &mut Tensor, root: u32) -> Result<(), CommError> {
        self.start_broadcast(tensor, root)?.wait()
    }

    /// Returns the inputs of all ranks as one tensor `[size, ..]`, in the order of ranks. All inputs must have the same
    /// shape.
    pub fn all_gather(&self, input: &Tensor) -> Result<Tensor, CommError> {
        let (pending, output) = self.start_all_gather(input)?;
        pending.wait()?;
        Ok(output)
    }

    /// Combines the inputs of all ranks, each of shape `[size, ..]`, with `op`. Returns this rank's piece `[..]` of the
    /// result.
    pub fn reduce_scatter(&self, input: &Tensor, op: ReduceOp) -> Result<Tensor, CommError> {
        let (pending, output) = self.start_reduce_scatter(input, op)?;
        pending.wait()?;
        Ok(output)
    }

    /// Returns when every rank of the group has called `barrier`.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.start("barrier", || self.shared.process_group.start_barrier(self.timeout))?.wait()
    }

    /// Starts [`Group::all_reduce`].
    pub fn start_all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        const OPERATION: &str = "all_reduce";
        self.check(OPERATION, tensor, Some(op))?;
        self.start(OPERATION, || self.shared.process_group.start_all_reduce(tensor, op, self.timeout))
    }

    /// Starts [`Group::broadcast`].
    pub fn start_broadcast(&self, tensor: &mut Tensor, root: u32) -> Result<Pending, CommError> {
        const OPERATION: &str = "broadcast";
        self.check(OPERATION, tensor, None)?;
        if root >= self.size() {
            return Err(self.refused(OPERATION, format!("the root is rank {root}, wanted 0 to {}", self.size() - 1)));
        }
        self.start(OPERATION, || self.shared.process_group.start_broadcast(tensor, root, self.timeout))
    }

    /// Starts [`Group::all_gather`]. The returned tensor holds the result after a successful wait.
    pub fn start_all_gather(&self, input: &Tensor) -> Result<(Pending, Tensor), CommError> {
        const OPERATION: &str = "all_gather";
        self.check(OPERATION, input, None)?;
        let shape: Vec<i64> = std::iter::once(i64::from(self.size())).chain(input.size()).collect();
        let mut output = self.empty(OPERATION, &shape, input.kind())?;
        let pending =
            self.start(OPERATION, || self.shared.process_group.start_all_gather(&mut output, input, self.timeout))?;
        Ok((pending, output))
    }

    /// Starts [`Group::reduce_scatter`]. The returned tensor holds the result after a successful wait.
    pub fn start_reduce_scatter(&self, input: &Tensor, op: ReduceOp) -> Result<(Pending, Tensor), CommError> {
        const OPERATION: &str = "reduce_scatter";
        self.check(OPERATION, input, Some(op))?;
        let shape = input.size();
        if shape.first() != Some(&i64::from(self.size())) {
            return Err(self.refused(
                OPERATION,
                format!("the input has shape {shape:?}, wanted one piece for each of {} ranks", self.size()),
            ));
        }
        let mut output = self.empty(OPERATION, &shape[1..], input.kind())?;
        let pending = self.start(OPERATION, || {
            self.shared.process_group.start_reduce_scatter(&mut output, input, op, self.timeout)
        })?;
        Ok((pending, output))
    }

    /// Checks that every rank of the group passes the same `fingerprint`. `what` names the compared data in the error
    /// message.
    pub fn check_agreement(&self, what: &str, fingerprint: u64) -> Result<(), CommError> {
        const OPERATION: &str = "agreement check";
        let mine = Tensor::from_slice(&[fingerprint.cast_signed()]).to_device(self.device());
        let all = self.all_gather(&mine)?.to_device(Device::Cpu);
        let all = Vec::<i64>::try_from(all.view([-1])).map_err(|error| self.refused(OPERATION, error.to_string()))?;
        let differing: Vec<usize> = (0..all.len()).filter(|rank| all[*rank] != fingerprint.cast_signed()).collect();
        if differing.is_empty() {
            return Ok(());
        }
        Err(self.refused(OPERATION, format!("{what} on this rank differs from that of rank(s) {differing:?}")))
    }

    /// Makes every pending collective of the group fail. Any thread may call this. The group cannot be used afterwards.
    ///
    /// On NCCL, the communicators of this rank are aborted. On Gloo, the connections of this rank are closed, so that
    /// the collectives of its peers fail as well.
    pub fn abort(&self) -> Result<(), CommError> {
        self.shared.aborted.store(true, Ordering::Release);
        self.shared.process_group.abort().map_err(|error| self.failed("abort", Instant::now(), error.text))
    }

    pub(super) fn process_group(&self) -> &ProcessGroup {
        &self.shared.process_group
    }

    pub(super) fn refused(&self, operation: &'static str, problem: String) -> CommError {
        self.error(operation, CollectiveFailure::Refused { problem })
    }

    pub(super) fn failed(&self, operation: &'static str, started: Instant, text: String) -> CommError {
        let failure = if self.shared.aborted.load(Ordering::Acquire) {
            CollectiveFailure::Aborted { text }
        } else if started.elapsed() >= self.timeout || text.to_lowercase().contains("timed out") {
            CollectiveFailure::TimedOut { after: self.timeout, text }
        } else {
            CollectiveFailure::Failed { text }
        };
        self.error(operation, failure)
    }

    fn error(&self, operation: &'static str, failure: CollectiveFailure) -> CommError {
        CommError::Collective {
            operation,
            group: self.name().to_owned(),
            rank: self.rank(),
            size: self.size(),
            failure,
        }
    }

    fn start(
        &self,
        operation: &'static str,
        start: impl FnOnce() -> Result<CollectiveWork, NativeError>,
    ) -> Result<Pending, CommError> {
        let started = Instant::now();
        let work = start().map_err(|error| self.failed(operation, started, error.text))?;
        Ok(Pending { group: self.clone(), operation, started, work })
    }

    /// Refuses invalid arguments before the collective starts, because such arguments could make other ranks hang or
    /// corrupt their data.
    fn check(&self, operation: &'static str, tensor: &Tensor, op: Option<ReduceOp>) -> Result<(), CommError> {
        let refuse = |problem: String| Err(self.refused(operation, problem));
        if !tensor.defined() {
            return refuse("the tensor is undefined".to_owned());
        }
        if tensor.device() != self.device() {
            return refuse(format!(
                "the tensor is on {:?}, wanted the group's device {:?}",
                tensor.device(),
                self.device()
            ));
        }
        if tensor.is_sparse() || !tensor.is_contiguous() {
            return refuse("the tensor is not dense and contiguous".to_owned());
        }
        match tensor.kind() {
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16 => Ok(()),
            Kind::Uint8 | Kind::Int8 | Kind::Int | Kind::Int64 if op != Some(ReduceOp::Mean) => Ok(()),
            kind => {
                let what = op.map_or("exchange".to_owned(), |op| format!("compute the {op:?} of"));
                refuse(format!("cannot {what} {kind:?} tensors"))
            }
        }
    }

    fn empty(&self, operation: &'static str, shape: &[i64], kind: Kind) -> Result<Tensor, CommError> {
        Tensor::f_empty(shape, (kind, self.device())).map_err(|error| self.refused(operation, error.to_string()))
    }
}

/// A collective that was started. Its result is valid only after a successful wait. Do not access its tensors before
/// that, because another thread writes to them.
///
/// It is safe to drop this value without a wait, but then nothing reports whether the collective failed.
#[derive(Debug)]
#[must_use = "only a wait tells whether the collective succeeded"]
pub struct Pending {
    group: Group,
    operation: &'static str,
    started: Instant,
    work: CollectiveWork,
}

impl Pending {
    /// Blocks until the result is ready, at most until the timeout of the collective.
    pub fn wait(mut self) -> Result<(), CommError> {
        let _phase = pulse::enter_collective(self.operation, self.group.name());
        self.work.wait().map_err(|error| self.group.failed(self.operation, self.started, error.text))
    }

    /// On NCCL, makes the current stream wait for the result and returns at once. On Gloo, this is the same as
    /// [`Pending::wait`].
    pub fn wait_stream(mut self) -> Result<(), CommError> {
        let _phase = pulse::enter_collective(self.operation, self.group.name());
        self.work.wait_stream().map_err(|error| self.group.failed(self.operation, self.started, error.text))
    }
}
