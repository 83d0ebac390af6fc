//! The reader threads, and the task queue through which the gatherer requests blocks from them. A reader thread reads a
//! block and writes the wanted rows to their places in batches.
//!
//! The gatherer requests the blocks of the current and of the next segment. Each request has a number, its ticket,
//! under which the result is stored. A result without an error means that the block was checked and that all wanted
//! rows are in their places. The gatherer never waits forever: a panic during a read becomes an error result, and
//! [`Readers::stop`] wakes the gatherer.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::cache::{Cache, HostCache};
use super::segments::Segment;
use crate::native::row_pool::RowPlaces;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, catch_panic};

/// How long [`Readers::stop`] waits for busy threads.
const STOP_WAIT: Duration = Duration::from_millis(250);

/// The result of reading one view of a block: the coordinates, and the embeddings if they are cached.
pub(super) type BlockResult = Result<Arc<BlockRows>, ShardsError>;

/// The state that the reader threads and the gatherer share.
pub(super) struct Readers {
    blocks: Arc<dyn Blocks>,
    plan: Plan,
    cache: Option<HostCache>,
    state: Mutex<ReaderState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReaderState {
    tasks: VecDeque<Task>,
    results: HashMap<u64, BlockResult>,
    /// Buffers that can be reused.
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
    /// The block, if it is cached.
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

    fn state(&self) -> MutexGuard<'_, ReaderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests the blocks of a segment. `places` says where to write the rows of each block. The requests get
    /// consecutive numbers (tickets). Returns the first ticket.
    pub(super) fn request(&self, segment: &Segment, places: Vec<RowPlaces>) -> u64 {
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

    /// Waits for the results of `count` tickets, starting with ticket `first`. `None` if the readers have been stopped.
    pub(super) fn wait(&self, first: u64, count: usize) -> Option<Vec<BlockResult>> {
        let tickets = first..first + count as u64;
        let mut state = self.state();
        while !state.stopped {
            if tickets.clone().all(|ticket| state.results.contains_key(&ticket)) {
                return tickets.map(|ticket| state.results.remove(&ticket)).collect();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Takes back the buffers of results for reuse, except buffers that the cache holds.
    pub(super) fn give_back(&self, results: Vec<BlockResult>) {
        let free = results.into_iter().filter_map(|result| Arc::try_unwrap(result.ok()?).ok());
        self.state().spare.extend(free);
    }

    /// The body of a reader thread.
    pub(super) fn work(&self) {
        // Buffer for decoded embeddings, reused for each block.
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
            let result = self.run_task(task, rows, &mut embeddings);
            state = self.state();
            state.results.insert(ticket, result);
            self.changed.notify_all();
        }
    }

    /// Reads the block of a task, or takes it from the cache, and writes the wanted rows to their places.
    fn run_task(&self, task: Task, rows: BlockRows, embeddings: &mut Vec<u8>) -> BlockResult {
        let Task { block, view, places, kept, .. } = task;
        let bytes = self.bytes(block);
        if let Some(kept) = kept {
            return copy(block, &kept, places).map(|()| kept);
        }
        if let Some(cache) = self.cache.as_ref().filter(|cache| cache.has_room(bytes)) {
            // The cache keeps the buffer of this block, so read the block into a new buffer.
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

    /// Stops all threads. Waits for them, but at most [`STOP_WAIT`].
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.tasks.clear();
        self.changed.notify_all();
        let wait = self.changed.wait_timeout_while(state, STOP_WAIT, |state| state.threads > 0);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if state.threads > 0 {
            tracing::debug!(
                threads = state.threads,
                "some reader threads are still reading; they end by themselves after the read"
            );
        }
    }
}

/// Reads all rows of one view of a block. A bad row is an error, unless the plan skips the row. Also returns an error
/// if the reader panics or returns a wrong number of rows.
pub(super) fn read(
    blocks: &dyn Blocks,
    plan: &Plan,
    block: u32,
    view: u32,
    into: &mut BlockRows,
) -> Result<(), ShardsError> {
    catch_panic(block, || blocks.read_except(block, view, plan.mask().skipped(block), into))?;
    into.check(block, plan.layout().block_rows[block as usize] as usize, plan.layout().width)
}

/// Reads one view of a block and writes the wanted embeddings to `places`. If the block must be decoded first,
/// `embeddings` is the buffer for the decoded values. A panic of the reader is returned as an error. On success all
/// places are filled, and the result holds the coordinates of all rows.
pub(super) fn place(
    blocks: &dyn Blocks,
    plan: &Plan,
    (block, view): (u32, u32),
    mut into: BlockRows,
    embeddings: &mut Vec<u8>,
    mut places: RowPlaces,
) -> BlockResult {
    into.embeddings = std::mem::take(embeddings);
    let rows = plan.layout().block_rows[block as usize] as usize;
    catch_panic(block, || {
        blocks.read_placed((block, view), plan.mask().skipped(block), &mut into, &mut places)?;
        let got = (into.latitudes.len(), into.longitudes.len());
        if got != (rows, rows) {
            let text =
                format!("block {block}: the numbers of latitudes and longitudes are {got:?}, wanted {rows} of each");
            return Err(ShardsError::Internal(text));
        }
        places.finish();
        Ok(())
    })?;
    *embeddings = std::mem::take(&mut into.embeddings);
    Ok(Arc::new(into))
}

/// Copies the wanted rows of a cached block to their places.
fn copy(block: u32, rows: &BlockRows, mut places: RowPlaces) -> Result<(), ShardsError> {
    catch_panic(block, || {
        places.write(&rows.embeddings);
        places.finish();
        Ok(())
    })
}

/// Starts a thread and counts it, so that [`Readers::stop`] waits for it.
pub(super) fn spawn(
    readers: &Arc<Readers>,
    name: &str,
    body: impl FnOnce(&Readers) + Send + 'static,
) -> Result<JoinHandle<()>, ShardsError> {
    /// Decrements the thread count when dropped, even after a panic.
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
