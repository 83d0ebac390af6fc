//! c10d's process groups: collectives over Gloo (CPU) and NCCL (GPU), each with a timeout.
//!
//! Thin: [`crate::comm`] adds the checks and names what failed. A group whose collective failed or timed out is
//! useless from then on; Gloo closes its connections, so that the peers fail soon too.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::time::Duration;

use tch::Tensor;

use super::c10d_store::{Store, millis};
use super::error::{NativeError, check, handed_over};
use super::optim::pointer;

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

/// How values of the ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// The greatest.
    Max,
    /// Their mean. Gloo has none of its own: the sum is divided once it is there, which rounds the same way every time.
    /// NCCL divides before it adds.
    Mean,
}

/// The ranks that take part in a collective together, as one of them sees them.
#[derive(Debug)]
pub struct ProcessGroup {
    raw: NonNull<c_void>,
}

// SAFETY: the shim starts collectives of a group under its mutex; c10d lets any thread wait or abort.
unsafe impl Send for ProcessGroup {}
// SAFETY: as above.
unsafe impl Sync for ProcessGroup {}

impl ProcessGroup {
    /// Connects every rank of the group over Gloo; all must call it, over stores with the same prefix. Gloo listens on
    /// `address` and connects from there: an address of this host, or a name that resolves to one.
    pub fn gloo(
        store: &Store,
        name: &str,
        (rank, size): (u32, u32),
        address: &str,
        timeout: Duration,
    ) -> Result<Self, NativeError> {
        const OPERATION: &str = "connect over gloo";
        let (rank, size) = (c_int_of(OPERATION, rank)?, c_int_of(OPERATION, size)?);
        let (name_at, address_at) = (name.as_ptr().cast(), address.as_ptr().cast());
        let (store, timeout_ms) = (store.as_ptr(), millis(timeout));
        let raw = handed_over(OPERATION, |out| {
            // SAFETY: the store is alive; both strings are valid for their lengths.
            unsafe {
                locdiff_group_gloo(store, name_at, name.len(), rank, size, address_at, address.len(), timeout_ms, out)
            }
        })?;
        Ok(Self { raw })
    }

    /// Connects every rank of the group over NCCL, each with its own GPU; all must call it, over stores with the same
    /// prefix.
    ///
    /// NCCL's connection itself has no timeout: see to it beforehand that every rank is there.
    #[cfg(locdiff_cuda)]
    pub fn nccl(
        store: &Store,
        name: &str,
        (rank, size): (u32, u32),
        device: u32,
        timeout: Duration,
    ) -> Result<Self, NativeError> {
        const OPERATION: &str = "connect over nccl";
        let (rank, size) = (c_int_of(OPERATION, rank)?, c_int_of(OPERATION, size)?);
        let device = c_int_of(OPERATION, device)?;
        let (store, name_at, timeout_ms) = (store.as_ptr(), name.as_ptr().cast(), millis(timeout));
        let raw = handed_over(OPERATION, |out| {
            // SAFETY: the store is alive; the name is valid for its length.
            unsafe { locdiff_group_nccl(store, name_at, name.len(), rank, size, device, timeout_ms, out) }
        })?;
        Ok(Self { raw })
    }

    /// Reduces in place, so that every rank has the same.
    pub fn start_all_reduce(&self, tensor: &mut Tensor, op: ReduceOp, timeout: Duration) -> Result<Work, NativeError> {
        Work::start("all_reduce", |out| {
            // SAFETY: group and tensor are alive; c10d takes its own reference to the tensor.
            unsafe { locdiff_start_all_reduce(self.as_ptr(), pointer(tensor), op as c_int, millis(timeout), out) }
        })
    }

    /// Copies the tensor of rank `root` to every rank.
    pub fn start_broadcast(&self, tensor: &mut Tensor, root: u32, timeout: Duration) -> Result<Work, NativeError> {
        let root = c_int_of("broadcast", root)?;
        Work::start("broadcast", |out| {
            // SAFETY: group and tensor are alive; c10d takes its own reference to the tensor.
            unsafe { locdiff_start_broadcast(self.as_ptr(), pointer(tensor), root, millis(timeout), out) }
        })
    }

