//! Copies tensors from the device to main memory. The host need not wait for a copy at once.

use tch::{Device, Tensor};

use super::event::CudaEvent;
use super::stream::CudaStream;
use crate::native::error::NativeError;

/// Tensors on their way to main memory.
#[derive(Debug)]
pub struct Readback {
    tensors: Vec<Tensor>,
    /// The event that marks the end of all copies. `None` if the tensors were already in main memory.
    done: Option<CudaEvent>,
}

impl Readback {
    /// Queues the copies on the current stream. The host does not wait. Tensors in main memory are not copied.
    pub fn start(tensors: &[&Tensor]) -> Result<Self, NativeError> {
        // A copy that does not block goes to page-locked memory.
        let copy = |tensor: &&Tensor| tensor.f_contiguous()?.f_to_device_(Device::Cpu, tensor.kind(), true, false);
        let done = if tensors.iter().any(|tensor| tensor.device().is_cuda()) { Some(CudaEvent::new()?) } else { None };
        let tensors = tensors.iter().map(copy).collect::<Result<_, _>>()?;
        let mut readback = Self { tensors, done };
        if let Some(done) = &mut readback.done {
            done.record(&CudaStream::current()?)?;
        }
        Ok(readback)
    }

    /// Waits for the copies and returns them in order.
    pub fn wait(self) -> Result<Vec<Tensor>, NativeError> {
        if let Some(done) = &self.done {
            done.synchronize()?;
        }
        Ok(self.tensors)
    }
}
