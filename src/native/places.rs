//! Places of rows in memory that several threads fill.
//!
//! `Rows` hands out the place of each of its rows once, to a [`RowPlaces`]: the places of one read. Only the holder of that
//! can write them, and [`RowPlaces::finish`] gives them up for good. Invariants:
//! - The memory is handed over (`Rows::into_owner`) only when all rows are finished and no places are left: nobody sees a
//!   row that was not written whole and declared good, and nobody writes what somebody sees.
//! - Places that are dropped unfinished, because a read failed or was given up, leave their rows missing for ever. While they
//!   exist they keep the memory alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that memory takes at once. Only whole lines are worth passing the caches by.
const LINE_BYTES: usize = 64;

/// Bytes of one streaming store.
const LANE_BYTES: usize = 16;

/// Memory for rows, and who owns it.
struct Memory<Owner: ?Sized> {
    base: *mut u8,
    rows: usize,
    row_bytes: usize,
    /// Rows that are not finished.
    missing: AtomicUsize,
    owner: Owner,
}

// SAFETY: `base` stays valid wherever `owner` goes, which is `Send`; the bytes are reached through places only.
unsafe impl<Owner: Send + ?Sized> Send for Memory<Owner> {}
// SAFETY: whoever shares it sees numbers that never change and an atomic; `owner` is reached only by taking the memory apart,
// and the bytes through places, each of which one thread has.
unsafe impl<Owner: Send + ?Sized> Sync for Memory<Owner> {}

/// Memory whose rows are handed out in order.
pub(super) struct Rows<Owner> {
    memory: Arc<Memory<Owner>>,
    given: usize,
}

impl<Owner: Send + 'static> Rows<Owner> {
    /// Rows whose bytes need not have been written yet.
    ///
    /// # Safety
    /// `base` points to `rows * row_bytes` bytes that stay where they are while `owner` lives, wherever it is moved to, and that
    /// nobody else reads or writes until [`Rows::into_owner`] has given `owner` back.
    pub(super) unsafe fn new(owner: Owner, base: *mut u8, rows: usize, row_bytes: usize) -> Self {
        let missing = AtomicUsize::new(rows);
        Self { memory: Arc::new(Memory { base, rows, row_bytes, missing, owner }), given: 0 }
    }

    /// Rows whose place nobody has got yet.
    pub(super) fn unplaced(&self) -> usize {
        self.memory.rows - self.given
    }

    /// Hands out the next place: row `row` of a block goes there.
    ///
    /// # Panics
    /// Where all places are given, the block has no such row or that has a place, or rows are of another size.
    pub(super) fn give(&mut self, places: &mut RowPlaces, row: usize) {
        assert!(self.unplaced() > 0, "all {} places are given", self.memory.rows);
        assert!(places.written == 0, "{} rows are written already", places.written);
        assert!(places.row_bytes == self.memory.row_bytes, "rows of {} bytes", places.row_bytes);
        let slot = &mut places.slots[row];
        assert!(slot.is_null(), "row {row} has a place");
        *slot = self.memory.base.wrapping_add(self.given * self.memory.row_bytes);
        self.given += 1;
        match places.memories.last_mut() {
            Some((last, count)) if std::ptr::addr_eq(Arc::as_ptr(last), Arc::as_ptr(&self.memory)) => *count += 1,
            _ => places.memories.push((Arc::clone(&self.memory) as Arc<Memory<dyn Send>>, 1)),
        }
    }

    /// The owner of the memory, once all rows are finished.
    ///
    /// # Panics
    /// Where rows are missing, or somebody has not yet returned from [`RowPlaces::finish`].
    pub(super) fn into_owner(self) -> Owner {
        // Pairs with the release of `finish`: what was written there is seen here.
        let missing = self.memory.missing.load(Ordering::Acquire);
        assert!(missing == 0, "{missing} rows are missing");
        Arc::into_inner(self.memory).expect("no places are left").owner
    }
}

/// Where the wanted rows of one block go: written in the order of the block ([`RowPlaces::write`]), again from the first where
/// need be ([`RowPlaces::restart`]), then declared good ([`RowPlaces::finish`]).
pub struct RowPlaces {
    /// Place of each row of the block; null: nobody wants the row. Each belongs to one of `memories` and to nobody else.
    slots: Vec<*mut u8>,
    row_bytes: usize,
    /// The rows before this one have been written, where they have a place.
    written: usize,
    /// Where the places lie, and how many in each.
    memories: Vec<(Arc<Memory<dyn Send>>, usize)>,
}

