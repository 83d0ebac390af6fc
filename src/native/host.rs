//! Rows of float16 in main memory that become a tensor without a further copy.
//!
//! Pinned memory comes from torch's own allocator, which takes a block back only when the copies out of it are done.

use std::ffi::{c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::error::{NativeError, check};

/// Bytes of a float16.
const HALF_BYTES: usize = 2;

unsafe extern "C" {
    fn locdiff_host_rows(rows: i64, width: i64, pinned: c_int, out: *mut *mut c_void) -> c_int;
    fn locdiff_is_alone(tensor: *const c_void, out: *mut c_int) -> c_int;
}

/// A `[rows, width]` tensor of float16 that is filled row by row. Nobody else has it before it is full.
#[derive(Debug)]
pub struct HostRows {
    tensor: Tensor,
    row_bytes: usize,
    capacity: usize,
    filled: usize,
}

impl HostRows {
    /// An empty one; `pinned` needs the CUDA variant and a GPU.
    pub fn new(rows: usize, width: usize, pinned: bool) -> Result<Self, NativeError> {
        const OPERATION: &str = "memory for rows";
        let size = |count: usize| {
            i64::try_from(count).map_err(|error| NativeError { operation: OPERATION, text: error.to_string() })
        };
        let mut out = std::ptr::null_mut();
        // SAFETY: takes numbers; `out` is written on success.
        let status = unsafe { locdiff_host_rows(size(rows)?, size(width)?, c_int::from(pinned), &raw mut out) };
        check(OPERATION, status)?;
        // SAFETY: on success `out` is a new at::Tensor, which is what tch's pointer is; nobody else has it.
        let tensor = unsafe { Tensor::from_ptr(out.cast()) };
        Ok(Self { tensor, row_bytes: width * HALF_BYTES, capacity: rows, filled: 0 })
    }

    /// Takes a tensor that [`HostRows::into_tensor`] gave out back, to fill it again; none where it has another shape or
    /// somebody else still looks at its memory.
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
        (alone != 0).then(|| Self { tensor, row_bytes: width * HALF_BYTES, capacity: rows, filled: 0 })
    }

    /// Rows still to come.
    pub fn missing(&self) -> usize {
        self.capacity - self.filled
    }

    /// The next row.
    ///
    /// # Panics
    /// Where `row` is not one row of bytes, or all rows are there.
    pub fn push(&mut self, row: &[u8]) {
        assert!(row.len() == self.row_bytes && self.filled < self.capacity, "a row of {} bytes", row.len());
        let base = self.tensor.data_ptr().cast::<u8>();
        // SAFETY: the tensor has `capacity` rows of `row_bytes`, and `filled` lies below `capacity`.
        let place = unsafe { base.add(self.filled * self.row_bytes) };
        // SAFETY: `place` has room for one row; nobody else has the tensor, so that the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), place, row.len()) };
        self.filled += 1;
    }

    /// The tensor, once all rows are there.
    ///
    /// # Panics
    /// Where rows are missing: their memory has never been written.
    pub fn into_tensor(self) -> Tensor {
        assert!(self.missing() == 0, "{} rows are missing", self.missing());
        self.tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Tensor {
        let mut rows = HostRows::new(2, 3, false).expect("memory");
        rows.push(&[0, 0x3c, 0, 0x40, 0, 0x42]);
        assert_eq!(rows.missing(), 1);
        rows.push(&[0, 0xbc, 0, 0xc0, 0, 0xc2]);
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
        let place = tensor.data_ptr();
        let again = HostRows::reuse(tensor, 2, 3).expect("nobody else has it");
        assert_eq!(again.tensor.data_ptr(), place);
        assert_eq!(again.missing(), 2);
    }

    #[test]
    #[should_panic(expected = "1 rows are missing")]
    fn memory_that_was_never_written_is_not_handed_out() {
        let mut rows = HostRows::new(2, 1, false).expect("memory");
        rows.push(&[0, 0]);
        let _ = rows.into_tensor();
    }
}
