//! CUDA devices: their properties, the current device, and the memory that torch's caching allocator holds.

use std::ffi::{CStr, c_char, c_int};

use super::cuda_functions;
use crate::native::error::{NativeError, check};

cuda_functions! {
    fn locdiff_cuda_properties(device: c_int, name: *mut c_char, capacity: usize, memory: *mut u64, out: *mut c_int);
    fn locdiff_cuda_current_device(out: *mut c_int);
    fn locdiff_cuda_set_device(device: c_int);
    fn locdiff_cuda_synchronize();
    fn locdiff_cuda_memory(device: c_int, out: *mut i64);
    fn locdiff_cuda_free_bytes(device: c_int, out: *mut u64);
    fn locdiff_cuda_empty_cache();
}

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Name of the device as the driver reports it.
    pub name: String,
    /// Total memory of the device.
    pub total_bytes: u64,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, such as (9, 0) for Hopper.
    pub capability: (u32, u32),
}

/// Memory that this process holds on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes in live tensors.
    pub allocated_bytes: u64,
    /// Peak of `allocated_bytes`.
    pub allocated_peak_bytes: u64,
    /// Bytes that the allocator has taken from the device, whether they are in live tensors or in its cache.
    pub reserved_bytes: u64,
    /// Peak of `reserved_bytes`.
    pub reserved_peak_bytes: u64,
}

/// Reads the properties of a device.
pub fn properties(device: usize) -> Result<Properties, NativeError> {
    let mut name: [c_char; 256] = [0; 256];
    let mut total_bytes = 0;
    let mut numbers: [c_int; 3] = [0; 3];
    let (name_at, bytes_at, numbers_at) = (name.as_mut_ptr(), &raw mut total_bytes, numbers.as_mut_ptr());
    // SAFETY: the shim writes a NUL-terminated string of at most `name.len()` bytes, one u64 and three integers.
    let status = unsafe { locdiff_cuda_properties(index(device), name_at, name.len(), bytes_at, numbers_at) };
    check("device properties", status)?;
    // SAFETY: the shim succeeded, so the string is NUL-terminated.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let number = |i: usize| u32::try_from(numbers[i]).unwrap_or(0);
    Ok(Properties {
        name: name.to_string_lossy().into_owned(),
        total_bytes,
        multiprocessors: number(0),
        capability: (number(1), number(2)),
    })
}

/// The device on which this thread allocates memory and launches kernels.
pub fn current_device() -> Result<usize, NativeError> {
    let mut device = 0;
    // SAFETY: `device` has room for one integer.
    check("current device", unsafe { locdiff_cuda_current_device(&raw mut device) })?;
    Ok(usize::try_from(device).unwrap_or(0))
}

/// Sets the device on which this thread allocates memory and launches kernels.
pub fn set_device(device: usize) -> Result<(), NativeError> {
    // SAFETY: the function takes only a number, and CUDA checks this number.
    check("set the device", unsafe { locdiff_cuda_set_device(index(device)) })
}

/// Waits until the current device has finished all its work.
pub fn synchronize() -> Result<(), NativeError> {
    // SAFETY: the function takes no arguments.
    check("device synchronisation", unsafe { locdiff_cuda_synchronize() })
}

/// Reads how much memory this process holds on a device.
pub fn memory(device: usize) -> Result<Memory, NativeError> {
    let mut bytes = [0_i64; 4];
    // SAFETY: `bytes` has room for the four numbers that the shim writes.
    check("memory statistics", unsafe { locdiff_cuda_memory(index(device), bytes.as_mut_ptr()) })?;
    let [allocated_bytes, allocated_peak_bytes, reserved_bytes, reserved_peak_bytes] =
        bytes.map(|count| u64::try_from(count).unwrap_or(0));
    Ok(Memory { allocated_bytes, allocated_peak_bytes, reserved_bytes, reserved_peak_bytes })
}

/// Bytes of a device's memory that no process has allocated.
pub fn free_bytes(device: usize) -> Result<u64, NativeError> {
    let mut bytes = 0;
    // SAFETY: `bytes` has room for one number.
    check("free memory", unsafe { locdiff_cuda_free_bytes(index(device), &raw mut bytes) })?;
    Ok(bytes)
}

/// Returns the memory in the allocator's cache to the device.
pub fn empty_cache() -> Result<(), NativeError> {
    // SAFETY: the function takes no arguments.
    check("empty the cache", unsafe { locdiff_cuda_empty_cache() })
}

/// Converts a device index for CUDA. An index that does not fit into a C int becomes the largest C int, which CUDA
/// rejects.
pub(super) fn index(device: usize) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}
