//! Bytes of objects that were fetched, on disk, up to a bound.
//!
//! Invariant: what [`Cache::read`] hands out are the bytes that were stored under the same URL, version and range: the checksum,
//! which is seeded with the key, is checked on every read, and an entry that fails is dropped. Entries and those that are being
//! written never sum to more than the bound: room is reserved first, under a lock that all processes on the folder share.
//!
//! The cache is never a reason to fail: what cannot be kept is fetched again, and why is said once.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use tracing::warn;
use twox_hash::{XxHash3_64, XxHash3_128};

/// First bytes of an entry: what it is, and the version of its layout.
const MAGIC: [u8; 8] = *b"LDCACHE1";

/// Magic number and xxh3.
const HEADER_BYTES: u64 = 16;

/// File that is locked while room is reserved; it holds the bytes that are in use, as text.
const USAGE_NAME: &str = "usage";

/// Share of the bound that is left in use after old entries were removed, so that not every entry removes one.
const KEPT_SHARE: f64 = 0.9;

/// A hit makes an entry young again at most this often.
const TOUCH_INTERVAL: Duration = Duration::from_secs(1);

/// What is older and was never renamed was left by a process that died.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Stands for what an entry holds: so many bytes from an offset of a version of the object at a URL.
pub(super) fn key(url: &str, version: &str, offset: u64, bytes: usize) -> u128 {
    XxHash3_128::oneshot(format!("{}:{url}{}:{version}{offset}+{bytes}", url.len(), version.len()).as_bytes())
}

/// A folder of entries.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    bytes_max: u64,
    /// Numbers the files that are being written.
    written: AtomicU64,
    /// Nothing is stored any more.
    given_up: AtomicBool,
}

impl Cache {
    /// A cache in a folder, which need not exist.
    pub(super) fn new(folder: PathBuf, bytes_max: u64) -> Self {
        Self { folder, bytes_max, written: AtomicU64::new(0), given_up: AtomicBool::new(false) }
    }

    fn path(&self, hash: u128) -> PathBuf {
        let name = format!("{hash:032x}");
        self.folder.join(&name[..2]).join(&name[2..])
    }

    /// Fills `into` if the bytes are there and whole.
    pub(super) fn read(&self, hash: u128, into: &mut [u8]) -> bool {
        let path = self.path(hash);
        let Ok(mut file) = File::open(&path) else { return false };
        if read_entry(&mut file, hash, into).is_err() {
            warn!("{} is damaged, its bytes are fetched again", path.display());
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
            // Where the folder cannot be written the order of use is unknown, which costs speed alone.
            let _ = file.set_modified(now);
        }
        true
    }

    /// Keeps bytes that were fetched, as far as possible.
    pub(super) fn store(&self, hash: u128, bytes: &[u8]) {
        let entry_bytes = bytes.len() as u64 + HEADER_BYTES;
        if entry_bytes > self.bytes_max || self.given_up.load(Ordering::Relaxed) {
            return;
        }
        match self.write(hash, bytes) {
            Ok(()) => {}
            // Somebody is emptying the folder at this moment.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                if !self.given_up.swap(true, Ordering::Relaxed) {
                    let folder = self.folder.display();
                    warn!("{folder}: {error}; nothing more is kept there (shards.cache_dir, shards.cache_gib)");
                }
            }
        }
    }

    /// Writes beside the entry and renames, so that no reader sees half of it.
    fn write(&self, hash: u128, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(hash);
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_file_name(format!(".{}-{number}", std::process::id()));
        let entry_bytes = bytes.len() as u64 + HEADER_BYTES;
        let mut file = self.reserve(&beside, entry_bytes)?;
        let mut header = [0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(&MAGIC);
        header[8..].copy_from_slice(&checksum(hash, bytes).to_le_bytes());
        let written = file.write_all(&header).and_then(|()| file.write_all(bytes)).and_then(|()| {
            self.update_usage(|used| {
                // Another worker may have fetched the same bytes: its entry is replaced, and counts no more.
                let replaced = fs::metadata(&path).map_or(0, |found| found.len());
                fs::rename(&beside, &path)?;
                self.less(used, replaced)
            })
        });
        if written.is_err() {
            let _ = fs::remove_file(&beside);
            self.release(entry_bytes);
        }
        written
    }

    /// Makes the file that is about to be written, at its full size, so that all who count see it; removes the entries that
    /// were used longest ago where there is no room.
    fn reserve(&self, beside: &Path, bytes: u64) -> io::Result<File> {
        let mut reserved = None;
        self.update_usage(|used| {
            let used = match used {
                Some(used) => used,
                None => entries(&self.folder)?.0,
            };
            let used = if used + bytes <= self.bytes_max { used } else { self.make_room(bytes)? };
            make_folder(beside.parent().unwrap_or(&self.folder))?;
            let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(beside)?;
            file.set_len(bytes)?;
            reserved = Some(file);
            Ok(used + bytes)
        })?;
        reserved.ok_or_else(|| io::Error::other("nothing was reserved"))
    }

    fn release(&self, bytes: u64) {
        // Where this fails the cache believes itself fuller than it is, until it looks.
        let _ = self.update_usage(|used| self.less(used, bytes));
    }

    fn less(&self, used: Option<u64>, bytes: u64) -> io::Result<u64> {
        match used {
            Some(used) => Ok(used.saturating_sub(bytes)),
            None => entries(&self.folder).map(|(used, _)| used),
        }
    }

    /// Removes entries, those used longest ago first; says what is left.
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
            return Err(io::Error::other(format!("{used} of {} bytes are being written", self.bytes_max)));
        }
        Ok(used)
    }

    /// Reads and writes the count of bytes in use while no other process does.
    fn update_usage(&self, update: impl FnOnce(Option<u64>) -> io::Result<u64>) -> io::Result<()> {
        make_folder(&self.folder)?;
        let path = self.folder.join(USAGE_NAME);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut file = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| io::Error::from(error))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let used = update(text.trim().parse().ok())?;
        file.seek(SeekFrom::Start(0))?;
        // Padded, so that a shorter number leaves nothing of a longer one behind.
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

/// When an entry was used, where it is, how large it is.
type Entry = (SystemTime, PathBuf, u64);

/// The bytes of all entries, and the entries. What vanishes meanwhile was not there; what is not called like an entry is
/// somebody else's, and is neither counted nor removed.
fn entries(folder: &Path) -> io::Result<(u64, Vec<Entry>)> {
    let mut found = Vec::new();
    for parent in list(folder)?.into_iter().filter(|path| is_called(path, 2, false)) {
        for path in list(&parent)?.into_iter().filter(|path| is_called(path, 30, true)) {
            let Ok(about) = fs::symlink_metadata(&path) else { continue };
            if about.is_file() {
                found.push((about.modified().unwrap_or(SystemTime::UNIX_EPOCH), path, about.len()));
            }
        }
    }
    Ok((found.iter().map(|(_, _, bytes)| bytes).sum(), found))
}

/// So many hexadecimal digits, or `.PROCESS-NUMBER` while it is being written.
fn is_called(path: &Path, digits: usize, or_unfinished: bool) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let unfinished = name.strip_prefix('.').and_then(|name| name.split_once('-'));
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    (name.len() == digits && name.bytes().all(|digit| digit.is_ascii_hexdigit()))
        || (or_unfinished && unfinished.is_some_and(|(process, number)| is_number(process) && is_number(number)))
}

fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(found) => Ok(found.filter_map(|entry| Some(entry.ok()?.path())).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// What is kept may be private.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
