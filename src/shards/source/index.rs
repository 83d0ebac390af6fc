//! The index of a data set: everything that a process needs to open it, in a form that can be sent to other processes.
//! It consists of the names, sizes, versions and footers of the files, and of the manifest.
//!
//! One process makes the index and broadcasts it. The other processes open the data set from the index, without listing
//! files or reading footers. So a server gets the requests for listings and footers once, not once per worker.

use std::hash::Hasher as _;
use std::path::PathBuf;
use std::sync::Arc;

use locdiff_core::config::ShardsConfig;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::bytes::ByteSource;
use super::local::LocalFiles;
use super::locate::{self, FoundFiles};
use super::origin::Origin;
use super::s3::{self, S3Options};
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{Checksum, MANIFEST_NAME, Manifest, ManifestFile, footer_bytes};
use crate::shards::parallel::in_order;

/// Number of bytes to read first from the end of a file. Most footers are smaller, so one read is enough.
const TAIL_BYTES: u64 = 64 << 10;

/// If the data has no manifest, the fingerprint covers this many bytes at the start of each file.
const HEAD_BYTES: u64 = 64 << 10;

/// Magic number of a serialized index, with the version of its layout.
const MAGIC: [u8; 8] = *b"LDINDEX1";

/// Size of the first three fields: the magic number, the checksum (xxh3) of all bytes after the checksum, and the
/// length of the table.
const PREFIX_BYTES: usize = 24;

/// The index of a data set: everything that a process needs to open the data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DatasetIndex {
    pub(crate) table: IndexTable,
    /// The footers of all files, concatenated.
    footers: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IndexTable {
    location: String,
    /// The text of the manifest. Every process parses the same text, so that all have exactly the same numbers.
    manifest_text: Option<String>,
    /// The origin of the rows. `None` if the origin is unknown, or if there is a manifest, which itself states the
    /// origin.
    pub(crate) origin: Option<Origin>,
    pub(crate) fingerprint: u64,
    files: Vec<IndexedFile>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexedFile {
    name: String,
    bytes: u64,
    footer_bytes: usize,
    /// For an S3 object, the text from [`ByteSource::indexed`], with which a worker opens the object. `None` for local
    /// files.
    object: Option<String>,
}

impl DatasetIndex {
    /// Finds the files of a folder, a file, a glob or a URL, and reads their footers.
    pub fn read(location: &str, config: &ShardsConfig) -> Result<Self, ShardsError> {
        Self::open(location, config).map(|(index, _)| index)
    }

    /// Like [`DatasetIndex::read`], but also returns the source of the files.
    pub(crate) fn open(location: &str, config: &ShardsConfig) -> Result<(Self, Arc<dyn ByteSource>), ShardsError> {
        let found = locate::locate(location, config)?;
        Ok((Self::of(location, &found)?, found.source))
    }

    /// Like [`DatasetIndex::read`], but takes the S3 options from `options` instead of the environment.
    pub fn read_s3(location: &str, options: &S3Options) -> Result<Self, ShardsError> {
        Self::of(location, &locate::locate_s3(location, options)?)
    }

    /// Reads the footers of the files that were found, and compares them with the manifest if there is one.
    fn of(location: &str, found: &FoundFiles) -> Result<Self, ShardsError> {
        let source = found.source.as_ref();
        let manifest = parse_manifest(location, found.manifest_text.as_deref())?;

        let ends =
            in_order(source.files_at_once(), source.files(), |file| FileEnds::read(source, file, manifest.is_none()))?;
        let (mut files, mut footers) = (Vec::with_capacity(ends.len()), Vec::new());
        let mut hasher = XxHash3_64::new();
        for (file, ends) in ends.iter().enumerate() {
            let name = source.name(file);
            match &manifest {
                Some(manifest) => check_footer(&name, ends, &manifest.files[file])?,
                None => ends.hash(&mut hasher),
            }
            let (bytes, footer_bytes, object) = (ends.bytes, ends.footer.len(), source.indexed(file));
            files.push(IndexedFile { name, bytes, footer_bytes, object });
            footers.extend_from_slice(&ends.footer);
        }
        let fingerprint = manifest.map_or_else(|| hasher.finish(), |manifest| manifest.fingerprint.0);
        let manifest_text = found.manifest_text.as_deref().map(|text| String::from_utf8_lossy(text).into_owned());
        let (location, origin) = (location.to_owned(), found.origin.clone());
        let table = IndexTable { location, manifest_text, origin, fingerprint, files };
        Ok(Self { table, footers })
    }

    /// Serializes the index for the broadcast.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ShardsError> {
        let table = serde_json::to_vec(&self.table).map_err(|error| {
            ShardsError::Argument(format!("cannot write the index of the data set as JSON: {error}"))
        })?;
        let mut bytes = vec![0; 16];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes.extend_from_slice(&(table.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&table);
        bytes.extend_from_slice(&self.footers);
        let hash = XxHash3_64::oneshot(&bytes[16..]);
        bytes[8..16].copy_from_slice(&hash.to_le_bytes());
        Ok(bytes)
    }

    /// Reads the output of [`DatasetIndex::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ShardsError> {
        let fail = |reason: &str| ShardsError::corrupt(Spot::file("the index of the data set"), reason);
        let Some((prefix, rest)) = bytes.split_at_checked(PREFIX_BYTES).filter(|(prefix, _)| prefix[..8] == MAGIC)
        else {
            return Err(fail(
                "it is too short, or another version of this program made it; run the same version everywhere",
            ));
        };
        if prefix[8..16] != XxHash3_64::oneshot(&bytes[16..]).to_le_bytes() {
            return Err(fail("it is damaged: its checksum (xxh3) does not match its bytes"));
        }
        let table_bytes = u64::from_le_bytes(prefix[16..24].try_into().expect("the slice has eight bytes"));
        let parts = usize::try_from(table_bytes).ok().and_then(|table_bytes| rest.split_at_checked(table_bytes));
        let (table, footers) = parts.ok_or_else(|| fail("it is damaged: it ends before the end of its table"))?;
        let table: IndexTable =
            serde_json::from_slice(table).map_err(|error| fail(&format!("its table cannot be parsed: {error}")))?;
        let index = Self { table, footers: footers.to_vec() };
        let (got, files) = (index.footers.len(), &index.table.files);
        let want = files.iter().map(|file| file.footer_bytes).fold(0, usize::saturating_add);
        if got != want {
            return Err(fail(&format!("it is damaged: its footers have {got} bytes, but its table says {want}")));
        }
        Ok(index)
    }

    /// Path, glob or URL of the data.
    pub fn location(&self) -> &str {
        &self.table.location
    }

    pub(crate) fn manifest(&self) -> Result<Option<Manifest>, ShardsError> {
        parse_manifest(&self.table.location, self.table.manifest_text.as_deref().map(str::as_bytes))
    }

    /// Name, size and footer of every file.
    pub(crate) fn files(&self) -> impl Iterator<Item = (String, u64, &[u8])> {
        let mut rest = self.footers.as_slice();
        self.table.files.iter().map(move |file| {
            let (footer, after) = rest.split_at(file.footer_bytes.min(rest.len()));
            rest = after;
            (file.name.clone(), file.bytes, footer)
        })
    }

    /// Opens the files without listing them. S3 credentials come from the environment.
    pub(crate) fn source(&self, config: &ShardsConfig) -> Result<Arc<dyn ByteSource>, ShardsError> {
        if self.table.files.iter().any(|file| file.object.is_some()) {
            return self.source_s3(&S3Options::from_env(config));
        }
        let paths = self.table.files.iter().map(|file| PathBuf::from(&file.name)).collect();
        Ok(Arc::new(LocalFiles::new(paths)))
    }

    /// Opens the S3 objects with the given options, without listing them.
    pub(crate) fn source_s3(&self, options: &S3Options) -> Result<Arc<dyn ByteSource>, ShardsError> {
        let objects: Option<Vec<String>> = self.table.files.iter().map(|file| file.object.clone()).collect();
        let objects =
            objects.ok_or_else(|| ShardsError::Argument("the index lists local files, wanted objects on S3".into()))?;
        s3::from_index(&objects, options)
    }
}

