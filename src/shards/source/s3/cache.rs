//! A disk cache of fetched bytes, with a size limit.
//!
//! Invariant: [`ObjectCache::read`] returns exactly the bytes that were stored for the same URL, version and range.
//! Every entry has a checksum, seeded with the key of the entry. Every read verifies the checksum, and deletes the
//! entry if it does not match.
//!
//! Invariant: the total size of all entries, including those that are being written, never exceeds the limit. Space for
//! an entry is reserved before the entry is written, under a lock that all processes share.
//!
//! A failure of the cache is never an error for the caller. Bytes that are not in the cache are fetched from the
//! server. If an entry cannot be written, a warning is logged, and this process stores nothing more. There is one
//! exception: if another process has deleted the cache folder, the next write creates the folder again.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use tracing::warn;
use twox_hash::{XxHash3_64, XxHash3_128};

/// Magic number of an entry, with the version of its layout.
const MAGIC: [u8; 8] = *b"LDCACHE1";

/// Size of the magic number and the checksum before the bytes of an entry.
const HEADER_BYTES: u64 = 16;

/// Name of the file that holds the number of bytes in use, as text. A process locks the file to change this number.
const USAGE_NAME: &str = "usage";

/// When the cache is full, old entries are removed until at most this share of the limit is in use. So about a tenth of
/// the cache is freed at once, and not every new entry causes a removal.
const KEPT_SHARE: f64 = 0.9;

/// Minimum time between two updates of an entry's time of last use.
const TOUCH_INTERVAL: Duration = Duration::from_secs(1);

/// Temporary files that are older than this are assumed to be left by a process that died.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Number of temporary files that all caches of this process have made. It keeps their names distinct, even if two
/// caches share a folder.
static TEMPORARY_FILES: AtomicU64 = AtomicU64::new(0);

/// Key of an entry: a hash of URL, version, offset and length.
pub(super) fn key(url: &str, version: &str, offset: u64, bytes: usize) -> u128 {
    XxHash3_128::oneshot(format!("{}:{url}{}:{version}{offset}+{bytes}", url.len(), version.len()).as_bytes())
}

/// A disk cache in a folder.
#[derive(Debug)]
pub(super) struct ObjectCache {
    folder: PathBuf,
    bytes_max: u64,
    /// Whether a write has failed. After a failed write nothing more is stored.
    given_up: AtomicBool,
}

impl ObjectCache {
    /// Makes a cache in a folder. The folder need not exist yet.
    pub(super) fn new(folder: PathBuf, bytes_max: u64) -> Self {
        Self { folder, bytes_max, given_up: AtomicBool::new(false) }
    }

    fn path(&self, hash: u128) -> PathBuf {
        let name = format!("{hash:032x}");
        self.folder.join(&name[..2]).join(&name[2..])
    }

    /// If the cache has an intact entry with this key, fills `into` and returns true.
    pub(super) fn read(&self, hash: u128, into: &mut [u8]) -> bool {
        let path = self.path(hash);
        let Ok(mut file) = File::open(&path) else { return false };
        if read_entry(&mut file, hash, into).is_err() {
            warn!("the cache entry {} is damaged; its bytes are fetched again", path.display());
            if let Ok(bytes) = file.metadata().map(|found| found.len())
                && fs::remove_file(&path).is_ok()
            {
                self.release(bytes);
            }
            return false;
        }
        let now = SystemTime::now();
        let modified = file.metadata().and_then(|found| found.modified());
        if modified.is_ok_and(|modified| now.duration_since(modified).is_ok_and(|age| age > TOUCH_INTERVAL)) {
            // This call may fail, for example on a read-only file system. That is harmless: only the order in which old
            // entries are removed becomes less accurate.
            let _ = file.set_modified(now);
        }
        true
    }

