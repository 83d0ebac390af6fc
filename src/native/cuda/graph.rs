//! CUDA graphs. A step, such as a training step, is recorded once and then replayed as a whole.
//!
//! Graphs are captured in thread-local mode, so that other threads (prefetch, checkpoints) may call CUDA during a
//! capture. A graph has its own memory, whose addresses stay the same between replays. If a value changes from replay
//! to replay, the step must read it from a tensor that was created before the capture. Run the step a few times before
//! capturing it, because libraries and kernels must not initialise themselves during a capture.
//!
//! c10d's watchdog does not see collectives inside a replayed graph. To detect a collective that hangs, record a
//! [`CudaEvent`](super::CudaEvent) after a replay and wait for it with a timeout.

use std::cell::Cell;
use std::error::Error;
use std::ffi::c_void;
use std::panic::AssertUnwindSafe;

use super::cuda_functions;
use super::device::{current_device, index};
use super::stream::{CudaStream, Priority, with_stream};
use crate::native::error::{NativeError, check, without_stack_trace};

cuda_functions! {
    fn locdiff_cuda_graph_new(out: *mut *mut c_void);
    fn locdiff_cuda_graph_free(graph: *mut c_void);
    fn locdiff_cuda_graph_begin(graph: *mut c_void);
    fn locdiff_cuda_graph_end(graph: *mut c_void, nodes: *mut usize);
    fn locdiff_cuda_graph_abandon(graph: *mut c_void);
    fn locdiff_cuda_graph_replay(graph: *mut c_void);
}

/// A capture or a replay that failed.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// The captured step returned an error.
    #[error("graph `{graph}`: the step failed while it was captured")]
    Step {
        /// The graph's name.
        graph: String,
        /// The error that the step returned.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The captured step panicked.
    #[error("graph `{graph}`: the step panicked while it was captured: {text}")]
    Panicked {
        /// The graph's name.
        graph: String,
        /// The panic message.
        text: String,
    },
    /// CUDA or torch failed.
    #[error("graph `{graph}`: CUDA or torch failed")]
    Native {
        /// The graph's name.
        graph: String,
        /// The error of CUDA or torch.
        source: NativeError,
    },
}

/// Owns the C++ graph and frees it on drop.
#[derive(Debug)]
struct Handle(*mut c_void);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the graph is live, and nothing uses it afterwards.
        let status = unsafe { locdiff_cuda_graph_free(self.0) };
        if let Err(error) = check("free a graph", status) {
            tracing::error!(%error, "cannot free a CUDA graph");
        }
    }
}

/// A captured step.
#[derive(Debug)]
pub struct Graph {
    name: String,
    nodes: usize,
    handle: Handle,
}

// SAFETY: a captured graph is not bound to a thread, and every method that passes it to CUDA takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Calls `step` once and records the work that it launches on this thread. The device does not execute this work.
    /// Returns the graph and the result of `step`. Tensors in that result lie in the graph's memory, and each replay
    /// writes new values to them.
    ///
    /// If `step` fails or panics, or does something that a capture does not allow (such as reading a value back to the
    /// host), the capture is discarded and torch remains usable. A panic becomes an error.
    ///
    /// During the capture, other threads may allocate, copy and launch. They must not use torch's own random numbers on
    /// this device, and they must not empty the cache. If this process has requested more than 32 streams from the
    /// pool, other threads must not launch on a stream from the pool either, because the capture may run on the same
    /// stream.
    pub fn capture<T, E>(name: &str, step: impl FnOnce() -> Result<T, E>) -> Result<(Self, T), GraphError>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let native = |source| GraphError::Native { graph: name.to_owned(), source };
        let stream = capture_stream().map_err(native)?;
        let captured = with_stream(stream, || capture_here(name, step)).map_err(native)?;
        let (handle, nodes, result) = captured?;
        Ok((Self { name: name.to_owned(), nodes, handle }, result))
    }

    /// Number of nodes in the graph, such as kernels and copies.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Launches the recorded work on the current stream. The host does not wait.
    pub fn replay(&mut self) -> Result<(), GraphError> {
        // SAFETY: the graph is live.
        let status = unsafe { locdiff_cuda_graph_replay(self.handle.0) };
        check("graph replay", status).map_err(|source| GraphError::Native { graph: self.name.clone(), source })
    }
}

/// The stream on which this thread captures. A thread keeps this stream until its current device changes, because
/// each request takes another stream from the pool, and the pool has only 32 streams.
fn capture_stream() -> Result<CudaStream, NativeError> {
    thread_local!(static CAPTURE_STREAM: Cell<Option<CudaStream>> = const { Cell::new(None) });
    let device = index(current_device()?);
    if let Some(stream) = CAPTURE_STREAM.get().filter(|stream| stream.device == device) {
        return Ok(stream);
    }
    let stream = CudaStream::from_pool(Priority::Normal)?;
    CAPTURE_STREAM.set(Some(stream));
    Ok(stream)
}

/// Runs `step` once and captures it on the current stream.
fn capture_here<T, E>(name: &str, step: impl FnOnce() -> Result<T, E>) -> Result<(Handle, usize, T), GraphError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let native = |source| GraphError::Native { graph: name.to_owned(), source };
    let mut graph = std::ptr::null_mut();
    // SAFETY: `graph` has room for one pointer.
    check("new graph", unsafe { locdiff_cuda_graph_new(&raw mut graph) }).map_err(native)?;
    let handle = Handle(graph);
    // SAFETY: the graph is live.
    check("begin the capture", unsafe { locdiff_cuda_graph_begin(handle.0) }).map_err(native)?;
    // If `step` panics, this function discards the capture and returns the panic as an error.
    let failed = match std::panic::catch_unwind(AssertUnwindSafe(step)) {
        Ok(Ok(result)) => {
            let mut nodes = 0;
            // SAFETY: the graph is live, and `nodes` has room for one number.
            check("end the capture", unsafe { locdiff_cuda_graph_end(handle.0, &raw mut nodes) }).map_err(native)?;
            return Ok((handle, nodes, result));
        }
        Ok(Err(error)) => GraphError::Step { graph: name.to_owned(), source: error.into() },
        Err(panic) => GraphError::Panicked { graph: name.to_owned(), text: panic_text(panic.as_ref()) },
    };
    // SAFETY: the graph is live.
    check("discard the capture", unsafe { locdiff_cuda_graph_abandon(handle.0) }).map_err(native)?;
    Err(failed)
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned());
    without_stack_trace(&text)
}