fn parse_manifest(location: &str, text: Option<&[u8]>) -> Result<Option<Manifest>, ShardsError> {
    let name = format!("{}/{MANIFEST_NAME}", location.trim_end_matches('/'));
    text.map(|text| Manifest::parse(text, &name)).transpose()
}

/// The size, the footer and the first bytes of a file.
struct FileEnds {
    bytes: u64,
    footer: Vec<u8>,
    /// The first bytes of the file. Empty for data with a manifest, because the fingerprint of the manifest identifies
    /// the data.
    head: Vec<u8>,
}

impl FileEnds {
    fn read(source: &dyn ByteSource, file: usize, with_head: bool) -> Result<Self, ShardsError> {
        let (name, bytes) = (source.name(file), source.len(file)?);
        let tail_bytes = bytes.min(TAIL_BYTES);
        let mut footer = vec![0; tail_bytes as usize];
        source.read_at(file, bytes - tail_bytes, &mut footer)?;
        let length = footer_bytes(&name, bytes, &footer, || {
            let mut magic = [0; 4];
            source.read_at(file, 0, &mut magic).is_ok().then_some(magic)
        })?;
        if length <= footer.len() {
            footer.drain(..footer.len() - length);
        } else {
            footer.resize(length, 0);
            source.read_at(file, bytes - length as u64, &mut footer)?;
        }
        let mut head = vec![0; if with_head { bytes.min(HEAD_BYTES) as usize } else { 0 }];
        source.read_at(file, 0, &mut head)?;
        Ok(Self { bytes, footer, head })
    }

    /// Hashes the size, the footer and the first bytes of the file. The hash over all files is the fingerprint of data
    /// without a manifest, so the fingerprint can be computed without reading all data.
    fn hash(&self, hasher: &mut XxHash3_64) {
        hasher.write(&self.bytes.to_le_bytes());
        hasher.write(&(self.footer.len() as u64).to_le_bytes());
        hasher.write(&self.footer);
        hasher.write(&self.head);
    }
}

/// Checks the size and the footer of a file against the manifest.
fn check_footer(name: &str, ends: &FileEnds, listed: &ManifestFile) -> Result<(), ShardsError> {
    let damaged = |reason: String| Err(ShardsError::corrupt(Spot::file(name), reason));
    if ends.bytes != listed.bytes {
        return damaged(format!("the file has {} bytes, but the manifest says {}", ends.bytes, listed.bytes));
    }
    let computed = Checksum::of(&ends.footer);
    if computed != listed.footer_xxh3 {
        let listed = listed.footer_xxh3;
        return damaged(format!("its footer has xxh3 {computed}, but the manifest says {listed}: the file is damaged"));
    }
    Ok(())
}
