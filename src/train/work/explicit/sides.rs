//! Streams beside the current stream, for work that the current stream does not need at once. They let the GPU run small
//! kernels at the same time.

use super::Explicit;
use crate::native::cuda::{CudaEvent, CudaStream, with_stream};
use crate::train::error::TrainError;

/// A stream beside the current one.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    /// The image layers, and the gradients of all weights but those of the time layers.
    Weights,
    /// The time layers, and the harmonics of the anchors.
    Time,
}

/// Work that was launched on another stream. The tensors that it uses must live until a stream that uses them has
/// waited for it.
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

impl Explicit {
    /// Runs `body` on another stream, after the work that is in the current stream at this moment.
    pub(super) fn aside<R>(
        &self,
        side: Side,
        body: impl FnOnce() -> Result<R, TrainError>,
    ) -> Result<Aside<R>, TrainError> {
        let stream = self.sides[side as usize];
        let mut fork = CudaEvent::new()?;
        fork.record(&CudaStream::current()?)?;
        fork.block(&stream)?;
        let result = with_stream(stream, body)??;
        let mut end = CudaEvent::new()?;
        end.record(&stream)?;
        Ok(Aside { result, end })
    }
}
