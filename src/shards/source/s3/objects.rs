//! Objects behind `s3://bucket/key` as numbered files.
//!
//! Invariant: every byte that is handed out is of the object as it was when the data set was opened: each request names its ETag,
//! and each answer is compared with it. Credentials come from the environment alone, and no message shows them.
//!
//! Requests that fail for a reason that passes (5xx, connections that break, in the middle of an answer too) are made again by
//! `object_store`, with growing waits and a bound on both tries and time. The waiting threads are those that read; a small tokio
//! runtime drives the connections.

mod cache;
mod failure;
mod listing;
mod url;

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use locdiff_core::config::ShardsConfig;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path as Key;
use object_store::{BackoffConfig, GetOptions, ObjectMeta, ObjectStore, RetryConfig};
use tokio::runtime::{Handle, Runtime};
use tracing::warn;

use self::cache::Cache;
use self::failure::Secrets;
use self::url::Url;
use super::error::{ShardsError, Spot};
use super::source::ByteSource;

pub(super) use self::listing::{from_index, open};

/// The longest range that is asked for at once: it bounds what a broken connection costs.
const PART_BYTES: usize = 8 << 20;

/// Parts of one read that are under way at once.
const PARTS_AT_ONCE: usize = 4;

/// Files whose footers are read at once while a data set is opened.
const FOOTERS_AT_ONCE: usize = 16;

/// Threads that drive the connections.
const RUNTIME_THREADS: usize = 2;

/// How a server is reached and what is kept on disk.
#[derive(Clone)]
pub struct S3Options {
    variables: Vec<(AmazonS3ConfigKey, String)>,
    retry: RetryConfig,
    cache_folder: Option<PathBuf>,
    cache_bytes_max: u64,
}

impl std::fmt::Debug for S3Options {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The variables hold secrets.
        out.debug_struct("S3Options").field("cache_folder", &self.cache_folder).finish_non_exhaustive()
    }
}

impl S3Options {
    /// Credentials and server from the environment, the cache from the configuration.
    pub fn from_env(config: &ShardsConfig) -> Self {
        let utf8 =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Self::from_variables(utf8, config)
    }

    /// The same from variables that need not be in the environment.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>, config: &ShardsConfig) -> Self {
        let (mut known, mut cache_home, mut home) = (Vec::new(), None, None);
        for (name, value) in variables.into_iter().filter(|(_, value)| !value.is_empty()) {
            match name.as_str() {
                "XDG_CACHE_HOME" => cache_home = Some(PathBuf::from(value)),
                "HOME" => home = Some(PathBuf::from(value).join(".cache")),
                _ if name.starts_with("AWS_") => {
                    known.extend(name.to_ascii_lowercase().parse().ok().map(|key: AmazonS3ConfigKey| (key, value)));
                }
                _ => {}
            }
        }
        let default_folder = || Some(cache_home.filter(|path| path.is_absolute()).or(home)?.join("locdiff").join("s3"));
        let cache_folder = Some(PathBuf::from(&config.cache_dir)).filter(|path| !path.as_os_str().is_empty());
        Self {
            variables: known,
            retry: RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 9,
                retry_timeout: Duration::from_secs(120),
            },
            cache_folder: cache_folder.or_else(default_folder),
            cache_bytes_max: u64::from(config.cache_gib) << 30,
        }
    }

    /// At most so many tries with such a first wait between them.
    #[must_use]
    pub fn with_tries(mut self, tries_max: u32, wait_first: Duration) -> Self {
        self.retry.max_retries = tries_max.saturating_sub(1) as usize;
        self.retry.backoff = BackoffConfig { init_backoff: wait_first, max_backoff: 4 * wait_first, base: 2.0 };
        self
    }

    /// Another bound of the cache; 0: no cache.
    #[must_use]
    pub fn with_cache_bytes_max(mut self, cache_bytes_max: u64) -> Self {
        self.cache_bytes_max = cache_bytes_max;
        self
    }

    fn value(&self, wanted: AmazonS3ConfigKey) -> Option<&str> {
        self.variables.iter().find(|(key, _)| *key == wanted).map(|(_, value)| value.as_str())
    }

    /// Is there anything to sign with, or nothing to be signed?
    fn has_credentials(&self) -> bool {
        use AmazonS3ConfigKey::{
            AccessKeyId, ContainerCredentialsFullUri, ContainerCredentialsRelativeUri, MetadataEndpoint,
            SecretAccessKey, SkipSignature, WebIdentityTokenFile,
        };
        let container = [ContainerCredentialsFullUri, ContainerCredentialsRelativeUri];
        let others = [MetadataEndpoint, SkipSignature, WebIdentityTokenFile];
        (self.value(AccessKeyId).is_some() && self.value(SecretAccessKey).is_some())
            || container.into_iter().chain(others).any(|key| self.value(key).is_some())
    }

    fn secrets(&self) -> Secrets {
        let keys = [AmazonS3ConfigKey::SecretAccessKey, AmazonS3ConfigKey::Token];
        Secrets(keys.into_iter().filter_map(|key| self.value(key).map(str::to_owned)).collect())
    }

    fn cache(&self) -> Option<Cache> {
        if self.cache_bytes_max == 0 {
            return None;
        }
        if self.cache_folder.is_none() {
            warn!("neither shards.cache_dir nor XDG_CACHE_HOME nor HOME names a folder: fetched shards are not kept");
        }
        Some(Cache::new(self.cache_folder.clone()?, self.cache_bytes_max))
    }
}

