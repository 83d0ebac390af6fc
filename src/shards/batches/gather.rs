//! The gatherer thread. It requests rows in the order of the plan and sends the batches that readers have filled.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use tch::Tensor;

use super::delivery::{Batch, TensorPool};
use super::device::Places;
use super::filling::Filling;
use super::readers::Readers;
use super::segments::{Segment, Segments};
use crate::shards::error::ShardsError;

/// The state of the gatherer thread. The thread gathers batches until it is stopped or an error occurs.
pub(super) struct Gatherer {
    pub(super) segments: Segments,
    pub(super) readers: Arc<Readers>,
    pub(super) filling: Filling,
    /// Places of rows in the device cache. `None` if there is no device cache; rows are then read from files.
    pub(super) places: Option<Arc<Places>>,
    pub(super) sender: SyncSender<Result<Batch, ShardsError>>,
}

/// Why gathering ended: an error for the trainer, or `None` if the trainer no longer wants batches.
type End = Option<ShardsError>;

impl Gatherer {
    /// The body of the thread.
    pub(super) fn run(mut self) {
        let end = if self.places.is_some() { self.gather_places() } else { self.gather_rows() };
        if let Err(Some(error)) = end {
            self.fail(error);
        }
    }

    /// Sends an error instead of the next batch. If the trainer no longer receives, the error is discarded.
    pub(super) fn fail(self, error: ShardsError) {
        let _ = self.sender.send(Err(error));
    }

    /// Sends the batches, segment by segment. Requests the next segment before it waits for the current one, so that
    /// the readers can read ahead.
    fn gather_rows(&mut self) -> Result<(), End> {
        let (mut segment, mut ticket) = self.request()?;
        loop {
            // If this request fails, send the batches of the current segment before returning the error.
            let next = self.request();
            let mut results = self.readers.wait(ticket, segment.blocks.len()).ok_or(None)?;
            let sender = &self.sender;
            let send = |batch| sender.send(Ok(batch)).map_err(|_| None);
            self.filling.take(&segment, &mut results, send)?;
            self.readers.give_back(results);
            (segment, ticket) = next?;
        }
    }

    /// Requests the next segment from the readers. Returns the segment and the ticket (request number) of its first
    /// block.
    fn request(&mut self) -> Result<(Segment, u64), ShardsError> {
        let segment = self.segments.next()?;
        let places = self.filling.arrange(&segment)?;
        let ticket = self.readers.request(&segment, places);
        Ok((segment, ticket))
    }

    /// Sends batches that hold the positions of the rows in the device cache instead of embeddings. Reads no file.
    fn gather_places(&mut self) -> Result<(), End> {
        let slice = self.segments.slice().clone();
        let count = (slice.end - slice.start) as usize;
        // Places are only a few bytes per row, so their memory is not reused.
        let spare = TensorPool::new(None);
        let (mut places, mut latitudes, mut longitudes) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let segment = self.segments.next()?;
            let cached = self
                .places
                .as_ref()
                .ok_or_else(|| ShardsError::Internal("the gatherer has no device cache".to_owned()))?;
            for (position, rows) in segment.steps() {
                for (place, row) in rows {
                    let (block, view) = segment.blocks[*place as usize];
                    places.push(cached.place(block, view, *row));
                    let (latitude, longitude) = cached.coordinates(block, *row);
                    latitudes.push(latitude);
                    longitudes.push(longitude);
                }
                if places.len() == count {
                    let (embeddings, slice) =
                        (Tensor::f_from_slice(&places).map_err(ShardsError::from)?, slice.clone());
                    places.clear();
                    let (latitudes, longitudes) = (std::mem::take(&mut latitudes), std::mem::take(&mut longitudes));
                    let (waited, spare) = (Duration::ZERO, Arc::clone(&spare));
                    let batch = Batch { embeddings, latitudes, longitudes, position, slice, waited, spare };
                    self.sender.send(Ok(batch)).map_err(|_| None)?;
                }
            }
        }
    }
}
