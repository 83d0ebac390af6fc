//! Custom CUDA kernels. Their CUDA C source is compiled at run time for the current device, and they are launched on
//! torch's current stream.
//!
//! Compiled modules are kept until the process ends. Compile kernels before a graph capture begins, because CUDA does
//! not allow code to be loaded during a capture. `docs/decisions/0005-nvrtc-without-a-crate.md` explains why this
//! module is not replaced by a crate.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use super::cuda::{cuda_functions, current_device};
use super::error::{NativeError, check};
use super::optim::pointer;

cuda_functions! {
    fn locdiff_cuda_module_compile(
        name: *const c_char,
        source: *const c_char,
        options: *const *const c_char,
        count: usize,
        out: *mut *mut c_void,
    );
    fn locdiff_cuda_module_kernel(
        module: *mut c_void,
        name: *const c_char,
        out: *mut *mut c_void,
        sizes: *mut usize,
        capacity: usize,
        parameters: *mut usize,
    );
    fn locdiff_cuda_kernel_launch(
        kernel: *mut c_void,
        grid: *const c_uint,
        block: *const c_uint,
        shared_bytes: c_uint,
        arguments: *mut *mut c_void,
    );
    fn locdiff_cuda_tensor_address(tensor: *const c_void, contiguous: c_int, out: *mut *mut c_void);
}

/// Limit on the number of parameters of a kernel. Every kernel of this project has fewer.
const PARAMETERS_MAX: usize = 32;

/// A module of compiled code. Modules are never unloaded.
#[derive(Debug, Clone, Copy)]
struct Module(*mut c_void);

// SAFETY: a loaded module is read-only, and CUDA's calls on it are thread-safe.
unsafe impl Send for Module {}

type ModuleKey = (usize, String, Vec<String>);
static MODULES: Mutex<Option<HashMap<ModuleKey, Module>>> = Mutex::new(None);

/// One argument of a kernel. A launch checks that the argument has the size of the kernel's parameter, but cannot check
/// its type.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// The address of a contiguous tensor on the current device.
    Tensor(&'a Tensor),
    /// The address of the first element of a tensor on the current device. The tensor need not be contiguous: the
    /// kernel knows the strides of the tensor.
    Strided(&'a Tensor),
    /// A null pointer.
    Null,
    /// `int`
    I32(i32),
    /// `unsigned int`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`
    U64(u64),
    /// `float`
    F32(f32),
}

impl Arg<'_> {
    /// Returns a `u64` whose first bytes in memory are those of the argument, and the number of these bytes.
    fn encode(&self) -> Result<(u64, usize), NativeError> {
        let low = |bytes: [u8; 4]| u64::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3], 0, 0, 0, 0]);
        Ok(match self {
            Self::Tensor(tensor) => (address(tensor, true)? as u64, 8),
            Self::Strided(tensor) => (address(tensor, false)? as u64, 8),
            Self::Null => (0, 8),
            Self::I32(value) => (low(value.to_ne_bytes()), 4),
            Self::U32(value) => (low(value.to_ne_bytes()), 4),
            Self::I64(value) => (u64::from_ne_bytes(value.to_ne_bytes()), 8),
            Self::U64(value) => (*value, 8),
            Self::F32(value) => (low(value.to_ne_bytes()), 4),
        })
    }
}

fn address(tensor: &Tensor, contiguous: bool) -> Result<usize, NativeError> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the tensor is live, and `out` has room for one pointer.
    let status = unsafe { locdiff_cuda_tensor_address(pointer(tensor), c_int::from(contiguous), &raw mut out) };
    check("kernel argument", status)?;
    Ok(out.addr())
}

/// A `__global__` function with C linkage.
///
/// Nothing checks the memory accesses of a kernel. The source of each kernel is part of this program, and a kernel must
/// only access the tensors that it receives.
#[derive(Debug, Clone)]
pub struct Kernel {
    name: String,
    entry: *mut c_void,
    parameter_bytes: Vec<usize>,
}