// SAFETY: the places are nobody else's (`Rows::give` hands each out once), and their memory goes with them.
unsafe impl Send for RowPlaces {}

impl RowPlaces {
    /// For a block of so many rows, none of them wanted yet.
    pub fn new(rows: usize, row_bytes: usize) -> Self {
        Self { slots: vec![std::ptr::null_mut(); rows], row_bytes, written: 0, memories: Vec::new() }
    }

    /// Begins again with the first row.
    pub fn restart(&mut self) {
        self.written = 0;
    }

    /// Takes the next rows of the block, and copies those that are wanted to their places.
    ///
    /// # Panics
    /// Where these are not whole rows, or more than are left.
    pub fn write(&mut self, rows: &[u8]) {
        let (count, left) = (rows.len() / self.row_bytes, self.slots.len() - self.written);
        let whole = count * self.row_bytes == rows.len() && count <= left;
        assert!(whole, "{} bytes for {left} rows of {}", rows.len(), self.row_bytes);
        let slots = &self.slots[self.written..][..count];
        for (slot, row) in slots.iter().zip(rows.chunks_exact(self.row_bytes)).filter(|(slot, _)| !slot.is_null()) {
            // SAFETY: `slot` has room for one row, which nobody else reads or writes, so that `rows` cannot overlap it; the
            // fence follows.
            unsafe { stream(row, *slot) };
        }
        fence();
        self.written += count;
    }

    /// Says that every row is written and good: from now on others may see it.
    ///
    /// # Panics
    /// Where rows have not been written.
    pub fn finish(self) {
        assert!(self.written == self.slots.len(), "{} of {} rows were written", self.written, self.slots.len());
        for (memory, count) in self.memories {
            memory.missing.fetch_sub(count, Ordering::Release);
        }
    }
}

/// Copies a row to where it will not be read soon: past the caches, which need not fetch what is overwritten.
///
/// # Safety
/// `place` has room for the row and does not overlap it, and this thread calls [`fence`] before anybody reads what was written.
unsafe fn stream(row: &[u8], place: *mut u8) {
    let (head, rest) = row.split_at(place.align_offset(LINE_BYTES).min(row.len()));
    let (lines, tail) = rest.as_chunks::<LINE_BYTES>();
    // SAFETY: the first bytes of the row go to the first of the place.
    unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), place, head.len()) };
    let mut place = place.wrapping_add(head.len());
    for line in lines {
        // SAFETY: the place has room for the rest of the row, and is aligned from here on.
        unsafe { stream_line(line, place) };
        place = place.wrapping_add(LINE_BYTES);
    }
    // SAFETY: the last bytes of the row go to the last of the place.
    unsafe { std::ptr::copy_nonoverlapping(tail.as_ptr(), place, tail.len()) };
}

/// # Safety
/// `place` is aligned to [`LINE_BYTES`] and has room for as many; a [`fence`] follows.
#[cfg(not(miri))]
#[inline(always)]
unsafe fn stream_line(line: &[u8; LINE_BYTES], place: *mut u8) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    for (index, lane) in line.as_chunks::<LANE_BYTES>().0.iter().enumerate() {
        // SAFETY: sixteen bytes that may lie anywhere; every x86-64 has SSE2.
        let bits = unsafe { _mm_loadu_si128(lane.as_ptr().cast()) };
        // SAFETY: within the line, and aligned as it is.
        unsafe { _mm_stream_si128(place.wrapping_add(index * LANE_BYTES).cast(), bits) };
    }
}

/// Miri knows no such stores.
#[cfg(miri)]
unsafe fn stream_line(line: &[u8; LINE_BYTES], place: *mut u8) {
    // SAFETY: the caller says so.
    unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), place, LINE_BYTES) };
}

