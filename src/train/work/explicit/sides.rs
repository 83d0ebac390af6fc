//! Streams beside the current stream, for work that the current stream does not need at once. They let the GPU run
//! small kernels at the same time.

use crate::native::cuda::{CudaEvent, CudaStream, Priority, with_stream};
use crate::train::error::TrainError;

/// A stream beside the current one.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    /// Computes the image layers in the forward pass, and these gradients in the backward pass: those of the weights of
    /// `x`, `out` and `head`, and those of the biases of `out` and `head`.
    Weights,
    /// Computes the time layers, the gradients of the biases that follow from their tables, and the harmonics of the
    /// anchors.
    Time,
}

/// The streams, one for each [`Side`].
#[derive(Debug)]
pub(super) struct Sides([CudaStream; 2]);

/// Work that was launched on another stream.
///
/// An input of the work must live until the stream that allocated the input has waited for the work. A tensor that the
/// work allocates may be freed as soon as its last use has been launched on the current stream. Only later work of the
/// same side can reuse the tensor's memory, and [`Sides::run`] starts that work after everything in the current stream.
#[derive(Debug)]
pub(super) struct Aside<R> {
    pub(super) result: R,
    end: CudaEvent,
}

impl<R> Aside<R> {
    /// Makes the current stream wait for the work.
    pub(super) fn wait(&self) -> Result<(), TrainError> {
        Ok(self.end.block(&CudaStream::current()?)?)
    }
}

impl Sides {
    pub(super) fn new() -> Result<Self, TrainError> {
        Ok(Self([CudaStream::from_pool(Priority::Normal)?, CudaStream::from_pool(Priority::Normal)?]))
    }

    /// Runs `body` on another stream, after the work that is in the current stream at this moment.
    pub(super) fn run<R>(
        &self,
        side: Side,
        body: impl FnOnce() -> Result<R, TrainError>,
    ) -> Result<Aside<R>, TrainError> {
        let stream = self.0[side as usize];
        let mut fork = CudaEvent::new()?;
        fork.record(&CudaStream::current()?)?;
        fork.block(&stream)?;
        let result = with_stream(stream, body)??;
        let mut end = CudaEvent::new()?;
        end.record(&stream)?;
        Ok(Aside { result, end })
    }
}