// SAFETY: the entry is a handle into a module that is never unloaded, and CUDA's calls on it are thread-safe.
unsafe impl Send for Kernel {}
// SAFETY: a launch does not change the kernel, and CUDA lets several threads launch it at once.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Compiles `source` for the current device with the NVRTC options `options`, and returns the function `name` of
    /// `source`.
    ///
    /// Each combination of source and options is compiled only once per process and device. If compilation fails, the
    /// error contains the compiler's log.
    pub fn compile(name: &str, source: &str, options: &[&str]) -> Result<Self, NativeError> {
        let module = module(name, source, options)?;
        let c_name = c_string(name)?;
        let mut entry = std::ptr::null_mut();
        let mut sizes = [0; PARAMETERS_MAX];
        let mut count = 0;
        let (sizes_at, count_at) = (sizes.as_mut_ptr(), &raw mut count);
        // SAFETY: the module is live, the name is NUL-terminated, `entry` and `count` have room for one value each, and
        // at most `PARAMETERS_MAX` sizes are written.
        let status = unsafe {
            locdiff_cuda_module_kernel(module.0, c_name.as_ptr(), &raw mut entry, sizes_at, PARAMETERS_MAX, count_at)
        };
        check("kernel lookup", status)?;
        Ok(Self { name: name.to_owned(), entry, parameter_bytes: sizes[..count].to_vec() })
    }

    /// Launches the kernel on the current stream with at least `threads` threads, in blocks of 256. The host does not
    /// wait.
    pub fn launch_threads(&self, threads: u64, arguments: &[Arg<'_>]) -> Result<(), NativeError> {
        let blocks = i32::try_from(threads.div_ceil(256)).map_err(|_| NativeError {
            operation: "kernel launch",
            text: format!("`{}` needs {threads} threads, more than a grid can have", self.name),
        })?;
        self.launch([blocks.cast_unsigned(), 1, 1], [256, 1, 1], arguments)
    }

    /// Launches the kernel on the current stream. The host does not wait.
    pub fn launch(&self, grid: [u32; 3], block: [u32; 3], arguments: &[Arg<'_>]) -> Result<(), NativeError> {
        let encoded = arguments.iter().map(Arg::encode).collect::<Result<Vec<_>, _>>()?;
        let bytes: Vec<usize> = encoded.iter().map(|(_, bytes)| *bytes).collect();
        if bytes != self.parameter_bytes {
            let text = format!("`{}` takes arguments of {:?} bytes, got {bytes:?}", self.name, self.parameter_bytes);
            return Err(NativeError { operation: "kernel launch", text });
        }
        let mut cells: Vec<u64> = encoded.iter().map(|(cell, _)| *cell).collect();
        let mut addresses: Vec<*mut c_void> = cells.iter_mut().map(|cell| std::ptr::from_mut(cell).cast()).collect();
        // SAFETY: `addresses` holds one pointer per parameter. Each points to a cell that outlives the call and is at
        // least as large as the parameter. The call copies the arguments. `grid` and `block` hold three numbers each.
        let status =
            unsafe { locdiff_cuda_kernel_launch(self.entry, grid.as_ptr(), block.as_ptr(), 0, addresses.as_mut_ptr()) };
        check("kernel launch", status)
    }
}

fn module(name: &str, source: &str, options: &[&str]) -> Result<Module, NativeError> {
    let device = current_device()?;
    let key = (device, source.to_owned(), options.iter().map(|option| (*option).to_owned()).collect());
    // The map is consistent even if a thread panicked while it held the lock, because the only change ever made is to
    // insert a whole entry.
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let modules = modules.get_or_insert_default();
    if let Some(module) = modules.get(&key) {
        return Ok(*module);
    }
    let (c_name, c_source) = (c_string(&format!("{name}.cu"))?, c_string(source)?);
    let c_options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
    let option_list: Vec<*const c_char> = c_options.iter().map(|option| option.as_ptr()).collect();
    let mut out = std::ptr::null_mut();
    let (name_at, source_at) = (c_name.as_ptr(), c_source.as_ptr());
    // SAFETY: every string is NUL-terminated and outlives the call, and `out` has room for one pointer.
    let status = unsafe {
        locdiff_cuda_module_compile(name_at, source_at, option_list.as_ptr(), option_list.len(), &raw mut out)
    };
    check("kernel compilation", status)?;
    modules.insert(key, Module(out));
    Ok(Module(out))
}

fn c_string(text: &str) -> Result<CString, NativeError> {
    CString::new(text).map_err(|error| NativeError {
        operation: "kernel compilation",
        text: format!("cannot pass a string to NVRTC: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_encoded_in_the_layout_of_the_device() {
        let encode = |arg: Arg<'_>| arg.encode().expect("only a tensor can be an invalid argument");
        assert_eq!(encode(Arg::I32(-1)), (0xffff_ffff, 4));
        assert_eq!(encode(Arg::U32(7)), (7, 4));
        assert_eq!(encode(Arg::I64(-1)), (u64::MAX, 8));
        assert_eq!(encode(Arg::Null), (0, 8));
        assert_eq!(encode(Arg::F32(1.0)), (0x3f80_0000, 4));
        let on_cpu = Tensor::from_slice(&[1.0_f32]);
        assert!(Arg::Tensor(&on_cpu).encode().is_err());
    }
}
