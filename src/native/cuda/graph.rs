//! CUDA graphs: a step is recorded once and then replayed as a whole.
//!
//! Captured in thread-local mode, so that other threads may call CUDA meanwhile (prefetch, checkpoints), with memory of
//! its own that stays where it is between replays. What changes from replay to replay must be read from tensors that
//! were made before the capture. Run the step a few times before it is captured: libraries and kernels that initialise
//! themselves at first use must not do so inside.
//!
//! Collectives inside a replayed graph are invisible to c10d's watchdog: wait for an [`Event`](super::Event) behind the replay
//! with a limit.

use std::cell::Cell;
use std::error::Error;
use std::ffi::c_void;
use std::panic::AssertUnwindSafe;

use super::cuda_functions;
use super::device::{current_device, index};
use super::stream::{Priority, Stream, with_stream};
use crate::native::error::{NativeError, check, first_lines};

cuda_functions! {
    fn locdiff_cuda_graph_new(out: *mut *mut c_void);
    fn locdiff_cuda_graph_free(graph: *mut c_void);
    fn locdiff_cuda_graph_begin(graph: *mut c_void);
    fn locdiff_cuda_graph_end(graph: *mut c_void, nodes: *mut usize);
    fn locdiff_cuda_graph_abandon(graph: *mut c_void);
    fn locdiff_cuda_graph_replay(graph: *mut c_void);
}

/// A capture or a replay that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// The captured step returned an error.
    #[error("graph `{graph}`: the step failed while it was captured")]
    Step {
        /// The graph's name.
        graph: String,
        /// What the step returned.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The captured step panicked.
    #[error("graph `{graph}`: the step panicked while it was captured: {text}")]
    Panicked {
        /// The graph's name.
        graph: String,
        /// What it said.
        text: String,
    },
    /// CUDA or torch failed.
    #[error("graph `{graph}`")]
    Native {
        /// The graph's name.
        graph: String,
        /// What failed.
        source: NativeError,
    },
}

/// The C++ graph, freed with its owner.
#[derive(Debug)]
struct Handle(*mut c_void);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the graph is live, and nobody holds it any more.
        let status = unsafe { locdiff_cuda_graph_free(self.0) };
        if let Err(error) = check("end of a graph", status) {
            tracing::error!(%error, "a graph is not freed");
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

// SAFETY: a captured graph belongs to no thread, and all that touches it takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `step` launches on this thread, without running it, and returns the graph with the step's result:
    /// tensors in it live in the graph's memory and hold new values after each replay.
    ///
    /// If `step` fails or panics, or does what a capture does not allow (such as reading a value back to the host), the
    /// capture is undone and torch is as usable as before; a panic becomes an error.
    ///
    /// Meanwhile other threads may allocate, copy and launch, but must not use torch's own random numbers on this
    /// device, nor empty the cache, nor launch on streams of the pool when more than 32 were asked for in this process.
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

    /// How many kernels, copies and the like it holds.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Launches the step on the current stream; the host does not wait.
    pub fn replay(&mut self) -> Result<(), GraphError> {
        // SAFETY: the graph is live.
        let status = unsafe { locdiff_cuda_graph_replay(self.handle.0) };
        check("graph replay", status).map_err(|source| GraphError::Native { graph: self.name.clone(), source })
    }
}

/// The stream that this thread captures on: always the same one, so that captures do not use up the pool.
fn capture_stream() -> Result<Stream, NativeError> {
    thread_local!(static CAPTURE_STREAM: Cell<Option<Stream>> = const { Cell::new(None) });
    let device = index(current_device()?);
    if let Some(stream) = CAPTURE_STREAM.get().filter(|stream| stream.device == device) {
        return Ok(stream);
    }
    let stream = Stream::from_pool(Priority::Normal)?;
    CAPTURE_STREAM.set(Some(stream));
    Ok(stream)
}

/// Captures on the current stream.
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
    check("begin of a capture", unsafe { locdiff_cuda_graph_begin(handle.0) }).map_err(native)?;
    // The panic does not go unnoticed: it becomes an error, after the capture is undone.
    let failed = match std::panic::catch_unwind(AssertUnwindSafe(step)) {
        Ok(Ok(result)) => {
            let mut nodes = 0;
            // SAFETY: the graph is live, and `nodes` has room for one number.
            check("end of a capture", unsafe { locdiff_cuda_graph_end(handle.0, &raw mut nodes) }).map_err(native)?;
            return Ok((handle, nodes, result));
        }
        Ok(Err(error)) => GraphError::Step { graph: name.to_owned(), source: error.into() },
        Err(panic) => GraphError::Panicked { graph: name.to_owned(), text: panic_text(panic.as_ref()) },
    };
    // SAFETY: the graph is live.
    check("undoing of a capture", unsafe { locdiff_cuda_graph_abandon(handle.0) }).map_err(native)?;
    Err(failed)
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned());
    first_lines(&text)
}
