//! c10d's key-value store, through which the ranks find each other.
//!
//! The server takes a socket that is already bound and listening. If c10d opened the socket, the socket would listen on
//! all interfaces, and another process could take the chosen port first. The store has no access control: any process
//! that can connect to the socket can read and change the store.

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::IntoRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use crate::native::error::{NativeError, check, out_pointer};

unsafe extern "C" {
    fn locdiff_store_serve(
        fd: c_int,
        host: *const c_char,
        host_length: usize,
        port: u16,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_store_join(
        host: *const c_char,
        host_length: usize,
        port: u16,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_store_prefix(
        store: *mut c_void,
        prefix: *const c_char,
        prefix_length: usize,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_store_set(
        store: *mut c_void,
        key: *const c_char,
        key_length: usize,
        value: *const u8,
        value_length: usize,
    ) -> c_int;
    fn locdiff_store_get(
        store: *mut c_void,
        key: *const c_char,
        key_length: usize,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_bytes_length(bytes: *const c_void) -> usize;
    fn locdiff_bytes_data(bytes: *const c_void) -> *const u8;
    fn locdiff_bytes_free(bytes: *mut c_void);
    fn locdiff_store_contains(store: *mut c_void, key: *const c_char, key_length: usize, out: *mut c_int) -> c_int;
    fn locdiff_store_add(
        store: *mut c_void,
        key: *const c_char,
        key_length: usize,
        amount: i64,
        out: *mut i64,
    ) -> c_int;
    fn locdiff_store_free(store: *mut c_void);
}

/// A client of the key-value store, and on the serving rank also its server.
///
/// Calls from several threads run one at a time, so a call that waits also blocks the calls of other threads.
#[derive(Debug)]
pub struct Store {
    raw: NonNull<c_void>,
}

// SAFETY: TCPStore and PrefixStore guard their connection with a mutex, and reference counts are atomic.
unsafe impl Send for Store {}
// SAFETY: several threads may call the methods at once, because a mutex guards the connection.
unsafe impl Sync for Store {}

impl Store {
    /// Serves the store on `listener`, which must be bound and listening, and connects to it as a client.
    ///
    /// `timeout` limits the connection attempt. It is also the default for waits that have no timeout of their own,
    /// such as those inside c10d.
    pub fn serve(listener: TcpListener, timeout: Duration) -> Result<Self, NativeError> {
        const OPERATION: &str = "serve the store";
        let address = listener.local_addr().map_err(|error| NativeError {
            operation: OPERATION,
            text: format!("the listener has no address: {error}"),
        })?;
        let host = match address.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        }
        .to_string();
        let (fd, host_at, timeout_ms) = (listener.into_raw_fd(), host.as_ptr().cast(), millis(timeout));
        let raw = out_pointer(OPERATION, |out| {
            // SAFETY: `host_at` is valid for `host.len()` bytes; the shim takes over the descriptor, which nothing else
            // owns; `out` has room for one pointer.
            unsafe { locdiff_store_serve(fd, host_at, host.len(), address.port(), timeout_ms, out) }
        })?;
        Ok(Self { raw })
    }

    /// Connects to the server at `host` and `port`, and retries until `timeout`. `timeout` is also the default for
    /// waits that have no timeout of their own, such as those inside c10d.
    pub fn join(host: &str, port: u16, timeout: Duration) -> Result<Self, NativeError> {
        let raw = out_pointer("join the store", |out| {
            // SAFETY: the string `host` is valid for its length, and `out` has room for one pointer.
            unsafe { locdiff_store_join(host.as_ptr().cast(), host.len(), port, millis(timeout), out) }
        })?;
        Ok(Self { raw })
    }

    /// The same store, with `prefix` in front of every key. Keys with another prefix are not visible.
    pub fn with_prefix(&self, prefix: &str) -> Result<Self, NativeError> {
        let raw = out_pointer("prefix the store", |out| {
            // SAFETY: the store is alive, the prefix is valid for its length, and `out` has room for one pointer.
            unsafe { locdiff_store_prefix(self.raw.as_ptr(), prefix.as_ptr().cast(), prefix.len(), out) }
        })?;
        Ok(Self { raw })
    }

    /// Stores a value under `key`. If the key already has a value, that value is replaced.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), NativeError> {
        // SAFETY: the store is alive; key and value are valid for their lengths, and the shim copies them.
        let status = unsafe {
            locdiff_store_set(self.raw.as_ptr(), key.as_ptr().cast(), key.len(), value.as_ptr(), value.len())
        };
        check("set a key in the store", status)
    }

    /// Waits at most `timeout` until some rank has set `key`, and returns the value.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, NativeError> {
        let bytes = out_pointer("get a key from the store", |out| {
            // SAFETY: the store is alive; the key is valid for its length.
            unsafe { locdiff_store_get(self.raw.as_ptr(), key.as_ptr().cast(), key.len(), millis(timeout), out) }
        })?
        .as_ptr();
        // SAFETY: `locdiff_store_get` succeeded, so `bytes` is a vector that it handed over.
        let length = unsafe { locdiff_bytes_length(bytes) };
        // SAFETY: `bytes` is a live vector.
        let data = unsafe { locdiff_bytes_data(bytes) };
        let value = if length == 0 {
            Vec::new()
        } else {
            // SAFETY: a vector that is not empty has `length` bytes at `data`, and nothing else has access to it.
            unsafe { std::slice::from_raw_parts(data, length) }.to_vec()
        };
        // SAFETY: `locdiff_store_get` handed over the vector, and nothing else frees or uses it.
        unsafe { locdiff_bytes_free(bytes) };
        Ok(value)
    }

    /// Whether some rank has set `key`. Does not wait.
    pub fn contains(&self, key: &str) -> Result<bool, NativeError> {
        let mut found = 0;
        // SAFETY: the store is alive; the key is valid for its length; `found` is written on success.
        let status =
            unsafe { locdiff_store_contains(self.raw.as_ptr(), key.as_ptr().cast(), key.len(), &raw mut found) };
        check("look up a key in the store", status)?;
        Ok(found != 0)
    }

    /// Adds `amount` to the counter `key`, which starts at 0, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, NativeError> {
        let mut sum = 0;
        // SAFETY: the store is alive; the key is valid for its length; `sum` is written on success.
        let status =
            unsafe { locdiff_store_add(self.raw.as_ptr(), key.as_ptr().cast(), key.len(), amount, &raw mut sum) };
        check("add to a counter in the store", status)?;
        Ok(sum)
    }

    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which is not used afterwards.
        unsafe { locdiff_store_free(self.raw.as_ptr()) };
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

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn serve() -> (Store, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let port = listener.local_addr().expect("the listener is bound").port();
        (Store::serve(listener, TIMEOUT).expect("the listener is bound"), port)
    }

    #[test]
    fn clients_share_values_only_under_the_same_prefix() {
        let (server, port) = serve();
        let client = Store::join("127.0.0.1", port, TIMEOUT).expect("the server listens");
        let first = server.with_prefix("attempt-1").expect("any prefix is valid");
        let second = client.with_prefix("attempt-2").expect("any prefix is valid");
        first.set("key", b"one\0two").expect("the server runs");
        assert!(!second.contains("key").expect("the server runs"));
        let same = client.with_prefix("attempt-1").expect("any prefix is valid");
        assert_eq!(same.get("key", TIMEOUT).expect("the server has stored the key"), b"one\0two");
        assert_eq!(first.add("count", 2).expect("the server runs"), 2);
        assert_eq!(same.add("count", 3).expect("the server runs"), 5);
    }

    #[test]
    fn waiting_for_a_key_ends_at_its_timeout() {
        let (server, _) = serve();
        let error = server.get("never", Duration::from_millis(50)).expect_err("no rank sets this key");
        assert_eq!(error.operation, "get a key from the store");
        assert!(error.text.contains("timeout"), "{}", error.text);
    }

    #[test]
    fn timeouts_are_never_zero_nor_too_large() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::MAX), MILLIS_MAX);
        assert_eq!(millis(Duration::from_secs(2)), 2000);
    }
}