/// A bucket, and the threads that talk to its server.
struct Bucket {
    name: String,
    store: AmazonS3,
    /// Always there but while it is dropped.
    runtime: Option<Runtime>,
    secrets: Secrets,
    retry: RetryConfig,
}

impl Bucket {
    fn connect(name: &str, options: &S3Options) -> Result<Self, ShardsError> {
        let url = Url::of(name, "");
        if !options.has_credentials() {
            return Err(failure::no_credentials(&url));
        }
        // Another part of the process may have chosen already: that one stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let secrets = options.secrets();
        let wrong = |error: object_store::Error| failure::describe(&url, "connecting", &error, &secrets);
        let builder = AmazonS3Builder::new().with_retry(options.retry.clone());
        let variables = options.variables.iter();
        let builder = variables.fold(builder, |builder, (key, value)| builder.with_config(*key, value));
        let store = builder.with_bucket_name(name).build().map_err(wrong)?;
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(RUNTIME_THREADS).thread_name("locdiff-s3").enable_all().build();
        let runtime = runtime.map_err(|error| ShardsError::io(&url, error))?;
        Ok(Self { name: name.to_owned(), store, runtime: Some(runtime), secrets, retry: options.retry.clone() })
    }

    /// Waits for an answer. A caller that is itself within a runtime must not block it: another thread waits then.
    fn wait<F>(&self, answer: F) -> F::Output
    where
        F: Future + Send,
        F::Output: Send,
    {
        let runtime = self.runtime.as_ref().expect("it is taken by drop alone");
        if Handle::try_current().is_err() {
            return runtime.block_on(answer);
        }
        std::thread::scope(|scope| scope.spawn(|| runtime.block_on(answer)).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not block, and so may happen anywhere; nothing is under way, for who waits holds the bucket.
            runtime.shutdown_background();
        }
    }
}

/// An object as it was when it was opened.
struct Object {
    key: Key,
    url: String,
    bytes: u64,
    /// What tells its version in the cache.
    version: String,
    /// From the listing, or from the first answer where a server's listings have none.
    etag: OnceLock<String>,
}

impl Object {
    fn new(bucket: &str, found: ObjectMeta) -> Self {
        let ObjectMeta { location: key, last_modified, size: bytes, e_tag, .. } = found;
        let version = e_tag.clone().unwrap_or_else(|| format!("{bytes}@{}", last_modified.to_rfc3339()));
        let etag = e_tag.map_or_else(OnceLock::new, OnceLock::from);
        Self { url: Url::of(bucket, key.as_ref()), key, bytes, version, etag }
    }

    /// Is the object that answered the one that was opened?
    fn check(&self, answered: &ObjectMeta) -> Result<(), ShardsError> {
        let changed = |reason: String| Err(ShardsError::Changed { location: self.url.clone(), reason });
        if answered.size != self.bytes {
            return changed(format!("it has {} bytes, it had {}", answered.size, self.bytes));
        }
        let Some(got) = &answered.e_tag else { return Ok(()) };
        let had = self.etag.get_or_init(|| got.clone());
        if got != had {
            return changed(format!("its ETag is {got}, it was {had}"));
        }
        Ok(())
    }

    /// A condition that the server checks too; a weak ETag would match nothing.
    fn condition(&self) -> Option<String> {
        self.etag.get().filter(|etag| !etag.starts_with("W/")).cloned()
    }
}

/// Objects of one bucket.
struct S3Files {
    bucket: Bucket,
    objects: Vec<Object>,
    cache: Option<Arc<Cache>>,
}

impl S3Files {
    async fn fetch(&self, object: &Object, offset: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        let range = offset..offset + into.len() as u64;
        let what = format!("bytes {} to {}", range.start, range.end - 1);
        let options = GetOptions { range: Some(range.into()), if_match: object.condition(), ..GetOptions::default() };
        let failed = |error| failure::describe(&object.url, &what, &error, &self.bucket.secrets);
        let answer = self.bucket.store.get_opts(&object.key, options).await.map_err(failed)?;
        object.check(&answer.meta)?;
        let mut rest = &mut *into;
        let mut body = answer.into_stream();
        while let Some(piece) = body.try_next().await.map_err(failed)? {
            let Some((filled, empty)) = std::mem::take(&mut rest).split_at_mut_checked(piece.len()) else {
                return Err(ShardsError::io(
                    &object.url,
                    std::io::Error::other(format!("{what}: the answer is longer")),
                ));
            };
            filled.copy_from_slice(&piece);
            rest = empty;
        }
        if !rest.is_empty() {
            let reason = format!("{what}: the answer is {} bytes short", rest.len());
            return Err(ShardsError::io(&object.url, std::io::Error::other(reason)));
        }
        Ok(())
    }

    fn key<'a>(&self, object: &'a Object, offset: u64) -> cache::Key<'a> {
        cache::Key { url: &object.url, version: &object.version, offset }
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
        let object = &self.objects[file];
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > object.bytes) {
            let spot = Box::new(Spot { file: object.url.clone(), row_group: None, column: None, row: None });
            let reason = format!("ends before byte {offset}+{}: it was cut short", into.len());
            return Err(ShardsError::Corrupt { spot, reason });
        }
        let parts = into.chunks_mut(PART_BYTES).zip(0_u64..);
        let parts = parts.map(|(part, number)| (offset + number * PART_BYTES as u64, part));
        let cache = self.cache.as_deref();
        let missing: Vec<(u64, &mut [u8])> = parts
            .filter_map(|(offset, part)| match cache {
                Some(cache) if cache.read(self.key(object, offset), part) => None,
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
                cache.store(self.key(object, offset), part);
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
        listing::indexed(&self.objects[file])
    }
}
