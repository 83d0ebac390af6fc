//! CUDA features that tch does not offer: devices, streams, events, graphs and memory.
//!
//! All functions of this module also exist in the CPU variant, where each call fails with the error "this build has no
//! CUDA". If the CUDA variant runs on a machine without a GPU, the calls return CUDA's own error.

mod device;
mod event;
mod graph;
mod readback;
mod stream;

pub use device::{
    Memory, Properties, current_device, empty_cache, free_bytes, memory, properties, set_device, synchronize,
};
pub use event::{CudaEvent, WaitError};
pub use graph::{Graph, GraphError};
pub use readback::Readback;
pub use stream::{CudaStream, Priority, with_stream};

/// Declares functions of the CUDA part of the shim. In the CPU variant, each function fails with the error of
/// `no_cuda`.
macro_rules! cuda_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        #[cfg(locdiff_cuda)]
        unsafe extern "C" {
            $(fn $name($($argument: $type),*) -> std::ffi::c_int;)*
        }
        $(
            #[cfg(not(locdiff_cuda))]
            unsafe fn $name($(_: $type),*) -> std::ffi::c_int {
                $crate::native::cuda::no_cuda()
            }
        )*
    };
}
pub(super) use cuda_functions;

/// Stores the error "this build has no CUDA" and returns the status of a failed call. Every CUDA function of the CPU
/// variant calls this function.
#[cfg(not(locdiff_cuda))]
pub(super) fn no_cuda() -> std::ffi::c_int {
    unsafe extern "C" {
        fn locdiff_no_cuda() -> std::ffi::c_int;
    }
    // SAFETY: the function takes no arguments and writes only the error text of this thread.
    unsafe { locdiff_no_cuda() }
}
