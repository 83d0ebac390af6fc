//! Replaces the `s3` module when the feature `s3` is off: every `s3://` location is an error.

use std::sync::Arc;

use locdiff_core::config::ShardsConfig;

use super::bytes::{ByteSource, Listed};
use crate::shards::error::ShardsError;

/// A placeholder for the options of S3. It is empty.
#[derive(Debug, Clone)]
pub struct S3Options;

impl S3Options {
    /// Ignores the environment and the configuration.
    pub fn from_env(_config: &ShardsConfig) -> Self {
        Self
    }
}

pub(super) fn open(_rest: &str, _options: &S3Options) -> Result<Listed, ShardsError> {
    Err(ShardsError::Argument(
        "cannot read shards from `s3://`: this program was built without the Cargo feature `s3`".into(),
    ))
}

pub(super) fn from_index(_entries: &[String], options: &S3Options) -> Result<Arc<dyn ByteSource>, ShardsError> {
    open("", options).map(|(source, _)| source)
}