    /// Puts the inputs of all ranks, which have one size, one after the other into `output`.
    pub fn start_all_gather(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        timeout: Duration,
    ) -> Result<Work, NativeError> {
        Work::start("all_gather", |out| {
            // SAFETY: group and tensors are alive; c10d takes its own references.
            unsafe { locdiff_start_all_gather(self.as_ptr(), pointer(output), pointer(input), millis(timeout), out) }
        })
    }

    /// Reduces `input`, which holds one piece for each rank, and puts this rank's piece into `output`.
    ///
    /// Gloo has no reduce-scatter with a timeout: there it is an all-reduce of a copy, and a slice.
    pub fn start_reduce_scatter(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<Work, NativeError> {
        let (group, op, timeout_ms) = (self.as_ptr(), op as c_int, millis(timeout));
        Work::start("reduce_scatter", |out| {
            // SAFETY: group and tensors are alive; c10d takes its own references.
            unsafe { locdiff_start_reduce_scatter(group, pointer(output), pointer(input), op, timeout_ms, out) }
        })
    }

    /// Is complete when every rank has started it. On NCCL it is an all-reduce of one element.
    pub fn start_barrier(&self, timeout: Duration) -> Result<Work, NativeError> {
        // SAFETY: the group is alive.
        Work::start("barrier", |out| unsafe { locdiff_start_barrier(self.as_ptr(), millis(timeout), out) })
    }

    /// Ends every pending collective of the group with an error, from any thread. The group is useless after.
    ///
    /// NCCL's communicators are aborted. Gloo has no abort: its connections are closed through a receive that times
    /// out, which fails what is pending here and, as soon as they notice, at the peers.
    pub fn abort(&self) -> Result<(), NativeError> {
        // SAFETY: the group is alive; the shim allows this beside any other call.
        let status = unsafe { locdiff_group_abort(self.as_ptr()) };
        check("abort", status)
    }

    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

impl Drop for ProcessGroup {
    /// Waits for collectives that are still pending, at most until their timeouts.
    fn drop(&mut self) {
        // SAFETY: one of several references to the group, ours alone, and not used after.
        unsafe { locdiff_group_free(self.raw.as_ptr()) };
    }
}

/// A collective on its way.
///
/// The result is there after a wait that succeeded, not before. Dropping it early is safe: c10d keeps the tensors until the
/// collective ends, but nobody learns how it ended.
#[derive(Debug)]
pub struct Work {
    operation: &'static str,
    raw: NonNull<c_void>,
}

// SAFETY: c10d lets any thread ask and wait; nothing in it is bound to the thread that started it.
unsafe impl Send for Work {}

impl Work {
    fn start(operation: &'static str, call: impl FnOnce(*mut *mut c_void) -> c_int) -> Result<Self, NativeError> {
        Ok(Self { operation, raw: handed_over(operation, call)? })
    }

    /// Blocks until the result is there, at most for what is left of the collective's own timeout.
    pub fn wait(&mut self) -> Result<(), NativeError> {
        // SAFETY: the work is alive and borrowed by this call alone.
        let status = unsafe { locdiff_work_wait(self.raw.as_ptr()) };
        check(self.operation, status)
    }

    /// On NCCL makes the current stream wait and returns at once, which is also what a graph capture needs; on Gloo
    /// the same as [`Work::wait`].
    pub fn wait_stream(&mut self) -> Result<(), NativeError> {
        // SAFETY: the work is alive and borrowed by this call alone.
        let status = unsafe { locdiff_work_wait_stream(self.raw.as_ptr()) };
        check(self.operation, status)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: ours alone, and not used after.
        unsafe { locdiff_work_free(self.raw.as_ptr()) };
    }
}

fn c_int_of(operation: &'static str, number: u32) -> Result<c_int, NativeError> {
    c_int::try_from(number).map_err(|_| NativeError { operation, text: format!("{number} is too large") })
}
