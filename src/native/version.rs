//! The versions of libtorch, CUDA and NCCL that this process has loaded.
//!
//! These versions are read from the loaded libraries. So if a library was replaced after the build, the change is
//! noticed. Only [`Versions::libtorch_built`] comes from the build.

use std::ffi::{CStr, c_char, c_int};

use super::error::{NativeError, check};

unsafe extern "C" {
    fn locdiff_show_config(out: *mut c_char, capacity: usize) -> c_int;
    fn locdiff_built_against() -> *const c_char;
    fn locdiff_cuda_version() -> c_int;
    fn locdiff_nccl_version() -> u64;
}

/// Versions of the native libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions {
    /// Version of the libtorch headers that the shim was compiled with.
    pub libtorch_built: String,
    /// Version of the loaded libtorch.
    pub libtorch_loaded: String,
    /// Version of the CUDA runtime. `None` in the CPU variant, or if the runtime does not report its version.
    pub cuda: Option<String>,
    /// Version of NCCL. `None` in the CPU variant, or if NCCL does not report its version.
    pub nccl: Option<String>,
}

/// Reads the versions of the native libraries.
pub fn versions() -> Result<Versions, NativeError> {
    // SAFETY: the function takes no arguments and returns a string literal.
    let built = unsafe { locdiff_built_against() };
    // SAFETY: a string literal is NUL-terminated and lives as long as the process.
    let built = unsafe { CStr::from_ptr(built) };
    // SAFETY: the function takes no arguments and touches no shared state.
    let cuda = unsafe { locdiff_cuda_version() };
    // SAFETY: the function takes no arguments and touches no shared state.
    let nccl = unsafe { locdiff_nccl_version() };
    Ok(Versions {
        libtorch_built: built.to_string_lossy().into_owned(),
        libtorch_loaded: version_in(&show_config()?).unwrap_or_else(|| "unknown".to_owned()),
        cuda: (cuda > 0).then(|| format!("{}.{}", cuda / 1000, cuda % 1000 / 10)),
        nccl: (nccl > 0).then(|| format!("{}.{}.{}", nccl >> 32, nccl >> 16 & 0xffff, nccl & 0xffff)),
    })
}

fn show_config() -> Result<String, NativeError> {
    let mut text = vec![0_u8; 16 * 1024];
    // SAFETY: the shim writes at most `text.len()` bytes, including the terminator, into a buffer of that length.
    let status = unsafe { locdiff_show_config(text.as_mut_ptr().cast(), text.len()) };
    check("read libtorch's configuration", status)?;
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.truncate(end);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The value of `TORCH_VERSION=` in libtorch's description of its build.
fn version_in(config: &str) -> Option<String> {
    let start = config.find("TORCH_VERSION=")? + "TORCH_VERSION=".len();
    config[start..].split([',', ' ', '\n']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaded_libtorch_is_the_one_compiled_against() {
        let found = versions().expect("libtorch reports its version");
        assert_eq!(found.libtorch_loaded, found.libtorch_built);
        assert_eq!(found.libtorch_built, "2.11.0");
        assert_eq!(found.cuda.is_some(), cfg!(locdiff_cuda));
    }

    #[test]
    fn version_is_found_among_build_settings() {
        assert_eq!(version_in("Build settings: A=1, TORCH_VERSION=2.10.1, USE_CUDA=0"), Some("2.10.1".to_owned()));
        assert_eq!(version_in("nothing"), None);
    }
}
