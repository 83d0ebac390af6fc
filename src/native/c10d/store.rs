//! c10d's key-value store, through which the ranks of a group exchange their addresses. The keys are held elsewhere
//! ([`Keys`]): in this project by the launcher, which the worker asks over its control socket. c10d's own store would
//! listen on a port to which any process could connect.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::native::error::{NativeError, out_pointer};

/// A set of keys that all ranks share. The methods may be called by several threads at once, and a call that waits must
/// not block the others. The errors are texts.
pub trait Keys: Send + Sync {
    /// Gives `key` the value `value`. An earlier value is replaced.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String>;
    /// Waits at most `timeout` until `key` has a value, and returns the value.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String>;
    /// Adds `amount` to the counter `key`, which starts at 0, and returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64, String>;
    /// Whether `key` has a value. Does not wait.
    fn contains(&self, key: &str) -> Result<bool, String>;
    /// Removes `key`, and returns whether it had a value.
    fn remove(&self, key: &str) -> Result<bool, String>;
}

type Call = extern "C" fn(*const c_void, c_int, *const c_char, usize, *mut c_void, *mut i64) -> c_int;
type Release = extern "C" fn(*const c_void);

unsafe extern "C" {
    fn locdiff_store_new(
        keys: *const c_void,
        call: Call,
        release: Release,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_store_free(store: *mut c_void);
    fn locdiff_bytes_length(bytes: *const c_void) -> usize;
    fn locdiff_bytes_data(bytes: *const c_void) -> *const u8;
    fn locdiff_bytes_assign(bytes: *mut c_void, data: *const u8, length: usize);
}

// The operations have the same numbers in c10d_store.cpp.
const SET: c_int = 0;
const GET: c_int = 1;
const ADD: c_int = 2;
const CONTAINS: c_int = 3;
const REMOVE: c_int = 4;

/// A store of c10d that uses a prefix in front of every key.
#[derive(Debug)]
pub struct Store {
    raw: NonNull<c_void>,
}

/// The keys of a [`Store`].
struct Prefixed {
    keys: Arc<dyn Keys>,
    prefix: String,
}

impl Store {
    /// Makes a store of `keys`. `timeout` is the default for waits that have no timeout of their own, such as those
    /// inside c10d.
    pub fn new(keys: Arc<dyn Keys>, prefix: &str, timeout: Duration) -> Result<Self, NativeError> {
        let keys = Box::into_raw(Box::new(Prefixed { keys, prefix: format!("{prefix}/") }));
        let raw = out_pointer("make a store", |out| {
            // SAFETY: the shim passes `keys` to `call`, and once to `release` at the end; `out` has room for one pointer.
            unsafe { locdiff_store_new(keys.cast(), call, release, millis(timeout), out) }
        })?;
        Ok(Self { raw })
    }

    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which is not used afterwards. Groups that use the store own it too.
        unsafe { locdiff_store_free(self.raw.as_ptr()) };
    }
}

/// Carries out an operation of the C++ store. Writes the value, or the text of an error, to `bytes`.
extern "C" fn call(
    keys: *const c_void,
    operation: c_int,
    key: *const c_char,
    length: usize,
    bytes: *mut c_void,
    number: *mut i64,
) -> c_int {
    // SAFETY: the C++ store passes the pointer of `Store::new`, and releases it after its last call.
    let keys = unsafe { &*keys.cast::<Prefixed>() };
    // SAFETY: the key is valid for its length during this call.
    let key = unsafe { slice(key.cast(), length) };
    // SAFETY: `number` points to a number that belongs to this call.
    let number = unsafe { &mut *number };
    // SAFETY: `bytes` is a vector that belongs to this call.
    let size = unsafe { locdiff_bytes_length(bytes) };
    // SAFETY: `bytes` is a vector that belongs to this call.
    let data = unsafe { locdiff_bytes_data(bytes) };
    // SAFETY: the vector has `size` bytes at `data`, and does not change until the next assignment.
    let value = unsafe { slice(data, size) };
    let (status, found) = match keys.operate(operation, key, value, number) {
        Ok(found) => (0, found),
        Err(text) => (1, Some(text.into_bytes())),
    };
    if let Some(found) = found {
        // SAFETY: `bytes` is a vector that belongs to this call, and `value` is not used any more.
        unsafe { locdiff_bytes_assign(bytes, found.as_ptr(), found.len()) };
    }
    status
}

extern "C" fn release(keys: *const c_void) {
    // SAFETY: the C++ store calls this function once, with the pointer of `Store::new`.
    drop(unsafe { Box::from_raw(keys.cast_mut().cast::<Prefixed>()) });
}

/// The bytes at `data`, which may be null if there are none.
///
/// # Safety
/// Unless `length` is 0, `data` must be valid for `length` bytes for as long as the result is used.
unsafe fn slice<'a>(data: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees that the bytes are valid.
    unsafe { std::slice::from_raw_parts(data, length) }
}

impl Prefixed {
    /// Returns the value of the key if the operation is [`GET`], and changes `number` as c10d_store.cpp says.
    fn operate(&self, operation: c_int, key: &[u8], value: &[u8], number: &mut i64) -> Result<Option<Vec<u8>>, String> {
        let key = str::from_utf8(key).map_err(|error| format!("a key is not UTF-8: {error}"))?;
        let key = format!("{}{key}", self.prefix);
        match operation {
            SET => self.keys.set(&key, value)?,
            GET => {
                let timeout = Duration::from_millis(u64::try_from(*number).unwrap_or(1));
                return self.keys.get(&key, timeout).map(Some);
            }
            ADD => *number = self.keys.add(&key, *number)?,
            CONTAINS => *number = self.keys.contains(&key)?.into(),
            REMOVE => *number = self.keys.remove(&key)?.into(),
            unknown => return Err(format!("unknown operation {unknown}")),
        }
        Ok(None)
    }
}

/// The timeout in whole milliseconds. At least 1, because c10d interprets 0 as "no timeout".
pub(in crate::native) fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX / 2).clamp(1, MILLIS_MAX)
}

/// A hundred years. c10d counts deadlines in nanoseconds, which would overflow with longer timeouts.
const MILLIS_MAX: i64 = 100 * 365 * 24 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_never_zero_nor_too_large() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::MAX), MILLIS_MAX);
        assert_eq!(millis(Duration::from_secs(2)), 2000);
    }
}
