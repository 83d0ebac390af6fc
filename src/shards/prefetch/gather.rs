//! One thread that puts rows into batches, in the order of the plan.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use tch::Tensor;

use super::Spare;
use super::device::Places;
use super::readers::{Answer, Readers};
use super::segments::{Segment, Segments};
use crate::native::host::HostRows;
use crate::shards::{ELEMENT_BYTES, Position, ShardsError};

/// A batch on its way to the trainer.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) position: Position,
    pub(super) slice: Range<u64>,
    pub(super) embeddings: Embeddings,
    pub(super) latitudes: Vec<f64>,
    pub(super) longitudes: Vec<f64>,
}

/// Embeddings of a batch, or where they are.
#[derive(Debug)]
pub(super) enum Embeddings {
    /// The rows themselves.
    Rows(Tensor),
    /// Their places in the device cache.
    Places(Tensor),
}

/// A batch that is not full yet.
struct Filling {
    position: Position,
    rows: HostRows,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
}

/// Gathers until somebody says stop or something fails.
pub(super) struct Gatherer {
    pub(super) segments: Segments,
    pub(super) readers: Arc<Readers>,
    pub(super) width: usize,
    pub(super) pinned: bool,
    pub(super) spare: Arc<Spare>,
    /// Where rows lie on the device; none: they are read.
    pub(super) places: Option<Places>,
    pub(super) sender: SyncSender<Result<Delivery, ShardsError>>,
}

/// Why gathering ended.
enum End {
    /// Nobody wants batches any more.
    Stopped,
    /// The trainer must hear of it.
    Failed(ShardsError),
}

impl From<ShardsError> for End {
    fn from(error: ShardsError) -> Self {
        Self::Failed(error)
    }
}

impl Gatherer {
    /// Does the work of the thread.
    pub(super) fn run(mut self) {
        let end = if self.places.is_some() { self.gather_places() } else { self.gather_rows() };
        if let Err(End::Failed(error)) = end {
            self.fail(error);
        }
    }

    /// Says what went wrong in the place of the next batch. A trainer that has gone away need not hear it.
    pub(super) fn fail(self, error: ShardsError) {
        let _ = self.sender.send(Err(error));
    }

    /// Reads one segment ahead of the one that is gathered.
    fn gather_rows(&mut self) -> Result<(), End> {
        let mut filling = None;
        let mut segment = self.segments.next()?;
        let mut ticket = self.readers.ask(&segment);
        loop {
            let next = self.segments.next()?;
            let next_ticket = self.readers.ask(&next);
            let mut answers = self.readers.wait(ticket, segment.blocks.len()).ok_or(End::Stopped)?;
            self.gather(&segment, &mut answers, &mut filling)?;
            self.readers.give_back(answers);
            (segment, ticket) = (next, next_ticket);
        }
    }

    /// Appends the rows of a segment to the batch that is being filled, and sends those that are full.
    fn gather(&self, segment: &Segment, answers: &mut [Answer], filling: &mut Option<Filling>) -> Result<(), End> {
        let row_bytes = self.width * ELEMENT_BYTES;
        let mut rest = segment.rows.as_slice();
        for (position, count) in &segment.steps {
            let (rows, after) = rest.split_at(*count);
            rest = after;
            let batch = match filling {
                Some(batch) => batch,
                None => filling.insert(self.begin(*position)?),
            };
            for (place, row) in rows.iter().map(|(place, row)| (*place as usize, *row as usize)) {
                let block = match &mut answers[place] {
                    Ok(block) => block,
                    failed => return Err(End::Failed(take_error(failed))),
                };
                batch.rows.push(&block.embeddings[row * row_bytes..(row + 1) * row_bytes]);
                batch.latitudes.push(block.latitudes[row]);
                batch.longitudes.push(block.longitudes[row]);
            }
            if batch.rows.missing() == 0
                && let Some(batch) = filling.take()
            {
                let embeddings = Embeddings::Rows(batch.rows.into_tensor());
                self.send(batch.position, embeddings, batch.latitudes, batch.longitudes)?;
            }
        }
        Ok(())
    }

    fn begin(&self, position: Position) -> Result<Filling, ShardsError> {
        let slice = self.segments.slice();
        let count = (slice.end - slice.start) as usize;
        let reused = self.spare.take().and_then(|tensor| HostRows::reuse(tensor, count, self.width));
        let rows = match reused {
            Some(rows) => rows,
            None => HostRows::new(count, self.width, self.pinned)?,
        };
        Ok(Filling { position, rows, latitudes: Vec::with_capacity(count), longitudes: Vec::with_capacity(count) })
    }

    /// Finds the rows of a batch in the device cache; nothing is read.
    fn gather_places(&mut self) -> Result<(), End> {
        let slice = self.segments.slice().clone();
        let count = (slice.end - slice.start) as usize;
        let (mut places, mut latitudes, mut longitudes) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let segment = self.segments.next()?;
            let known = self.places.as_ref().ok_or_else(|| ShardsError::Internal("no device cache".to_owned()))?;
            let mut rest = segment.rows.as_slice();
            for (position, of_step) in &segment.steps {
                let (rows, after) = rest.split_at(*of_step);
                rest = after;
                for (place, row) in rows {
                    let (block, view) = segment.blocks[*place as usize];
                    places.push(known.place(block, view, *row));
                    let (latitude, longitude) = known.coordinates(block, *row);
                    latitudes.push(latitude);
                    longitudes.push(longitude);
                }
                if places.len() == count {
                    let embeddings = Embeddings::Places(known.tensor(&places)?);
                    places.clear();
                    self.send(*position, embeddings, std::mem::take(&mut latitudes), std::mem::take(&mut longitudes))?;
                }
            }
        }
    }

    fn send(
        &self,
        position: Position,
        embeddings: Embeddings,
        latitudes: Vec<f64>,
        longitudes: Vec<f64>,
    ) -> Result<(), End> {
        let slice = self.segments.slice().clone();
        let delivery = Delivery { position, slice, embeddings, latitudes, longitudes };
        self.sender.send(Ok(delivery)).map_err(|_| End::Stopped)
    }
}

/// Moves the error out; what is left behind is never read.
fn take_error(answer: &mut Answer) -> ShardsError {
    match std::mem::replace(answer, Ok(Arc::default())) {
        Err(error) => error,
        Ok(_) => ShardsError::Internal("a block failed without an error".to_owned()),
    }
}