    /// Stores fetched bytes under a key if possible.
    pub(super) fn store(&self, hash: u128, bytes: &[u8]) {
        let entry_bytes = bytes.len() as u64 + HEADER_BYTES;
        if entry_bytes > self.bytes_max || self.given_up.load(Ordering::Relaxed) {
            return;
        }
        match self.write(hash, bytes) {
            Ok(()) => {}
            // Another process deleted the folder during the write. The next write creates it again.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                if !self.given_up.swap(true, Ordering::Relaxed) {
                    let folder = self.folder.display();
                    warn!(
                        "cannot write to the cache {folder}: {error}; from now on this process caches nothing \
                         (see shards.cache_dir and shards.cache_gib)"
                    );
                }
            }
        }
    }

    /// Writes an entry to a temporary file and renames the file, so that readers never see a partial entry.
    fn write(&self, hash: u128, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(hash);
        let number = TEMPORARY_FILES.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(".{}-{number}", std::process::id()));
        let entry_bytes = bytes.len() as u64 + HEADER_BYTES;
        let mut file = self.reserve(&temporary, entry_bytes)?;
        let mut header = [0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(&MAGIC);
        header[8..].copy_from_slice(&checksum(hash, bytes).to_le_bytes());
        let written = file.write_all(&header).and_then(|()| file.write_all(bytes)).and_then(|()| {
            self.update_usage(|used| {
                // Another worker may have stored the same bytes. The rename replaces that entry, so subtract its size.
                let replaced = fs::metadata(&path).map_or(0, |found| found.len());
                fs::rename(&temporary, &path)?;
                self.subtract(used, replaced)
            })
        });
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
            self.release(entry_bytes);
        }
        written
    }

    /// Creates the temporary file with its full size, and adds this size to the number of bytes in use. Removes the
    /// least recently used entries if there is not enough space.
    fn reserve(&self, temporary: &Path, bytes: u64) -> io::Result<File> {
        let mut reserved = None;
        self.update_usage(|used| {
            let used = match used {
                Some(used) => used,
                None => entries(&self.folder)?.0,
            };
            let used = if used + bytes <= self.bytes_max { used } else { self.make_room(bytes)? };
            make_folder(temporary.parent().unwrap_or(&self.folder))?;
            let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(temporary)?;
            file.set_len(bytes)?;
            reserved = Some(file);
            Ok(used + bytes)
        })?;
        reserved.ok_or_else(|| io::Error::other("no space was reserved for the entry"))
    }

    fn release(&self, bytes: u64) {
        // If the update fails, the recorded number of bytes in use is too high until the entries are counted again.
        let _ = self.update_usage(|used| self.subtract(used, bytes));
    }

    fn subtract(&self, used: Option<u64>, bytes: u64) -> io::Result<u64> {
        match used {
            Some(used) => Ok(used.saturating_sub(bytes)),
            None => entries(&self.folder).map(|(used, _)| used),
        }
    }

    /// Removes the least recently used entries until at most [`KEPT_SHARE`] of the limit is in use and there is room
    /// for `bytes` more bytes. Returns the number of bytes still in use.
    fn make_room(&self, bytes: u64) -> io::Result<u64> {
        let (mut used, mut entries) = entries(&self.folder)?;
        let kept = (self.bytes_max as f64 * KEPT_SHARE) as u64;
        let wanted = kept.min(self.bytes_max - bytes);
        entries.sort();
        let now = SystemTime::now();
        for (modified, path, entry_bytes) in entries {
            if used <= wanted {
                break;
            }
            let unfinished = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            let young = now.duration_since(modified).map_or(true, |age| age < ABANDONED_AFTER);
            if unfinished && young {
                continue;
            }
            match fs::remove_file(&path) {
                Ok(()) => used -= entry_bytes,
                Err(error) if error.kind() == ErrorKind::NotFound => used -= entry_bytes,
                Err(error) => return Err(error),
            }
        }
        if used > self.bytes_max - bytes {
            return Err(io::Error::other(format!(
                "the cache is full: unfinished entries use {used} of {} bytes",
                self.bytes_max
            )));
        }
        Ok(used)
    }

    /// Replaces the recorded number of bytes in use by the result of `update`, under a lock shared by all processes.
    /// `update` gets the old number, or `None` if it is unknown.
    fn update_usage(&self, update: impl FnOnce(Option<u64>) -> io::Result<u64>) -> io::Result<()> {
        make_folder(&self.folder)?;
        let path = self.folder.join(USAGE_NAME);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut file = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| io::Error::from(error))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let used = update(text.trim().parse().ok())?;
        file.seek(SeekFrom::Start(0))?;
        // The number is padded with spaces, so that a shorter number overwrites a longer number completely.
        file.write_all(format!("{used:<20}\n").as_bytes())
    }
}

fn checksum(hash: u128, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(hash as u64, bytes)
}

fn read_entry(file: &mut File, hash: u128, into: &mut [u8]) -> io::Result<()> {
    let damaged = || io::Error::from(ErrorKind::InvalidData);
    if file.metadata()?.len() != into.len() as u64 + HEADER_BYTES {
        return Err(damaged());
    }
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact(&mut header)?;
    file.read_exact(into)?;
    if header[..8] != MAGIC || header[8..] != checksum(hash, into).to_le_bytes() {
        return Err(damaged());
    }
    Ok(())
}

/// Time of last use, path and size of an entry.
type CachedObject = (SystemTime, PathBuf, u64);

/// Lists all entries and temporary files, with their total size. Files that vanish during the listing are ignored.
/// Files whose names have a different form do not belong to the cache. They are neither counted nor removed.
fn entries(folder: &Path) -> io::Result<(u64, Vec<CachedObject>)> {
    let mut found = Vec::new();
    for parent in list(folder)?.into_iter().filter(|path| is_entry_name(path, 2, false)) {
        for path in list(&parent)?.into_iter().filter(|path| is_entry_name(path, 30, true)) {
            let Ok(about) = fs::symlink_metadata(&path) else { continue };
            if about.is_file() {
                found.push((about.modified().unwrap_or(SystemTime::UNIX_EPOCH), path, about.len()));
            }
        }
    }
    Ok((found.iter().map(|(_, _, bytes)| bytes).sum(), found))
}

/// Whether a file name consists of the given number of hexadecimal digits. With `or_temporary`, also accepts the names
/// of temporary files: a dot, a process number, a hyphen and another number.
fn is_entry_name(path: &Path, digits: usize, or_temporary: bool) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let unfinished = name.strip_prefix('.').and_then(|name| name.split_once('-'));
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    (name.len() == digits && name.bytes().all(|digit| digit.is_ascii_hexdigit()))
        || (or_temporary && unfinished.is_some_and(|(process, number)| is_number(process) && is_number(number)))
}

fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(found) => Ok(found.filter_map(|entry| Some(entry.ok()?.path())).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Creates a folder that only the user can read, because cached data may be private.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
