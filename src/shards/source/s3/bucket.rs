//! A connection to a bucket, with the async runtime that drives the connection.

use std::future::Future;

use object_store::RetryConfig;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use tokio::runtime::{Handle, Runtime};

use super::failure::{self, Secrets};
use super::options::S3Options;
use super::url::Url;
use crate::shards::error::ShardsError;

/// Number of threads of the runtime that drives the connections.
const RUNTIME_THREADS: usize = 2;

/// A connection to a bucket, with the async runtime that drives the connection.
pub(super) struct Bucket {
    pub(super) name: String,
    pub(super) store: AmazonS3,
    /// The runtime is `None` only while the bucket is being dropped.
    runtime: Option<Runtime>,
    pub(super) secrets: Secrets,
    pub(super) retry: RetryConfig,
}

impl Bucket {
    pub(super) fn connect(name: &str, options: &S3Options) -> Result<Self, ShardsError> {
        let url = Url::of(name, "");
        if !options.has_credentials() {
            return Err(failure::no_credentials(&url));
        }
        // If another part of the process has already installed a cryptography provider, that provider is kept.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let secrets = options.secrets();
        let fail = |error: object_store::Error| failure::describe(&url, "connecting", &error, &secrets);
        let builder = AmazonS3Builder::new().with_retry(options.retry.clone());
        let variables = options.variables.iter();
        let builder = variables.fold(builder, |builder, (key, value)| builder.with_config(*key, value));
        let store = builder.with_bucket_name(name).build().map_err(fail)?;
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(RUNTIME_THREADS).thread_name("locdiff-s3").enable_all().build();
        let runtime = runtime.map_err(|error| ShardsError::io(&url, error))?;
        Ok(Self { name: name.to_owned(), store, runtime: Some(runtime), secrets, retry: options.retry.clone() })
    }

    /// Blocks until a future is ready. `block_on` must not be called inside a tokio runtime, so if the caller is inside
    /// one, a new thread calls `block_on`.
    pub(super) fn wait<F>(&self, answer: F) -> F::Output
    where
        F: Future + Send,
        F::Output: Send,
    {
        let runtime = self.runtime.as_ref().expect("only `drop` takes the runtime");
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
            // `shutdown_background` does not block, so it is allowed inside a tokio runtime too. No request is active,
            // because every request borrows the bucket.
            runtime.shutdown_background();
        }
    }
}
