//! Threads that read blocks, and the bounded pool between them and the gatherer.
//!
//! The gatherer asks for the blocks of one segment and the next; each answer waits under its ticket. Nobody waits for a
//! thread that does not exist any more: a panic in a read is an answer, and so is the end.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::segments::Segment;
use crate::shards::cache::HostCache;
use crate::shards::mask::panicked;
use crate::shards::{BlockRows, Blocks, Cache, ELEMENT_BYTES, Plan, ShardsError};

/// How long an end waits for threads that are busy.
const END_WAIT: Duration = Duration::from_millis(250);

/// One view of one block.
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

    /// Asks for the blocks of a segment; the tickets are consecutive from the one returned.
    pub(super) fn ask(&self, segment: &Segment) -> u64 {
        let mut state = self.state();
        let first = state.tickets;
        for (block, view) in segment.blocks.iter().copied() {
            let ticket = state.tickets;
            state.tickets += 1;
            match self.cache.as_ref().and_then(|cache| cache.get(block, view)) {
                Some(rows) => drop(state.answers.insert(ticket, Ok(rows))),
                None => state.tasks.push_back(Task { ticket, block, view }),
            }
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
        let mut state = self.state();
        while !state.stopped {
            let Some(task) = state.tasks.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let bytes = self.bytes(task.block);
            let keeps = self.cache.as_ref().filter(|cache| cache.has_room(bytes));
            // What is kept gets memory of its own size.
            let mut rows = if keeps.is_some() { BlockRows::default() } else { state.spare.pop().unwrap_or_default() };
            drop(state);
            let answer =
                read(self.blocks.as_ref(), &self.plan, task.block, task.view, &mut rows).map(|()| Arc::new(rows));
            if let (Some(cache), Ok(rows)) = (keeps, &answer) {
                cache.keep(task.block, task.view, bytes, rows);
            }
            state = self.state();
            state.answers.insert(task.ticket, answer);
            self.changed.notify_all();
        }
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
    let skip = plan.mask().skipped(block);
    let body =
        || if skip.is_empty() { blocks.read(block, view, into) } else { blocks.read_except(block, view, skip, into) };
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(block, panic.as_ref())))?;
    let rows = plan.layout().block_rows[block as usize] as usize;
    let got = (into.latitudes.len(), into.longitudes.len(), into.embeddings.len());
    let wanted = (rows, rows, rows * plan.layout().width * ELEMENT_BYTES);
    if got != wanted {
        let text =
            format!("block {block}: latitudes, longitudes and bytes of embeddings are {got:?}, wanted {wanted:?}");
        return Err(ShardsError::Internal(text));
    }
    Ok(())
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
        .map_err(|error| ShardsError::Io { path: PathBuf::from(format!("thread `{name}`")), error })
}
