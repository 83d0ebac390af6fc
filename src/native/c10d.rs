//! Process groups of c10d: collectives over Gloo (CPU) and NCCL (GPU), each with a timeout.
//!
//! This is a thin wrapper. [`crate::comm`] checks the arguments, and adds the operation, the group and the rank to
//! errors. After a collective has failed or timed out, its group cannot be used again. On Gloo, a collective that times
//! out also closes the connections of the group, so that the collectives of the peers fail soon as well.

mod store;

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::time::Duration;

use tch::Tensor;

use super::error::{NativeError, check, out_pointer};
use super::optim::pointer;

pub(super) use store::millis;
pub use store::{Keys, Store};

unsafe extern "C" {
    fn locdiff_group_gloo(
        store: *mut c_void,
        name: *const c_char,
        name_length: usize,
        rank: c_int,
        size: c_int,
        address: *const c_char,
        address_length: usize,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    #[cfg(locdiff_cuda)]
    fn locdiff_group_nccl(
        store: *mut c_void,
        name: *const c_char,
        name_length: usize,
        rank: c_int,
        size: c_int,
        device: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_group_abort(group: *mut c_void) -> c_int;
    fn locdiff_group_free(group: *mut c_void);
    fn locdiff_start_all_reduce(
        group: *mut c_void,
        tensor: *const c_void,
        op: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_start_broadcast(
        group: *mut c_void,
        tensor: *const c_void,
        root: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_start_all_gather(
        group: *mut c_void,
        output: *const c_void,
        input: *const c_void,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_start_reduce_scatter(
        group: *mut c_void,
        output: *const c_void,
        input: *const c_void,
        op: c_int,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_start_barrier(group: *mut c_void, timeout_ms: i64, out: *mut *mut c_void) -> c_int;
    fn locdiff_work_wait(work: *mut c_void) -> c_int;
    fn locdiff_work_wait_stream(work: *mut c_void) -> c_int;
    fn locdiff_work_free(work: *mut c_void);
}

/// How the values of the ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum over ranks.
    Sum,
    /// The maximum over ranks.
    Max,
    /// The mean over ranks. Gloo has no mean, so the shim divides the sum by the number of ranks. NCCL has its own
    /// mean, which divides before it adds.
    Mean,
}

/// A group of ranks that run collectives together. Each rank of the group has its own `ProcessGroup`.
#[derive(Debug)]
pub struct ProcessGroup {
    raw: NonNull<c_void>,
}

// SAFETY: the shim starts the collectives of a group under the group's mutex; c10d lets any thread wait or abort.
unsafe impl Send for ProcessGroup {}
// SAFETY: several threads may call the methods at once, because the shim starts collectives under the group's mutex.
unsafe impl Sync for ProcessGroup {}

impl ProcessGroup {
    /// Connects the ranks of the group over Gloo. Every rank of the group must call this function, with a store that
    /// has the same prefix. Gloo listens on `address` and connects from it. `address` is an IP address of this host, or
    /// a name that resolves to one.
    pub fn gloo(
        store: &Store,
        name: &str,
        (rank, size): (u32, u32),
        address: &str,
        timeout: Duration,
    ) -> Result<Self, NativeError> {
        const OPERATION: &str = "connect over gloo";
        let (rank, size) = (to_c_int(OPERATION, rank)?, to_c_int(OPERATION, size)?);
        let (name_at, address_at) = (name.as_ptr().cast(), address.as_ptr().cast());
        let (store, timeout_ms) = (store.as_ptr(), millis(timeout));
        let raw = out_pointer(OPERATION, |out| {
            // SAFETY: the store is alive; both strings are valid for their lengths.
            unsafe {
                locdiff_group_gloo(store, name_at, name.len(), rank, size, address_at, address.len(), timeout_ms, out)
            }
        })?;
        Ok(Self { raw })
    }

    /// Connects the ranks of the group over NCCL. Each rank needs its own GPU. Every rank of the group must call this
    /// function, with a store that has the same prefix.
    ///
    /// NCCL has no timeout for connecting, so make sure beforehand that every rank is present.
    #[cfg(locdiff_cuda)]
    pub fn nccl(
        store: &Store,
        name: &str,
        (rank, size): (u32, u32),
        device: u32,
        timeout: Duration,
    ) -> Result<Self, NativeError> {
        const OPERATION: &str = "connect over nccl";
        let (rank, size) = (to_c_int(OPERATION, rank)?, to_c_int(OPERATION, size)?);
        let device = to_c_int(OPERATION, device)?;
        let (store, name_at, timeout_ms) = (store.as_ptr(), name.as_ptr().cast(), millis(timeout));
        let raw = out_pointer(OPERATION, |out| {
            // SAFETY: the store is alive; the name is valid for its length.
            unsafe { locdiff_group_nccl(store, name_at, name.len(), rank, size, device, timeout_ms, out) }
        })?;
        Ok(Self { raw })
    }

    /// Starts to combine the tensors of all ranks with `op`. Every rank gets the same result, which replaces the
    /// contents of `tensor`.
    pub fn start_all_reduce(
        &self,
        tensor: &mut Tensor,
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<CollectiveWork, NativeError> {
        CollectiveWork::start("all_reduce", |out| {
            // SAFETY: group and tensor are alive; c10d takes its own reference to the tensor.
            unsafe { locdiff_start_all_reduce(self.as_ptr(), pointer(tensor), op as c_int, millis(timeout), out) }
        })
    }

    /// Starts to copy the tensor of rank `root` to every rank.
    pub fn start_broadcast(
        &self,
        tensor: &mut Tensor,
        root: u32,
        timeout: Duration,
    ) -> Result<CollectiveWork, NativeError> {
        let root = to_c_int("broadcast", root)?;
        CollectiveWork::start("broadcast", |out| {
            // SAFETY: group and tensor are alive; c10d takes its own reference to the tensor.
            unsafe { locdiff_start_broadcast(self.as_ptr(), pointer(tensor), root, millis(timeout), out) }
        })
    }

    /// Starts to write the inputs of all ranks into `output`, one after the other in the order of ranks. All inputs
    /// must have the same size.
    pub fn start_all_gather(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        timeout: Duration,
    ) -> Result<CollectiveWork, NativeError> {
        CollectiveWork::start("all_gather", |out| {
            // SAFETY: group and tensors are alive; c10d takes its own references.
            unsafe { locdiff_start_all_gather(self.as_ptr(), pointer(output), pointer(input), millis(timeout), out) }
        })
    }

    /// Starts a reduce-scatter: combines the inputs of all ranks with `op`, and writes this rank's piece of the result
    /// into `output`. On each rank, `input` holds one piece per rank, in the order of ranks.
    ///
    /// Gloo has no reduce-scatter with a timeout. On Gloo, this function therefore starts an all-reduce on a copy of
    /// `input`, and this rank keeps its piece of the result.
    pub fn start_reduce_scatter(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<CollectiveWork, NativeError> {
        let (group, op, timeout_ms) = (self.as_ptr(), op as c_int, millis(timeout));
        CollectiveWork::start("reduce_scatter", |out| {
            // SAFETY: group and tensors are alive; c10d takes its own references.
            unsafe { locdiff_start_reduce_scatter(group, pointer(output), pointer(input), op, timeout_ms, out) }
        })
    }

    /// Starts a barrier, which completes when every rank has started it. On NCCL, the barrier is an all-reduce of one
    /// element.
    pub fn start_barrier(&self, timeout: Duration) -> Result<CollectiveWork, NativeError> {
        // SAFETY: the group is alive.
        CollectiveWork::start("barrier", |out| unsafe { locdiff_start_barrier(self.as_ptr(), millis(timeout), out) })
    }

    /// Makes every pending collective of the group fail. Any thread may call this. The group cannot be used afterwards.
    ///
    /// On NCCL, the communicators are aborted. Gloo has no abort, so the shim starts a receive that times out. This
    /// timeout closes the connections of the group. The pending collectives of this rank then fail. The peers'
    /// collectives fail when the peers notice the closed connections.
    pub fn abort(&self) -> Result<(), NativeError> {
        // SAFETY: the group is alive, and the shim allows this call concurrently with any other.
        let status = unsafe { locdiff_group_abort(self.as_ptr()) };
        check("abort", status)
    }

    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

impl Drop for ProcessGroup {
    /// Waits for pending collectives, at most until their timeouts. There is one exception: after an NCCL collective
    /// has failed or was aborted in this process, NCCL groups are dropped without a wait and without a shutdown.
    fn drop(&mut self) {
        // SAFETY: `self` owns this reference to the group and does not use it afterwards.
        unsafe { locdiff_group_free(self.raw.as_ptr()) };
    }
}

/// A collective that was started.
///
/// The result is valid only after a successful wait. It is safe to drop this value without a wait, because c10d keeps
/// the tensors alive until the collective ends. But then nothing reports whether the collective failed.
#[derive(Debug)]
pub struct CollectiveWork {
    operation: &'static str,
    raw: NonNull<c_void>,
}

// SAFETY: c10d lets any thread query and wait for a collective, not only the thread that started it.
unsafe impl Send for CollectiveWork {}

impl CollectiveWork {
    fn start(operation: &'static str, call: impl FnOnce(*mut *mut c_void) -> c_int) -> Result<Self, NativeError> {
        Ok(Self { operation, raw: out_pointer(operation, call)? })
    }

    /// Blocks until the result is ready, at most until the timeout of the collective.
    pub fn wait(&mut self) -> Result<(), NativeError> {
        // SAFETY: the work is alive and borrowed by this call alone.
        let status = unsafe { locdiff_work_wait(self.raw.as_ptr()) };
        check(self.operation, status)
    }

    /// On NCCL, makes the current stream wait for the result and returns at once, as a graph capture requires. On Gloo,
    /// this is the same as [`CollectiveWork::wait`].
    pub fn wait_stream(&mut self) -> Result<(), NativeError> {
        // SAFETY: the work is alive and borrowed by this call alone.
        let status = unsafe { locdiff_work_wait_stream(self.raw.as_ptr()) };
        check(self.operation, status)
    }
}

impl Drop for CollectiveWork {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which is not used afterwards.
        unsafe { locdiff_work_free(self.raw.as_ptr()) };
    }
}

fn to_c_int(operation: &'static str, number: u32) -> Result<c_int, NativeError> {
    c_int::try_from(number).map_err(|_| NativeError { operation, text: format!("{number} does not fit into a C int") })
}
