//! Times libtorch's operators on the CPU, or the work of a GPU, with libtorch's own profiler (Kineto).
//!
//! The profiler makes the profiled work slower. Only one profile can be taken at a time.

use std::ffi::{c_char, c_int, c_void};

use super::error::{NativeError, check};

type AddEvent = extern "C" fn(*mut c_void, *const c_char, usize, u64, u64, u64);

unsafe extern "C" {
    fn locdiff_profiler_start(cuda: c_int) -> c_int;
    fn locdiff_profiler_stop(cuda: c_int, add: AddEvent, context: *mut c_void) -> c_int;
}

/// A call of an operator on the CPU, or a kernel, copy or fill on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfiledCall {
    /// Name of the operator or kernel.
    pub name: String,
    /// Thread that ran the operator.
    pub thread: u64,
    /// Time when the call began, nanoseconds.
    pub start_ns: u64,
    /// Duration, nanoseconds. The duration of an operator includes the operators that it called.
    pub duration_ns: u64,
}

/// Where the profiled work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfiledDevice {
    /// Operators on the CPU.
    Cpu,
    /// Kernels, copies and fills on GPUs.
    Gpu,
}

/// Runs `work` under the profiler. Returns the result of `work` and all calls. `work` must wait for the device before
/// it returns.
pub fn profile<T>(device: ProfiledDevice, work: impl FnOnce() -> T) -> Result<(T, Vec<ProfiledCall>), NativeError> {
    let cuda = c_int::from(device == ProfiledDevice::Gpu);
    // SAFETY: the function takes a number and keeps no reference.
    check("start the profiler", unsafe { locdiff_profiler_start(cuda) })?;
    let result = work();
    let mut calls: Vec<ProfiledCall> = Vec::new();
    // SAFETY: the shim passes `calls` to `add_call`, one call at a time, and only before it returns.
    check("stop the profiler", unsafe { locdiff_profiler_stop(cuda, add_call, (&raw mut calls).cast()) })?;
    Ok((result, calls))
}

extern "C" fn add_call(
    calls: *mut c_void,
    name: *const c_char,
    length: usize,
    thread: u64,
    start_ns: u64,
    duration_ns: u64,
) {
    // SAFETY: the shim passes on the pointer to the vector in `profile`. The vector outlives this call, and nothing
    // else uses the vector during the call.
    let calls = unsafe { &mut *calls.cast::<Vec<ProfiledCall>>() };
    // SAFETY: the shim passes the bytes of a string that lives until this function returns.
    let name = unsafe { std::slice::from_raw_parts(name.cast::<u8>(), length) };
    calls.push(ProfiledCall { name: String::from_utf8_lossy(name).into_owned(), thread, start_ns, duration_ns });
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn profile_lists_the_operators_of_the_work() {
        let factor = Tensor::ones([64, 64], (Kind::Float, Device::Cpu));
        let work = || factor.matmul(&factor).sum(Kind::Float).double_value(&[]);
        for _ in 0..2 {
            let (sum, calls) = profile(ProfiledDevice::Cpu, work).expect("libtorch has a profiler");
            assert_eq!(sum, f64::from(64 * 64 * 64));
            // libtorch's `sum` calls itself with another list of dimensions.
            let was_called = |name: &str| calls.iter().any(|call| call.name == name && call.duration_ns > 0);
            assert!(["aten::matmul", "aten::mm", "aten::sum"].into_iter().all(was_called), "{calls:?}");
        }
    }
}