/// Makes streaming stores what other stores are: done before what follows.
fn fence() {
    // SAFETY: every x86-64 has SSE.
    #[cfg(not(miri))]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that says when it goes away.
    struct Owner {
        bytes: Vec<u8>,
        _alive: Arc<()>,
    }

    fn rows(count: usize, row_bytes: usize) -> (Rows<Owner>, Arc<()>) {
        let alive = Arc::new(());
        let mut owner = Owner { bytes: vec![0; count * row_bytes], _alive: Arc::clone(&alive) };
        let base = owner.bytes.as_mut_ptr();
        // SAFETY: the heap memory of a vector that nobody touches before it is handed back.
        (unsafe { Rows::new(owner, base, count, row_bytes) }, alive)
    }

    fn panics(body: impl FnOnce()) -> String {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).expect_err("must panic");
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).expect("a text")
    }

    #[test]
    fn every_row_lies_where_it_was_sent_and_none_is_seen_before_all_are_good() {
        // Two batches of three rows of two bytes; rows 1, 4, 2, 0 of one block and 1, 0 of another, of five and two.
        let ((mut first, _), (mut second, _)) = (rows(3, 2), rows(3, 2));
        let (mut one, mut two) = (RowPlaces::new(5, 2), RowPlaces::new(2, 2));
        first.give(&mut one, 1);
        first.give(&mut two, 1);
        first.give(&mut one, 4);
        second.give(&mut one, 2);
        second.give(&mut one, 0);
        second.give(&mut two, 0);
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
    fn what_is_not_finished_is_never_handed_out_and_keeps_the_memory_while_it_can_be_written() {
        let (mut memory, alive) = rows(2, 1);
        let (mut one, mut two) = (RowPlaces::new(1, 1), RowPlaces::new(1, 1));
        memory.give(&mut one, 0);
        memory.give(&mut two, 0);
        one.write(&[7]);
        one.finish();
        assert_eq!(panics(|| drop(memory.into_owner())), "1 rows are missing");
        assert_eq!(Arc::strong_count(&alive), 2, "the second place can still be written");
        two.write(&[8]);
        drop(two);
        assert_eq!(Arc::strong_count(&alive), 1);
        let (mut memory, _) = rows(1, 1);
        let mut places = RowPlaces::new(3, 1);
        memory.give(&mut places, 2);
        assert_eq!(panics(|| places.finish()), "0 of 3 rows were written");
        assert_eq!(panics(|| drop(memory.into_owner())), "1 rows are missing");
    }

    #[test]
    fn no_place_is_given_twice() {
        let (mut memory, _) = rows(2, 4);
        let mut places = RowPlaces::new(2, 4);
        memory.give(&mut places, 0);
        assert_eq!(panics(|| memory.give(&mut places, 0)), "row 0 has a place");
        assert_eq!(panics(|| memory.give(&mut RowPlaces::new(2, 2), 0)), "rows of 2 bytes");
        memory.give(&mut places, 1);
        assert_eq!(panics(|| memory.give(&mut RowPlaces::new(1, 4), 0)), "all 2 places are given");
        assert_eq!(panics(|| places.write(&[0; 7])), "7 bytes for 2 rows of 4");
        assert_eq!(panics(|| places.write(&[0; 12])), "12 bytes for 2 rows of 4");
    }

    #[test]
    fn rows_of_any_size_arrive_whole_from_pieces_of_any_size() {
        // Miri takes minutes for more.
        let sizes: &[usize] = if cfg!(miri) { &[6, 150] } else { &[1, 6, 63, 64, 65, 150, 600, 1536, 1550] };
        for &row_bytes in sizes {
            let block: Vec<u8> = (0..40 * row_bytes).map(|at| (at * 31 % 251) as u8).collect();
            let wanted: Vec<usize> =
                (0..40).map(|at| at * 19 % 40).filter(|row| row % 5 != 1 && row % 7 != 2).collect();
            for piece_rows in [1, 3, 40] {
                let (mut memory, _) = rows(wanted.len(), row_bytes);
                let mut places = RowPlaces::new(40, row_bytes);
                wanted.iter().for_each(|row| memory.give(&mut places, *row));
                // A read that is begun again leaves nothing of the first.
                places.write(&vec![255; 7 * row_bytes]);
                places.restart();
                block.chunks(piece_rows * row_bytes).for_each(|piece| places.write(piece));
                places.finish();
                let want: Vec<u8> =
                    wanted.iter().flat_map(|row| &block[row * row_bytes..][..row_bytes]).copied().collect();
                assert!(memory.into_owner().bytes == want, "rows of {row_bytes} bytes, {piece_rows} at a time");
            }
        }
    }
}
