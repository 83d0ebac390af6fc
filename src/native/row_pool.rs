//! Memory for rows that several threads fill at the same time.
//!
//! Rows are read in blocks. A block consists of consecutive rows of a shard, and only some of these rows are wanted. A
//! `RowPool` owns memory for rows. It assigns each row of its memory once, as the destination of one wanted row of a
//! block. A row of a block can have several destinations. A [`RowPlaces`] holds all destinations for one block. Only
//! the owner of the `RowPlaces` can write to these destinations. [`RowPlaces::finish`] consumes the `RowPlaces`, so
//! that nobody can write to its destinations again.
//!
//! Invariants:
//! - `RowPool::into_owner` releases the memory only when all rows are finished and no `RowPlaces` refers to the memory.
//!   So no thread reads a row before the row was written completely and declared good, and no thread writes to memory
//!   that another thread can read.
//! - If a `RowPlaces` is dropped without `finish`, because a read failed or was abandoned, its rows remain unfinished
//!   for ever. As long as a `RowPlaces` exists, it keeps the memory alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a cache line. Streaming stores are only faster if they fill whole lines.
const LINE_BYTES: usize = 64;

/// Bytes that one streaming store writes.
const LANE_BYTES: usize = 16;

/// Memory for rows, and the value that owns this memory.
struct RowMemory<Owner: ?Sized> {
    base: *mut u8,
    rows: usize,
    row_bytes: usize,
    /// Number of rows that are not finished yet.
    missing: AtomicUsize,
    owner: Owner,
}

// SAFETY: `base` stays valid when `owner` moves (see `RowPool::new`), and `owner` is `Send`. The bytes are accessed
// only through `RowPlaces`.
unsafe impl<Owner: Send + ?Sized> Send for RowMemory<Owner> {}
// SAFETY: a shared reference gives access only to constants and an atomic. `owner` is reached only by unwrapping the
// last `Arc`. The bytes are reached only through `RowPlaces`, where each destination belongs to one thread.
unsafe impl<Owner: Send + ?Sized> Sync for RowMemory<Owner> {}

/// Memory whose rows are assigned from the first to the last.
pub(super) struct RowPool<Owner> {
    memory: Arc<RowMemory<Owner>>,
    assigned: usize,
}

impl<Owner: Send + 'static> RowPool<Owner> {
    /// Creates a pool over memory that the caller provides. The bytes may be uninitialised.
    ///
    /// # Safety
    /// `base` must point to `rows * row_bytes` bytes that stay in place while `owner` lives, even if `owner` is moved.
    /// Nothing else may read or write these bytes until [`RowPool::into_owner`] has returned `owner`.
    pub(super) unsafe fn new(owner: Owner, base: *mut u8, rows: usize, row_bytes: usize) -> Self {
        let missing = AtomicUsize::new(rows);
        Self { memory: Arc::new(RowMemory { base, rows, row_bytes, missing, owner }), assigned: 0 }
    }

    /// Number of rows that are not assigned yet.
    pub(super) fn unassigned(&self) -> usize {
        self.memory.rows - self.assigned
    }

    /// Reserves the next free row of this memory as the destination of row `row` of a block. `places` holds the
    /// destinations of this block.
    ///
    /// # Panics
    /// - If all rows of this memory are already assigned.
    /// - If the block has no row `row`.
    /// - If rows of the block are already written.
    /// - If the rows of the memory and of the block have different sizes.
    pub(super) fn assign(&mut self, places: &mut RowPlaces, row: usize) {
        assert!(self.unassigned() > 0, "all {} rows are already assigned", self.memory.rows);
        assert!(
            places.written == 0,
            "no row can be assigned, because {} rows of the block are already written",
            places.written
        );
        let row_bytes = self.memory.row_bytes;
        assert!(places.row_bytes == row_bytes, "rows of the block have {} bytes, wanted {row_bytes}", places.row_bytes);
        let destination = self.memory.base.wrapping_add(self.assigned * row_bytes);
        self.assigned += 1;
        let slot = &mut places.slots[row];
        if slot.is_null() {
            *slot = destination;
        } else {
            places.copies.push((row, destination));
        }
        match places.memories.last_mut() {
            Some((last, count)) if std::ptr::addr_eq(Arc::as_ptr(last), Arc::as_ptr(&self.memory)) => *count += 1,
            _ => places.memories.push((Arc::clone(&self.memory) as Arc<RowMemory<dyn Send>>, 1)),
        }
    }

    /// Returns the owner of the memory. All rows must be finished.
    ///
    /// # Panics
    /// If any row is not finished, or if another thread is still inside [`RowPlaces::finish`].
    pub(super) fn into_owner(self) -> Owner {
        // This load synchronizes with the release in `finish`, so that all written bytes are visible from here on.
        let missing = self.memory.missing.load(Ordering::Acquire);
        assert!(missing == 0, "{missing} rows are not finished");
        Arc::into_inner(self.memory).expect("no other thread is inside `RowPlaces::finish`").owner
    }
}

