//! Runs a function on several threads and returns the results in order.

use std::panic::resume_unwind;
use std::thread::{ScopedJoinHandle, scope};

/// Runs `work` on each task on `threads` threads. Results are in the order of the tasks. A panic of `work` is passed on.
pub fn in_parallel<T: Sync, R: Send>(threads: usize, tasks: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let share = tasks.len().div_ceil(threads.max(1)).max(1);
    scope(|scope| {
        let parts: Vec<_> = tasks.chunks(share).map(|part| scope.spawn(|| part.iter().map(&work).collect())).collect();
        let join = |part: ScopedJoinHandle<'_, Vec<R>>| part.join().unwrap_or_else(|panic| resume_unwind(panic));
        parts.into_iter().flat_map(join).collect()
    })
}
