//! Rows into batches, ahead of the trainer.
//!
//! ```text
//! gatherer ── a place in a batch for each row of this window and the next ──▶ reader threads ── rows into their places
//!    ▲                                                                              │
//!    └── block read, checked and placed ◀──────────────────────────────────────────┘
//!    └── batches whose blocks are all checked, `prefetch_batches` ahead ──▶ Batches::next
//! ```
//!
//! Memory is bounded by the batches of two windows and those ahead, one decoded block for each reader thread, the coordinates of two
//! windows, and what the [`Cache`] may keep. Batches in main memory are used again; pinned ones are torch's to use again. A batch
//! holds the same bits for every number of reader threads and every cache. What goes wrong in a thread, a panic too, arrives at
//! [`Batches::next`] in the place of the first batch that needs the row; all batches before it arrive. [`Cache::Device`] is the
//! exception: it reads everything before the first batch, so that nothing goes wrong later.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use locdiff_core::config::ShardsConfig;
use tch::Device;

use super::cache::Cache;
use super::delivery::{Batch, Spare, after_the_end};
use super::device::DeviceRows;
use super::filling::Filling;
use super::gather::Gatherer;
use super::readers::{self, Readers};
use super::segments::Segments;
use crate::native::cuda;
use crate::shards::blocks::Blocks;
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, Position, Share, panic_text};

/// How batches are made; none of it changes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOptions {
    /// Threads that read.
    pub reader_threads: u32,
    /// Batches that wait for the trainer.
    pub prefetch_batches: u32,
    /// Where rows are kept.
    pub cache: Cache,
    /// Where the trainer computes: batches lie in pinned memory for a GPU, or on it (see [`Cache`]).
    pub device: Device,
}

impl BatchOptions {
    /// As configured, with the cache that was chosen.
    pub fn new(config: &ShardsConfig, cache: Cache, device: Device) -> Self {
        Self { reader_threads: config.reader_threads, prefetch_batches: config.prefetch_batches, cache, device }
    }
}

/// The batches of one worker, from a position on, epoch after epoch.
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
    /// Starts to read. With [`Cache::Device`] it returns when all rows are on the device.
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
        // Those ahead, one on its way to them, one that the trainer has.
        let spare = Spare::new((!on_device && !pinned).then_some(options.prefetch_batches as usize + 2));
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
            // Pinned memory belongs to the context of the trainer's GPU.
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

    /// The next batch; waits for it. After an error there are no more.
    #[allow(clippy::should_implement_trait, reason = "it never ends, and an error is no item")]
    pub fn next(&mut self) -> Result<Batch, ShardsError> {
        if let Some(ended) = &self.ended {
            return Err(after_the_end(ended));
        }
        let start = Instant::now();
        let received = self.deliveries.as_ref().and_then(|deliveries| deliveries.recv().ok());
        let waited = start.elapsed();
        let result = received.unwrap_or_else(|| Err(self.end_of_gatherer()));
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
        batch
    }

    /// Why the gatherer ended without a word.
    fn end_of_gatherer(&mut self) -> ShardsError {
        let panic = self.gatherer.take().and_then(|thread| thread.join().err());
        let text = panic.as_deref().map_or("it ended by itself", |panic| panic_text(panic));
        ShardsError::Internal(format!("the thread that gathers batches panicked: {text}"))
    }

    /// The position of the next batch: what a checkpoint keeps.
    pub fn position(&self) -> Position {
        self.next
    }
}

impl Drop for Batches {
    /// Ends the threads. One that sits in a read of a stalled disk or network is not waited for: it ends after the read.
    fn drop(&mut self) {
        self.deliveries = None;
        self.readers.stop();
    }
}
