//! Objects of a bucket as numbered files. A read fails if the object has changed since it was opened.

use locdiff_core::pulse;
use std::sync::OnceLock;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{GetOptions, ObjectMeta, ObjectStore};

use super::bucket::Bucket;
use super::cache::{self, ObjectCache};
use super::failure;
use super::url::Url;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::source::bytes::ByteSource;

/// Largest number of bytes per request. If a connection breaks, at most this much is fetched again.
const PART_BYTES: usize = 8 << 20;

/// Maximum number of concurrent requests of one read.
const PARTS_AT_ONCE: usize = 4;

/// Number of footers to read concurrently while a data set is opened.
const FOOTERS_AT_ONCE: usize = 16;

/// The entry of an object in an index: bucket, key, bytes, version, ETag.
pub(super) type Indexed = (String, String, u64, String, Option<String>);

/// An S3 object, with the size and the ETag that it had when it was opened.
pub(super) struct Object {
    key: Key,
    url: String,
    bytes: u64,
    /// The ETag from the listing. If the listing has no ETags, the size and the time of modification.
    version: String,
    /// The ETag from the listing. If the listing has no ETags, the ETag of the first response.
    etag: OnceLock<String>,
}

impl Object {
    pub(super) fn new(bucket: &str, found: ObjectMeta) -> Self {
        let ObjectMeta { location: key, last_modified, size: bytes, e_tag, .. } = found;
        let version = e_tag.clone().unwrap_or_else(|| format!("{bytes}@{}", last_modified.to_rfc3339()));
        let etag = e_tag.map_or_else(OnceLock::new, OnceLock::from);
        Self { url: Url::of(bucket, key.as_ref()), key, bytes, version, etag }
    }

    /// Restores an object that another process opened.
    pub(super) fn from_index((bucket, key, bytes, version, etag): Indexed) -> Result<Self, object_store::path::Error> {
        let etag = etag.map_or_else(OnceLock::new, OnceLock::from);
        Ok(Self { url: Url::of(&bucket, &key), key: Key::parse(key)?, bytes, version, etag })
    }

    /// Checks that a response has the size and the ETag of the object that was opened.
    fn check(&self, received: &ObjectMeta) -> Result<(), ShardsError> {
        let changed = |reason: String| Err(ShardsError::Changed { location: self.url.clone(), reason });
        if received.size != self.bytes {
            return changed(format!("the object has {} bytes, wanted {}", received.size, self.bytes));
        }
        let Some(got) = &received.e_tag else { return Ok(()) };
        let wanted = self.etag.get_or_init(|| got.clone());
        if got != wanted {
            return changed(format!("its ETag is {got}, wanted {wanted}"));
        }
        Ok(())
    }

    /// The ETag for the `If-Match` condition of a request. `None` if the ETag is unknown, or weak: a weak ETag would
    /// never match.
    fn condition(&self) -> Option<String> {
        self.etag.get().filter(|etag| !etag.starts_with("W/")).cloned()
    }
}

/// Objects of one bucket.
pub(super) struct S3Files {
    pub(super) bucket: Bucket,
    pub(super) objects: Vec<Object>,
    pub(super) cache: Option<ObjectCache>,
}

impl S3Files {
    async fn fetch(&self, object: &Object, offset: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        let range = offset..offset + into.len() as u64;
        let what = format!("reading bytes {} to {}", range.start, range.end - 1);
        let options = GetOptions { range: Some(range.into()), if_match: object.condition(), ..GetOptions::default() };
        let failed = |error| failure::describe(&object.url, &what, &error, &self.bucket.secrets);
        let answer = self.bucket.store.get_opts(&object.key, options).await.map_err(failed)?;
        object.check(&answer.meta)?;
        let fail = |reason: String| {
            Err(ShardsError::io(&object.url, std::io::Error::other(format!("{what}: the response is {reason}"))))
        };
        let mut rest = &mut *into;
        let mut body = answer.into_stream();
        while let Some(piece) = body.try_next().await.map_err(failed)? {
            let Some((filled, empty)) = std::mem::take(&mut rest).split_at_mut_checked(piece.len()) else {
                return fail("too long".to_owned());
            };
            filled.copy_from_slice(&piece);
            rest = empty;
        }
        if !rest.is_empty() {
            return fail(format!("{} bytes too short", rest.len()));
        }
        Ok(())
    }
}

impl ByteSource for S3Files {
    fn files(&self) -> usize {
        self.objects.len()
    }

    fn name(&self, file: usize) -> String {
        self.objects[file].url.clone()
    }

    fn len(&self, file: usize) -> Result<u64, ShardsError> {
        Ok(self.objects[file].bytes)
    }

    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        pulse::advance();
        let object = &self.objects[file];
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > object.bytes) {
            let reason = format!(
                "the object has {} bytes, but {} bytes are needed from byte {offset} on: it was cut short",
                object.bytes,
                into.len()
            );
            return Err(ShardsError::corrupt(Spot::file(&object.url), reason));
        }
        let parts = into.chunks_mut(PART_BYTES).zip(0_u64..);
        let parts = parts.map(|(part, number)| (offset + number * PART_BYTES as u64, part));
        let cache = self.cache.as_ref();
        let key = |offset: u64, part: &[u8]| cache::key(&object.url, &object.version, offset, part.len());
        let missing: Vec<(u64, &mut [u8])> = parts
            .filter_map(|(offset, part)| match cache {
                Some(cache) if cache.read(key(offset, part), part) => None,
                _ => Some((offset, part)),
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let fetches = missing.into_iter().map(|(offset, part)| async move {
            self.fetch(object, offset, part).await?;
            Ok((offset, &*part))
        });
        let fetched: Result<Vec<(u64, &[u8])>, ShardsError> =
            self.bucket.wait(stream::iter(fetches).buffer_unordered(PARTS_AT_ONCE).try_collect());
        for (offset, part) in fetched? {
            if let Some(cache) = cache {
                cache.store(key(offset, part), part);
            }
        }
        Ok(())
    }

    fn files_at_once(&self) -> usize {
        FOOTERS_AT_ONCE
    }

    fn version(&self, file: usize) -> Result<String, ShardsError> {
        Ok(self.objects[file].version.clone())
    }

    fn indexed(&self, file: usize) -> Option<String> {
        let Object { key, bytes, version, etag, .. } = &self.objects[file];
        let entry: Indexed = (self.bucket.name.clone(), key.to_string(), *bytes, version.clone(), etag.get().cloned());
        serde_json::to_string(&entry).ok()
    }
}