/// Destinations of the wanted rows of one block. [`RowPlaces::write`] takes the rows in the order of the block. If a
/// read has to be repeated, [`RowPlaces::restart`] goes back to the first row. [`RowPlaces::finish`] declares all rows
/// good.
pub struct RowPlaces {
    /// The first destination of each row of the block, or null if the row is not wanted. Each destination lies in one
    /// of `memories`, and no other `RowPlaces` has the same destination.
    slots: Vec<*mut u8>,
    /// The other destinations of rows that are wanted more than once, each with its row.
    copies: Vec<(usize, *mut u8)>,
    row_bytes: usize,
    /// Number of rows of the block that have been passed to `write`.
    written: usize,
    /// The memory regions that contain the destinations, each with the number of destinations in it.
    memories: Vec<(Arc<RowMemory<dyn Send>>, usize)>,
}

// SAFETY: the destinations belong to this value alone (`RowPool::assign` gives each one out once), and `memories` keeps
// them valid.
unsafe impl Send for RowPlaces {}

impl RowPlaces {
    /// Creates the destinations for a block of `rows` rows. No row is wanted until
    /// [`HostRows::assign`](super::host::HostRows::assign) gives it a destination.
    pub fn new(rows: usize, row_bytes: usize) -> Self {
        let slots = vec![std::ptr::null_mut(); rows];
        Self { slots, copies: Vec::new(), row_bytes, written: 0, memories: Vec::new() }
    }

    /// Makes the next [`RowPlaces::write`] start at the first row of the block again.
    pub fn restart(&mut self) {
        self.written = 0;
    }

    /// Takes the next rows of the block and copies each wanted row to its destinations.
    ///
    /// # Panics
    /// If the length of `rows` is not a multiple of the row size, or `rows` holds more rows than the block has left.
    pub fn write(&mut self, rows: &[u8]) {
        let (count, left) = (rows.len() / self.row_bytes, self.slots.len() - self.written);
        let whole = count * self.row_bytes == rows.len() && count <= left;
        assert!(whole, "got {} bytes, wanted at most {left} rows of {} bytes", rows.len(), self.row_bytes);
        let slots = &self.slots[self.written..][..count];
        for (slot, row) in slots.iter().zip(rows.chunks_exact(self.row_bytes)).filter(|(slot, _)| !slot.is_null()) {
            // SAFETY: `slot` has room for one row. Nothing else may access that memory (see `RowPool::new`), so `row`
            // cannot overlap it. `fence` is called below.
            unsafe { copy_streaming(row, *slot) };
        }
        for (row, slot) in &self.copies {
            let piece = row.checked_sub(self.written).filter(|row| *row < count);
            if let Some(row) = piece.map(|row| &rows[row * self.row_bytes..][..self.row_bytes]) {
                // SAFETY: as above.
                unsafe { copy_streaming(row, *slot) };
            }
        }
        fence();
        self.written += count;
    }

