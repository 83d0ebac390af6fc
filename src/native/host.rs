//! Tensors of float16 rows in main memory that are filled in place, so that no further copy is needed.
//!
//! Pinned memory comes from torch's own allocator, which reuses memory only after all copies from it to a GPU are done.

use std::ffi::{c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::error::{NativeError, check, out_tensor};
use super::optim::pointer;
use super::row_pool::{RowPlaces, RowPool};

/// Bytes per float16.
const HALF_BYTES: usize = 2;

unsafe extern "C" {
    fn locdiff_host_rows(rows: i64, width: i64, pinned: c_int, out: *mut *mut c_void) -> c_int;
    fn locdiff_is_alone(tensor: *const c_void, out: *mut c_int) -> c_int;
    fn locdiff_copy_async(to: *mut c_void, from: *const c_void) -> c_int;
}

/// Allocates a pinned tensor of `count` numbers in main memory. The size of the tensor in bytes must be even. The
/// numbers are not initialised. Needs the CUDA variant and a GPU.
pub fn pinned(count: i64, kind: Kind) -> Result<Tensor, NativeError> {
    let bytes = allocate(1, count as usize * kind.elt_size_in_bytes() / HALF_BYTES, true)?;
    Ok(bytes.f_view_dtype(kind)?.f_view([count])?)
}

/// Copies `from` into `to`, which must have the same shape. If one of them is pinned and the other is on a GPU, the
/// host does not wait, and the copy takes place in the order of the current stream.
pub fn copy_async(to: &mut Tensor, from: &Tensor) -> Result<(), NativeError> {
    // SAFETY: both tensors are alive.
    let status = unsafe { locdiff_copy_async(pointer(to), pointer(from)) };
    check("asynchronous copy", status)
}

/// A `[rows, width]` float16 tensor that is filled row by row through [`RowPlaces`]. Each row is assigned once, and
/// nothing else can access the tensor before all rows are finished. [`super::row_pool`] enforces this.
pub struct HostRows {
    rows: RowPool<Tensor>,
}

impl HostRows {
    /// Allocates the tensor without initialising it. If `pinned` is true, this needs the CUDA variant and a GPU.
    pub fn new(rows: usize, width: usize, pinned: bool) -> Result<Self, NativeError> {
        let tensor = allocate(rows, width, pinned)?;
        // SAFETY: `allocate` made a new contiguous float16 tensor of this size in main memory; no other tensor refers
        // to it.
        Ok(unsafe { Self::from_tensor(tensor, rows, width) })
    }

    /// Takes back a tensor from [`HostRows::into_tensor`] to fill it again. Returns `None` if the tensor is not a
    /// contiguous float16 tensor `[rows, width]` in main memory, if another tensor still refers to its memory, or if
    /// its memory is pinned. A copy to a GPU may still be reading pinned memory. Dropping the tensor gives this memory
    /// back to torch's allocator, which reuses it only when the copy is done.
    pub fn reuse(tensor: Tensor, rows: usize, width: usize) -> Option<Self> {
        let shape = [i64::try_from(rows).ok()?, i64::try_from(width).ok()?];
        let fits = tensor.device() == Device::Cpu && tensor.kind() == Kind::Half && tensor.is_contiguous();
        if !fits || tensor.size() != shape {
            return None;
        }
        let mut alone = 0;
        // SAFETY: the tensor is alive, and `alone` has room for one integer.
        let status = unsafe { locdiff_is_alone(tensor.as_ptr().cast(), &raw mut alone) };
        check("count the owners of a tensor", status).ok()?;
        // SAFETY: this function has checked that the tensor is contiguous, float16, of this size and in main memory,
        // and that no other tensor refers to its memory.
        (alone != 0).then(|| unsafe { Self::from_tensor(tensor, rows, width) })
    }

    /// # Safety
    /// `tensor` must be a contiguous float16 tensor of shape `[rows, width]` in main memory, and no other tensor may
    /// refer to its memory.
    unsafe fn from_tensor(tensor: Tensor, rows: usize, width: usize) -> Self {
        let base = tensor.data_ptr().cast();
        // SAFETY: `base` points to the tensor's storage, which stays in place when the handle moves. The caller
        // guarantees the size of the storage, and that no other tensor refers to it.
        Self { rows: unsafe { RowPool::new(tensor, base, rows, width * HALF_BYTES) } }
    }

    /// Number of rows that are not assigned yet.
    pub fn unassigned(&self) -> usize {
        self.rows.unassigned()
    }

    /// Makes the next row of this tensor the destination of row `row` of the block that `places` describes.
    ///
    /// # Panics
    /// - If all rows of this tensor are already assigned.
    /// - If the block has no row `row`.
    /// - If rows of the block are already written.
    /// - If the rows of the tensor and of the block have different widths.
    pub fn assign(&mut self, places: &mut RowPlaces, row: usize) {
        self.rows.assign(places, row);
    }

    /// Returns the tensor once all rows are finished.
    ///
    /// # Panics
    /// If any row is not finished, because the memory of that row may be uninitialised or hold bad data.
    pub fn into_tensor(self) -> Tensor {
        self.rows.into_owner()
    }
}

/// Allocates an uninitialised `[rows, width]` float16 tensor in main memory.
fn allocate(rows: usize, width: usize, pinned: bool) -> Result<Tensor, NativeError> {
    const OPERATION: &str = "allocate memory for rows";
    let size = |count: usize| {
        i64::try_from(count).map_err(|error| NativeError { operation: OPERATION, text: error.to_string() })
    };
    let (rows, width) = (size(rows)?, size(width)?);
    // SAFETY: the other arguments are plain numbers, and `out` has room for one pointer.
    let call = |out| unsafe { locdiff_host_rows(rows, width, c_int::from(pinned), out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor(OPERATION, call) }
}

/// Allocates `count` uninitialised bytes of pinned memory. An odd `count` is rounded down to an even number. Needs the
/// CUDA variant and a GPU. tch's `pin_memory` is not used, because it requires a device argument that libtorch reports
/// as deprecated.
pub fn pinned_bytes(count: usize) -> Result<Tensor, NativeError> {
    Ok(allocate(1, count / HALF_BYTES, true)?.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor of two rows with three numbers each. Its first row is assigned to row 1 of a block, and its second row
    /// to row 0.
    fn assigned() -> (HostRows, RowPlaces) {
        let mut rows = HostRows::new(2, 3, false).expect("the rows fit into memory");
        let mut places = RowPlaces::new(2, 6);
        assert_eq!(rows.unassigned(), 2);
        rows.assign(&mut places, 1);
        rows.assign(&mut places, 0);
        assert_eq!(rows.unassigned(), 0);
        (rows, places)
    }

    fn filled() -> Tensor {
        let (rows, mut places) = assigned();
        places.write(&[0, 0xbc, 0, 0xc0, 0, 0xc2, 0, 0x3c, 0, 0x40, 0, 0x42]);
        places.finish();
        rows.into_tensor()
    }

    #[test]
    fn rows_become_a_tensor_and_shared_memory_is_not_reused() {
        let numbers =
            Vec::<f32>::try_from(filled().to_kind(Kind::Float).view(-1)).expect("the tensor holds six numbers");
        assert_eq!(numbers, [1.0, 2.0, 3.0, -1.0, -2.0, -3.0]);
        let tensor = filled();
        let view = tensor.narrow(0, 0, 1);
        assert!(HostRows::reuse(tensor, 2, 3).is_none(), "memory was reused although a view refers to it");
        drop(view);
        let tensor = filled();
        let other = tensor.shallow_clone();
        assert!(HostRows::reuse(tensor, 2, 3).is_none(), "memory was reused although a second handle refers to it");
        assert!(HostRows::reuse(other, 3, 2).is_none(), "memory was reused for another shape");
        let tensor = filled();
        let again = HostRows::reuse(tensor, 2, 3).expect("no other tensor refers to the memory");
        assert_eq!(again.unassigned(), 2);
    }

    #[test]
    #[should_panic(expected = "2 rows are not finished")]
    fn tensor_with_unfinished_rows_is_not_released() {
        let (rows, mut places) = assigned();
        places.write(&[0; 12]);
        drop(places);
        let _ = rows.into_tensor();
    }
}
