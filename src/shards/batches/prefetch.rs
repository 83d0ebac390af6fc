//! Prefetches rows into batches for the trainer.
//!
//! ```text
//! gatherer ── a place in a batch for each row of this window and the next ──▶ reader threads (fill the places)
//!    ▲                                                                              │
//!    └── block read, checked and placed ◀──────────────────────────────────────────┘
//! gatherer ── batches whose blocks are all checked, `prefetch_batches` ahead ──▶ Batches::next
//! ```
//!
//! Memory is bounded by the batches of two windows, the prefetched batches, one decoded block per reader thread, the
//! coordinates of two windows, and the limit of the [`Cache`]. The memory of batches is reused. For pinned memory,
//! torch's allocator does this.
//!
//! The contents of a batch do not depend on the number of reader threads or the cache. If a block cannot be read, or a
//! thread panics while reading it, [`Batches::next`] first returns all earlier batches, and then returns the error
//! instead of the first batch that needs the block. [`Cache::Device`] is an exception: [`Batches::new`] reads all rows
//! and returns the first read error.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locdiff_core::config::ShardsConfig;
use tch::Device;

use super::cache::Cache;
use super::delivery::{Batch, TensorPool, already_failed};
use super::device::DeviceRows;
use super::filling::Filling;
use super::gather::Gatherer;
use super::readers::{self, Readers};
use super::segments::Segments;
use crate::native::cuda;
use crate::shards::blocks::Blocks;
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, Position, Share, panic_text};

/// How often [`Batches::next_unless`] calls `gives_up` while it waits for a batch.
const POLL: Duration = Duration::from_millis(50);

/// Options for making batches. They do not affect the contents of batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOptions {
    /// Number of reader threads.
    pub reader_threads: u32,
    /// Number of batches to prefetch.
    pub prefetch_batches: u32,
    /// Where rows are cached.
    pub cache: Cache,
    /// The trainer's device. If it is a GPU, batches are on the GPU with [`Cache::Device`], and in pinned main memory
    /// with any other cache.
    pub device: Device,
}

impl BatchOptions {
    /// Takes the numbers of threads and batches from the configuration.
    pub fn new(config: &ShardsConfig, cache: Cache, device: Device) -> Self {
        Self { reader_threads: config.reader_threads, prefetch_batches: config.prefetch_batches, cache, device }
    }
}

/// The batches of one worker, starting at a position. They continue through all following epochs without end.
#[derive(Debug)]
pub struct Batches {
    plan: Plan,
    next: Position,
    deliveries: Option<Receiver<Result<Batch, ShardsError>>>,
    device_rows: Option<DeviceRows>,
    readers: Arc<Readers>,
    gatherer: Option<JoinHandle<()>>,
    ended: Option<String>,
}

impl Batches {
    /// Starts the threads that read and prefetch. With [`Cache::Device`], returns only after all rows are on the
    /// device.
    pub fn new(
        blocks: Arc<dyn Blocks>,
        plan: Plan,
        position: Position,
        share: Share,
        options: &BatchOptions,
    ) -> Result<Self, ShardsError> {
        plan.check_position(position)?;
        let slice = plan.slice(share)?;
        let on_device = options.cache == Cache::Device;
        let device_rows =
            on_device.then(|| DeviceRows::load(&blocks, &plan, options.device, options.reader_threads)).transpose()?;
        let pinned = options.device.is_cuda();
        // The pool keeps tensors for all complete batches: the prefetched batches, one batch that is being sent, and
        // one that the trainer uses.
        let spare = TensorPool::new((!on_device && !pinned).then_some(options.prefetch_batches as usize + 2));
        let readers = Arc::new(Readers::new(blocks, &plan, options.cache));
        let (sender, deliveries) = sync_channel(options.prefetch_batches.max(1) as usize);
        let gatherer = Gatherer {
            segments: Segments::new(plan.clone(), position, slice.clone())?,
            readers: Arc::clone(&readers),
            filling: Filling::new(plan.clone(), slice, pinned, spare),
            places: device_rows.as_ref().map(|rows| Arc::clone(&rows.places)),
            sender,
        };
        let mut batches = Self {
            plan,
            next: position,
            deliveries: Some(deliveries),
            device_rows,
            readers,
            gatherer: None,
            ended: None,
        };
        batches.start(gatherer, options)?;
        Ok(batches)
    }

    fn start(&mut self, gatherer: Gatherer, options: &BatchOptions) -> Result<(), ShardsError> {
        if self.device_rows.is_none() {
            for number in 0..options.reader_threads.max(1) {
                readers::spawn(&self.readers, &format!("reader-{number}"), |readers| readers.work())?;
            }
        }
        let device = options.device;
        let body = move |_: &Readers| {
            // Make the trainer's GPU the current device of this thread, because pinned memory belongs to the context of
            // a GPU.
            if let Device::Cuda(index) = device
                && let Err(error) = cuda::set_device(index)
            {
                return gatherer.fail(error.into());
            }
            gatherer.run();
        };
        self.gatherer = Some(readers::spawn(&self.readers, "gatherer", body)?);
        Ok(())
    }

    /// Waits for the next batch. After an error there are no more batches.
    #[allow(clippy::should_implement_trait, reason = "the batches never end, and an error is not an item")]
    pub fn next(&mut self) -> Result<Batch, ShardsError> {
        loop {
            if let Some(batch) = self.next_unless(|| false)? {
                return Ok(batch);
            }
        }
    }

    /// Waits for the next batch. Calls `gives_up` several times per second, and returns `None` if `gives_up` returns
    /// true before the batch arrives. After an error there are no more batches.
    pub fn next_unless(&mut self, mut gives_up: impl FnMut() -> bool) -> Result<Option<Batch>, ShardsError> {
        if let Some(ended) = &self.ended {
            return Err(already_failed(ended));
        }
        let start = Instant::now();
        let received = loop {
            match self.deliveries.as_ref().map(|deliveries| deliveries.recv_timeout(POLL)) {
                Some(Err(RecvTimeoutError::Timeout)) if gives_up() => return Ok(None),
                Some(Err(RecvTimeoutError::Timeout)) => {}
                received => break received.and_then(Result::ok),
            }
        };
        let waited = start.elapsed();
        let result = received.unwrap_or_else(|| Err(self.gatherer_error()));
        let batch = result.and_then(|mut batch| {
            batch.waited = waited;
            if let Some(rows) = &self.device_rows {
                batch.embeddings = rows.select(&batch.embeddings)?;
            }
            Ok(batch)
        });
        match &batch {
            Ok(batch) => self.next = self.plan.after(batch.position),
            Err(error) => self.ended = Some(error.to_string()),
        }
        batch.map(Some)
    }

    /// The error for a gatherer thread that ended without sending an error.
    fn gatherer_error(&mut self) -> ShardsError {
        let panic = self.gatherer.take().and_then(|thread| thread.join().err());
        let text = panic.as_deref().map_or("it ended without reporting an error", |panic| panic_text(panic));
        ShardsError::Internal(format!("the gatherer thread failed: {text}"))
    }

    /// The position of the next batch, for a checkpoint.
    pub fn position(&self) -> Position {
        self.next
    }
}

impl Drop for Batches {
    /// Stops the threads. If a thread is blocked in a slow read, waits for it only briefly. That thread ends by itself
    /// after the read.
    fn drop(&mut self) {
        self.deliveries = None;
        self.readers.stop();
    }
}
