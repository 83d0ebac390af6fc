//! A batch. Its memory is reused after the batch is dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Device, Kind, Tensor};

use crate::shards::error::ShardsError;
use crate::shards::order::Position;

/// One worker's slice of a global batch. When the batch is dropped, its memory is reused, unless another tensor still
/// refers to that memory.
#[derive(Debug)]
pub struct Batch {
    /// Embeddings of the slice's rows: `[rows, width]`, float16. They are in main memory, or on the device if the
    /// device cache is used. While a batch for the device cache is on its way from the gatherer to [`Batches::next`],
    /// this tensor instead holds the row indices in the cache.
    ///
    /// [`Batches::next`]: super::Batches::next
    pub embeddings: Tensor,
    /// Latitudes, degrees.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees.
    pub longitudes: Vec<f64>,
    /// Epoch and step of the batch.
    pub position: Position,
    /// The slice, as a range of positions in the global batch. The position of a row in the global batch does not
    /// depend on the number of workers.
    pub slice: Range<u64>,
    /// How long the trainer waited for the batch.
    pub waited: Duration,
    pub(super) spare: Arc<TensorPool>,
}

impl Batch {
    /// A batch for a rank that has no rows. The step with this batch must be void: it must change nothing. The
    /// embeddings are NaN, but this is not enough, because classifier-free guidance may drop all embeddings. The rank
    /// must therefore also request a void step.
    pub fn void(position: Position, slice: Range<u64>, width: u32) -> Result<Self, ShardsError> {
        let rows = (slice.end - slice.start) as usize;
        let embeddings = Tensor::f_full([rows as i64, i64::from(width)], f64::NAN, (Kind::Half, Device::Cpu))?;
        Ok(Self::of(embeddings, [vec![0.0; rows], vec![0.0; rows]], position, slice))
    }

    /// A batch of rows that do not come from shards. The coordinates are latitudes and longitudes.
    pub fn of(
        embeddings: Tensor,
        [latitudes, longitudes]: [Vec<f64>; 2],
        position: Position,
        slice: Range<u64>,
    ) -> Self {
        let (waited, spare) = (Duration::ZERO, TensorPool::new(None));
        Self { embeddings, latitudes, longitudes, position, slice, waited, spare }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let tensor = std::mem::replace(&mut self.embeddings, Tensor::new());
        self.spare.put(tensor);
    }
}

/// A pool of tensors to reuse. Pinned tensors are not pooled: torch's allocator reuses their memory, because only the
/// allocator knows when the GPU has read them.
#[derive(Debug)]
pub(super) struct TensorPool {
    tensors: Mutex<Vec<Tensor>>,
    /// Maximum number of complete batches that exist at the same time. `None` if the pool keeps no tensors.
    elsewhere: Option<usize>,
    /// Peak number of batches that were being filled at the same time.
    filling_max: AtomicUsize,
}

impl TensorPool {
    pub(super) fn new(elsewhere: Option<usize>) -> Arc<Self> {
        Arc::new(Self { tensors: Mutex::default(), elsewhere, filling_max: AtomicUsize::new(0) })
    }

    /// Tells the pool how many batches are being filled, so that the pool keeps enough tensors for them.
    pub(super) fn make_room(&self, filling: usize) {
        self.filling_max.fetch_max(filling, Ordering::Relaxed);
    }

    fn put(&self, tensor: Tensor) {
        let Some(elsewhere) = self.elsewhere else { return };
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if tensors.len() < elsewhere + self.filling_max.load(Ordering::Relaxed) {
            tensors.push(tensor);
        }
    }

    pub(super) fn take(&self) -> Option<Tensor> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

pub(super) fn already_failed(error: &str) -> ShardsError {
    ShardsError::Internal(format!("another batch was requested after the error: {error}"))
}
