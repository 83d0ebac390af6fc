//! Rows of float16 in main memory that become a tensor without a further copy.
//!
//! Pinned memory comes from torch's own allocator, which takes a block back only when the copies out of it are done.

use std::ffi::{c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::error::{NativeError, check, tensor_from};
use super::places::{RowPlaces, Rows};

/// Bytes of a float16.
const HALF_BYTES: usize = 2;

unsafe extern "C" {
    fn locdiff_host_rows(rows: i64, width: i64, pinned: c_int, out: *mut *mut c_void) -> c_int;
    fn locdiff_is_alone(tensor: *const c_void, out: *mut c_int) -> c_int;
}

/// A `[rows, width]` tensor of float16 whose rows are written through the places that it hands out, each once. Nobody else has it
/// before all of them are finished: see [`super::places`].
pub struct HostRows {
    rows: Rows<Tensor>,
}

impl HostRows {
    /// An empty one; `pinned` needs the CUDA variant and a GPU.
    pub fn new(rows: usize, width: usize, pinned: bool) -> Result<Self, NativeError> {
        let tensor = unwritten(rows, width, pinned)?;
        // SAFETY: the tensor was made with this size, and just now.
        Ok(unsafe { Self::of(tensor, rows, width) })
    }

    /// Takes a tensor that [`HostRows::into_tensor`] gave out back, to fill it again; none where it has another shape, somebody else
    /// still looks at its memory, or a GPU may: pinned memory goes back to torch's allocator, which knows when copies are done.
    pub fn reuse(tensor: Tensor, rows: usize, width: usize) -> Option<Self> {
        let shape = [i64::try_from(rows).ok()?, i64::try_from(width).ok()?];
        let ours = tensor.device() == Device::Cpu && tensor.kind() == Kind::Half && tensor.is_contiguous();
        if !ours || tensor.size() != shape {
            return None;
        }
        let mut alone = 0;
        // SAFETY: the tensor is alive, and `alone` has room for one integer.
        let status = unsafe { locdiff_is_alone(tensor.as_ptr().cast(), &raw mut alone) };
        check("owners of a tensor", status).ok()?;
        // SAFETY: a contiguous tensor of this size, which nobody else has.
        (alone != 0).then(|| unsafe { Self::of(tensor, rows, width) })
    }

    /// # Safety
    /// A contiguous tensor of float16 in main memory, `[rows, width]`, that nobody else has.
    unsafe fn of(tensor: Tensor, rows: usize, width: usize) -> Self {
        let base = tensor.data_ptr().cast();
        // SAFETY: the bytes belong to the tensor's storage, which does not move with its handle; the caller says the rest.
        Self { rows: unsafe { Rows::new(tensor, base, rows, width * HALF_BYTES) } }
    }

    /// Rows whose place nobody has got yet.
    pub fn unplaced(&self) -> usize {
        self.rows.unplaced()
    }

    /// Hands out the place of the next row: row `row` of a block goes there.
    ///
    /// # Panics
    /// Where all places are given, the block has no such row or that has a place, or rows are of another width.
    pub fn give(&mut self, places: &mut RowPlaces, row: usize) {
        self.rows.give(places, row);
    }

    /// The tensor, once all rows are finished.
    ///
    /// # Panics
    /// Where rows are missing: their memory has never been written, or what was written is not good.
    pub fn into_tensor(self) -> Tensor {
        self.rows.into_owner()
    }
}

/// `[rows, width]` of float16 in main memory that nobody has written yet.
fn unwritten(rows: usize, width: usize, pinned: bool) -> Result<Tensor, NativeError> {
    const OPERATION: &str = "memory for rows";
    let size = |count: usize| {
        i64::try_from(count).map_err(|error| NativeError { operation: OPERATION, text: error.to_string() })
    };
    let (rows, width) = (size(rows)?, size(width)?);
    // SAFETY: takes numbers.
    let call = |out| unsafe { locdiff_host_rows(rows, width, c_int::from(pinned), out) };
    // SAFETY: the memory is a new tensor's.
    unsafe { tensor_from(OPERATION, call) }
}

/// An even number of pinned bytes, not written yet; needs the CUDA variant and a GPU. tch's own `pin_memory` takes a device, of
/// which libtorch warns that it is deprecated.
pub fn pinned_bytes(count: usize) -> Result<Tensor, NativeError> {
    Ok(unwritten(1, count / HALF_BYTES, true)?.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of three numbers, given to rows 1 and 0 of a block.
    fn placed() -> (HostRows, RowPlaces) {
        let mut rows = HostRows::new(2, 3, false).expect("memory");
        let mut places = RowPlaces::new(2, 6);
        assert_eq!(rows.unplaced(), 2);
        rows.give(&mut places, 1);
        rows.give(&mut places, 0);
        assert_eq!(rows.unplaced(), 0);
        (rows, places)
    }

    fn filled() -> Tensor {
        let (rows, mut places) = placed();
        places.write(&[0, 0xbc, 0, 0xc0, 0, 0xc2, 0, 0x3c, 0, 0x40, 0, 0x42]);
        places.finish();
        rows.into_tensor()
    }

    #[test]
    fn rows_become_numbers_and_memory_that_somebody_sees_is_not_reused() {
        let numbers = Vec::<f32>::try_from(filled().to_kind(Kind::Float).view(-1)).expect("six numbers");
        assert_eq!(numbers, [1.0, 2.0, 3.0, -1.0, -2.0, -3.0]);
        let tensor = filled();
        let view = tensor.narrow(0, 0, 1);
        assert!(HostRows::reuse(tensor, 2, 3).is_none(), "a view is alive");
        drop(view);
        let tensor = filled();
        let other = tensor.shallow_clone();
        assert!(HostRows::reuse(tensor, 2, 3).is_none(), "a second handle is alive");
        assert!(HostRows::reuse(other, 3, 2).is_none(), "another shape");
        let tensor = filled();
        let again = HostRows::reuse(tensor, 2, 3).expect("nobody else has it");
        assert_eq!(again.unplaced(), 2);
    }

    #[test]
    #[should_panic(expected = "2 rows are missing")]
    fn memory_that_was_never_declared_good_is_not_handed_out() {
        let (rows, mut places) = placed();
        places.write(&[0; 12]);
        drop(places);
        let _ = rows.into_tensor();
    }
}
