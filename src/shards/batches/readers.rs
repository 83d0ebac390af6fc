//! Threads that read blocks and put rows into their places, and the bounded pool between them and the gatherer.
//!
//! The gatherer asks for the blocks of one segment and the next; each answer waits under its ticket. An answer without an
//! error means that the block was checked, and that all rows that were wanted of it are in their places. Nobody waits for a
//! thread that does not exist any more: a panic in a read is an answer, and so is the end.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::cache::{Cache, HostCache};
use super::segments::Segment;
use crate::native::places::RowPlaces;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, caught};

/// How long an end waits for threads that are busy.
const END_WAIT: Duration = Duration::from_millis(250);

/// One view of one block: its coordinates, and its embeddings where they are kept.
pub(super) type Answer = Result<Arc<BlockRows>, ShardsError>;

/// What threads and gatherer share.
pub(super) struct Readers {
    blocks: Arc<dyn Blocks>,
    plan: Plan,
    cache: Option<HostCache>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    answers: HashMap<u64, Answer>,
    /// Buffers to fill again.
    spare: Vec<BlockRows>,
    tickets: u64,
    threads: usize,
    stopped: bool,
}

struct Task {
    ticket: u64,
    block: u32,
    view: u32,
    places: RowPlaces,
    /// The block, where the cache has it.
    kept: Option<Arc<BlockRows>>,
}

impl std::fmt::Debug for Readers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Readers").finish_non_exhaustive()
    }
}

impl Readers {
    pub(super) fn new(blocks: Arc<dyn Blocks>, plan: &Plan, cache: Cache) -> Self {
        let cache = match cache {
            Cache::Host { bytes_max } => Some(HostCache::new(bytes_max)),
            Cache::None | Cache::Device => None,
        };
        Self { blocks, plan: plan.clone(), cache, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the blocks of a segment, with the places of each; the tickets are consecutive from the one returned.
    pub(super) fn ask(&self, segment: &Segment, places: Vec<RowPlaces>) -> u64 {
        let mut state = self.state();
        let first = state.tickets;
        for ((block, view), places) in segment.blocks.iter().copied().zip(places) {
            let ticket = state.tickets;
            state.tickets += 1;
            let kept = self.cache.as_ref().and_then(|cache| cache.get(block, view));
            state.tasks.push_back(Task { ticket, block, view, places, kept });
        }
        drop(state);
        self.changed.notify_all();
        first
    }

    /// Waits for `count` answers from ticket `first` on; none: it is over.
    pub(super) fn wait(&self, first: u64, count: usize) -> Option<Vec<Answer>> {
        let tickets = first..first + count as u64;
        let mut state = self.state();
        while !state.stopped {
            if tickets.clone().all(|ticket| state.answers.contains_key(&ticket)) {
                return tickets.map(|ticket| state.answers.remove(&ticket)).collect();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Takes buffers back that nobody reads any more.
    pub(super) fn give_back(&self, answers: Vec<Answer>) {
        let free = answers.into_iter().filter_map(|answer| Arc::try_unwrap(answer.ok()?).ok());
        self.state().spare.extend(free);
    }

    /// The life of a reader thread.
    pub(super) fn work(&self) {
        // Where embeddings are decoded, from block to block.
        let mut embeddings = Vec::new();
        let mut state = self.state();
        while !state.stopped {
            let Some(task) = state.tasks.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let rows = state.spare.pop().unwrap_or_default();
            drop(state);
            let ticket = task.ticket;
            let answer = self.answer(task, rows, &mut embeddings);
            state = self.state();
            state.answers.insert(ticket, answer);
            self.changed.notify_all();
        }
    }

    /// Puts the rows that a task wants into their places.
    fn answer(&self, task: Task, rows: BlockRows, embeddings: &mut Vec<u8>) -> Answer {
        let Task { block, view, places, kept, .. } = task;
        let bytes = self.bytes(block);
        if let Some(kept) = kept {
            return copy(block, &kept, places).map(|()| kept);
        }
        if let Some(cache) = self.cache.as_ref().filter(|cache| cache.has_room(bytes)) {
            // What is kept gets memory of its own size.
            let mut rows = BlockRows::default();
            read(self.blocks.as_ref(), &self.plan, block, view, &mut rows)?;
            let rows = Arc::new(rows);
            cache.keep(block, view, bytes, &rows);
            return copy(block, &rows, places).map(|()| rows);
        }
        place(self.blocks.as_ref(), &self.plan, (block, view), rows, embeddings, places)
    }

    fn bytes(&self, block: u32) -> u64 {
        let layout = self.plan.layout();
        u64::from(layout.block_rows[block as usize]) * layout.row_bytes()
    }

    /// Ends all threads, and waits a moment for those that are busy.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.tasks.clear();
        self.changed.notify_all();
        let wait = self.changed.wait_timeout_while(state, END_WAIT, |state| state.threads > 0);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if state.threads > 0 {
            tracing::debug!(threads = state.threads, "threads are still in a read; they end after it");
        }
    }
}

/// Reads what the plan wants of a block. A panic is an error, and so are rows that are too few or too many.
pub(super) fn read(
    blocks: &dyn Blocks,
    plan: &Plan,
    block: u32,
    view: u32,
    into: &mut BlockRows,
) -> Result<(), ShardsError> {
    caught(block, || blocks.read_except(block, view, plan.mask().skipped(block), into))?;
    into.check(block, plan.layout().block_rows[block as usize] as usize, plan.layout().width)
}

/// Reads what the plan wants of one view of a block straight into its places, by way of `embeddings` where it must be decoded.
/// A panic is an error. Without an error the places are finished, and the answer has the coordinates of all rows.
pub(super) fn place(
    blocks: &dyn Blocks,
    plan: &Plan,
    (block, view): (u32, u32),
    mut into: BlockRows,
    embeddings: &mut Vec<u8>,
    mut places: RowPlaces,
) -> Answer {
    into.embeddings = std::mem::take(embeddings);
    let rows = plan.layout().block_rows[block as usize] as usize;
    caught(block, || {
        blocks.read_placed((block, view), plan.mask().skipped(block), &mut into, &mut places)?;
        let got = (into.latitudes.len(), into.longitudes.len());
        if got != (rows, rows) {
            let text = format!("block {block}: latitudes and longitudes are {got:?}, wanted {rows} of each");
            return Err(ShardsError::Internal(text));
        }
        places.finish();
        Ok(())
    })?;
    *embeddings = std::mem::take(&mut into.embeddings);
    Ok(Arc::new(into))
}

/// Puts rows of a block that lies in memory into their places.
fn copy(block: u32, rows: &BlockRows, mut places: RowPlaces) -> Result<(), ShardsError> {
    caught(block, || {
        places.write(&rows.embeddings);
        places.finish();
        Ok(())
    })
}

/// Starts a thread that `stop` knows of.
pub(super) fn spawn(
    readers: &Arc<Readers>,
    name: &str,
    body: impl FnOnce(&Readers) + Send + 'static,
) -> Result<JoinHandle<()>, ShardsError> {
    /// Counts a thread, however it ends.
    struct Counted(Arc<Readers>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.state().threads -= 1;
            self.0.changed.notify_all();
        }
    }
    readers.state().threads += 1;
    let counted = Counted(Arc::clone(readers));
    let start = std::thread::Builder::new().name(name.to_owned());
    start
        .spawn(move || {
            let counted = counted;
            body(&counted.0);
        })
        .map_err(|error| ShardsError::io(format!("thread `{name}`"), error))
}