    /// Declares that every row of the block was written and is good. Other threads can read a memory once this was
    /// declared for all of its rows.
    ///
    /// # Panics
    /// If not all rows of the block have been written.
    pub fn finish(self) {
        assert!(self.written == self.slots.len(), "only {} of {} rows were written", self.written, self.slots.len());
        for (memory, count) in self.memories {
            memory.missing.fetch_sub(count, Ordering::Release);
        }
    }
}

/// Copies a row with stores that bypass the caches. Caching would not help, because the row is not read soon. With
/// these stores, the processor also need not fetch a cache line that is overwritten as a whole.
///
/// # Safety
/// `place` must have room for the row and must not overlap it, and this thread must call [`fence`] before anybody reads
/// the bytes.
unsafe fn copy_streaming(row: &[u8], place: *mut u8) {
    let (head, rest) = row.split_at(place.align_offset(LINE_BYTES).min(row.len()));
    let (lines, tail) = rest.as_chunks::<LINE_BYTES>();
    // SAFETY: `head` is the beginning of the row. `place` has room for the row and does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), place, head.len()) };
    let mut place = place.wrapping_add(head.len());
    for line in lines {
        // SAFETY: `place` has room for the rest of the row and is aligned to `LINE_BYTES` from here on; the caller
        // calls `fence`.
        unsafe { stream_line(line, place) };
        place = place.wrapping_add(LINE_BYTES);
    }
    // SAFETY: `place` has room for `tail`, the end of the row, and does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(tail.as_ptr(), place, tail.len()) };
}

/// # Safety
/// `place` must be aligned to [`LINE_BYTES`], have room for `line` and not overlap `line`. A [`fence`] must follow.
#[cfg(not(miri))]
#[inline(always)]
unsafe fn stream_line(line: &[u8; LINE_BYTES], place: *mut u8) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    for (index, lane) in line.as_chunks::<LANE_BYTES>().0.iter().enumerate() {
        // SAFETY: reads the sixteen bytes of `lane`, which need not be aligned; every x86-64 processor has SSE2.
        let bits = unsafe { _mm_loadu_si128(lane.as_ptr().cast()) };
        // SAFETY: the sixteen destination bytes lie within a line at `place`, and are aligned because `place` is
        // aligned; every x86-64 processor has SSE2.
        unsafe { _mm_stream_si128(place.wrapping_add(index * LANE_BYTES).cast(), bits) };
    }
}

/// A plain copy, because Miri does not support streaming stores.
#[cfg(miri)]
unsafe fn stream_line(line: &[u8; LINE_BYTES], place: *mut u8) {
    // SAFETY: the caller guarantees that `place` has room for the line and does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), place, LINE_BYTES) };
}

