//! A batch on its way from the readers to the trainer, and its memory, which goes back when it is dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;

use crate::shards::error::ShardsError;
use crate::shards::order::Position;

/// One worker's slice of one global batch. Its memory is used again once it is dropped, unless somebody still has the
/// tensor.
#[derive(Debug)]
pub struct Batch {
    /// `[b, width]`, float16; on the host, or on the device where rows are cached there. On its way from there: places in the cache.
    pub embeddings: Tensor,
    /// Latitudes, degrees.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees.
    pub longitudes: Vec<f64>,
    /// Epoch and step that it belongs to.
    pub position: Position,
    /// Positions of the global batch that it holds: equal for equal samples whatever the number of workers.
    pub slice: Range<u64>,
    /// How long the trainer waited for it.
    pub waited: Duration,
    pub(super) spare: Arc<Spare>,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let tensor = std::mem::replace(&mut self.embeddings, Tensor::new());
        self.spare.put(tensor);
    }
}

/// Tensors to fill again. Pinned ones are left to torch's allocator, which knows when a GPU has read them.
#[derive(Debug)]
pub(super) struct Spare {
    tensors: Mutex<Vec<Tensor>>,
    /// Batches that others than the readers have; none: nothing is kept.
    elsewhere: Option<usize>,
    /// The most batches that were being filled at once.
    filling_max: AtomicUsize,
}

impl Spare {
    pub(super) fn new(elsewhere: Option<usize>) -> Arc<Self> {
        Arc::new(Self { tensors: Mutex::default(), elsewhere, filling_max: AtomicUsize::new(0) })
    }

    /// So many batches are being filled at once.
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

pub(super) fn after_the_end(error: &str) -> ShardsError {
    ShardsError::Internal(format!("a batch was asked for after the error: {error}"))
}
