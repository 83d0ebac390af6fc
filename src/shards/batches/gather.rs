//! One thread that asks for rows in the order of the plan, and sends the batches that readers have filled.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use tch::Tensor;

use super::delivery::{Batch, Spare};
use super::device::Places;
use super::filling::Filling;
use super::readers::Readers;
use super::segments::{Segment, Segments};
use crate::shards::error::ShardsError;

/// Gathers until somebody says stop or something fails.
pub(super) struct Gatherer {
    pub(super) segments: Segments,
    pub(super) readers: Arc<Readers>,
    pub(super) filling: Filling,
    /// Where rows lie on the device; none: they are read.
    pub(super) places: Option<Arc<Places>>,
    pub(super) sender: SyncSender<Result<Batch, ShardsError>>,
}

/// Why gathering ended: something that the trainer must hear of; none: nobody wants batches any more.
type End = Option<ShardsError>;

impl Gatherer {
    /// Does the work of the thread.
    pub(super) fn run(mut self) {
        let end = if self.places.is_some() { self.gather_places() } else { self.gather_rows() };
        if let Err(Some(error)) = end {
            self.fail(error);
        }
    }

    /// Says what went wrong in the place of the next batch. A trainer that has gone away need not hear it.
    pub(super) fn fail(self, error: ShardsError) {
        let _ = self.sender.send(Err(error));
    }

    /// Reads one segment ahead of the one whose batches are sent.
    fn gather_rows(&mut self) -> Result<(), End> {
        let (mut segment, mut ticket) = self.ask()?;
        loop {
            // What goes wrong there must not overtake the batches that come before it.
            let next = self.ask();
            let mut answers = self.readers.wait(ticket, segment.blocks.len()).ok_or(None)?;
            let sender = &self.sender;
            let send = |batch| sender.send(Ok(batch)).map_err(|_| None);
            self.filling.take(&segment, &mut answers, send)?;
            self.readers.give_back(answers);
            (segment, ticket) = next?;
        }
    }

    /// Has the next segment read; the ticket is that of its first block.
    fn ask(&mut self) -> Result<(Segment, u64), ShardsError> {
        let segment = self.segments.next()?;
        let places = self.filling.arrange(&segment)?;
        let ticket = self.readers.ask(&segment, places);
        Ok((segment, ticket))
    }

    /// Finds the rows of a batch in the device cache; nothing is read.
    fn gather_places(&mut self) -> Result<(), End> {
        let slice = self.segments.slice().clone();
        let count = (slice.end - slice.start) as usize;
        // Places are a few bytes per row: not worth keeping.
        let spare = Spare::new(None);
        let (mut places, mut latitudes, mut longitudes) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let segment = self.segments.next()?;
            let known = self.places.as_ref().ok_or_else(|| ShardsError::Internal("no device cache".to_owned()))?;
            for (position, rows) in segment.steps() {
                for (place, row) in rows {
                    let (block, view) = segment.blocks[*place as usize];
                    places.push(known.place(block, view, *row));
                    let (latitude, longitude) = known.coordinates(block, *row);
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
