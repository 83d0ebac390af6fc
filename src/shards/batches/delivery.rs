//! A batch, and the reuse of its memory when it is dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;

use crate::shards::error::ShardsError;
use crate::shards::order::Position;

/// One worker's slice of a global batch. Its memory is reused after it is dropped, unless the tensor is still shared.
#[derive(Debug)]
pub struct Batch {
    /// `[b, width]`, float16, on the host, or on the device with the device cache. Between gatherer and
    /// [`Batches::next`], a batch from the device cache holds places in the cache instead.
    ///
    /// [`Batches::next`]: super::Batches::next
    pub embeddings: Tensor,
    /// Latitudes, degrees.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees.
    pub longitudes: Vec<f64>,
    /// Epoch and step of the batch.
    pub position: Position,
    /// The positions of the global batch that it holds. A sample has the same position for any number of workers.
    pub slice: Range<u64>,
    /// How long the trainer waited for the batch.
    pub waited: Duration,
    pub(super) spare: Arc<TensorPool>,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let tensor = std::mem::replace(&mut self.embeddings, Tensor::new());
        self.spare.put(tensor);
    }
}

/// A pool of tensors to reuse. Pinned tensors are left to torch's allocator, which knows when the GPU has read them.
#[derive(Debug)]
pub(super) struct TensorPool {
    tensors: Mutex<Vec<Tensor>>,
    /// Maximum number of batches outside the readers. `None`: no tensor is kept.
    elsewhere: Option<usize>,
    /// Maximum number of batches filled at the same time so far.
    filling_max: AtomicUsize,
}

impl TensorPool {
    pub(super) fn new(elsewhere: Option<usize>) -> Arc<Self> {
        Arc::new(Self { tensors: Mutex::default(), elsewhere, filling_max: AtomicUsize::new(0) })
    }

    /// Grows the pool for the number of batches being filled.
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
    ShardsError::Internal(format!("a batch was requested after the error: {error}"))
}