/// Makes earlier streaming stores visible before all later stores. Ordinary stores keep their order without a fence.
fn fence() {
    // SAFETY: every x86-64 processor has SSE.
    #[cfg(not(miri))]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory whose lifetime a test can observe.
    struct Owner {
        bytes: Vec<u8>,
        _alive: Arc<()>,
    }

    fn rows(count: usize, row_bytes: usize) -> (RowPool<Owner>, Arc<()>) {
        let alive = Arc::new(());
        let mut owner = Owner { bytes: vec![0; count * row_bytes], _alive: Arc::clone(&alive) };
        let base = owner.bytes.as_mut_ptr();
        // SAFETY: the vector's heap memory stays in place when `owner` moves, and nothing touches this memory before
        // `owner` is returned.
        (unsafe { RowPool::new(owner, base, count, row_bytes) }, alive)
    }

    fn panics(body: impl FnOnce()) -> String {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).expect_err("the call must panic");
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).expect("the panic has a message")
    }

    #[test]
    fn rows_written_by_several_threads_reach_their_destinations() {
        // Two pools, each with three rows of two bytes. Together they receive rows 1, 4, 2 and 0 of a block of five
        // rows, and rows 1 and 0 of a block of two rows.
        let ((mut first, _), (mut second, _)) = (rows(3, 2), rows(3, 2));
        let (mut one, mut two) = (RowPlaces::new(5, 2), RowPlaces::new(2, 2));
        first.assign(&mut one, 1);
        first.assign(&mut two, 1);
        first.assign(&mut one, 4);
        second.assign(&mut one, 2);
        second.assign(&mut one, 0);
        second.assign(&mut two, 0);
        let writers = [(one, vec![0, 0, 1, 1, 2, 2, 3, 3, 4, 4]), (two, vec![5, 5, 6, 6])];
        std::thread::scope(|scope| {
            for (mut places, block) in writers {
                scope.spawn(move || {
                    places.write(&block);
                    places.finish();
                });
            }
        });
        assert_eq!(first.into_owner().bytes, [1, 1, 6, 6, 4, 4]);
        assert_eq!(second.into_owner().bytes, [2, 2, 0, 0, 5, 5]);
    }

    #[test]
    fn unfinished_rows_are_never_released_and_keep_their_memory_alive() {
        let (mut memory, alive) = rows(2, 1);
        let (mut one, mut two) = (RowPlaces::new(1, 1), RowPlaces::new(1, 1));
        memory.assign(&mut one, 0);
        memory.assign(&mut two, 0);
        one.write(&[7]);
        one.finish();
        assert_eq!(panics(|| drop(memory.into_owner())), "1 rows are not finished");
        assert_eq!(Arc::strong_count(&alive), 2, "the memory was freed although it can still be written");
        two.write(&[8]);
        drop(two);
        assert_eq!(Arc::strong_count(&alive), 1);
        let (mut memory, _) = rows(1, 1);
        let mut places = RowPlaces::new(3, 1);
        memory.assign(&mut places, 2);
        assert_eq!(panics(|| places.finish()), "only 0 of 3 rows were written");
        assert_eq!(panics(|| drop(memory.into_owner())), "1 rows are not finished");
    }

    #[test]
    fn no_row_of_a_memory_is_assigned_twice() {
        let (mut memory, _) = rows(2, 4);
        let mut places = RowPlaces::new(2, 4);
        memory.assign(&mut places, 0);
        assert_eq!(panics(|| memory.assign(&mut RowPlaces::new(2, 2), 0)), "rows of the block have 2 bytes, wanted 4");
        memory.assign(&mut places, 1);
        assert_eq!(panics(|| memory.assign(&mut RowPlaces::new(1, 4), 0)), "all 2 rows are already assigned");
        assert_eq!(panics(|| places.write(&[0; 7])), "got 7 bytes, wanted at most 2 rows of 4 bytes");
        assert_eq!(panics(|| places.write(&[0; 12])), "got 12 bytes, wanted at most 2 rows of 4 bytes");
    }

    #[test]
    fn rows_of_any_size_are_copied_whole_from_pieces_of_any_size() {
        // Miri is slow: with more sizes, this test would take minutes.
        let sizes: &[usize] = if cfg!(miri) { &[6, 150] } else { &[1, 6, 63, 64, 65, 150, 600, 1536, 1550] };
        for &row_bytes in sizes {
            let block: Vec<u8> = (0..40 * row_bytes).map(|at| (at * 31 % 251) as u8).collect();
            // Six rows are wanted, each of them 3 to 11 times.
            let wanted: Vec<usize> =
                (0..53).map(|at| at * at * 19 % 40).filter(|row| row % 5 != 1 && row % 7 != 2).collect();
            for piece_rows in [1, 3, 40] {
                let (mut memory, _) = rows(wanted.len(), row_bytes);
                let mut places = RowPlaces::new(40, row_bytes);
                wanted.iter().for_each(|row| memory.assign(&mut places, *row));
                // First write seven rows of wrong bytes. After `restart`, the rows of the block must overwrite them.
                places.write(&vec![255; 7 * row_bytes]);
                places.restart();
                block.chunks(piece_rows * row_bytes).for_each(|piece| places.write(piece));
                places.finish();
                let want: Vec<u8> =
                    wanted.iter().flat_map(|row| &block[row * row_bytes..][..row_bytes]).copied().collect();
                assert!(
                    memory.into_owner().bytes == want,
                    "wrong bytes from rows of {row_bytes} bytes, written {piece_rows} at a time"
                );
            }
        }
    }
}
