//! The place of `s3` in a program that was built without the feature: every `s3://` is refused.

use std::sync::Arc;

use locdiff_core::config::ShardsConfig;

use super::bytes::{ByteSource, Listed};
use crate::shards::error::ShardsError;

/// Nothing: there is no server to reach.
#[derive(Debug, Clone)]
pub struct S3Options;

impl S3Options {
    /// Nothing is taken from anywhere.
    pub fn from_env(_config: &ShardsConfig) -> Self {
        Self
    }
}

pub(super) fn open(_rest: &str, _options: &S3Options) -> Result<Listed, ShardsError> {
    Err(ShardsError::Argument("no way to read `s3://`: this program was built without the feature s3".into()))
}

pub(super) fn from_index(_entries: &[String], options: &S3Options) -> Result<Arc<dyn ByteSource>, ShardsError> {
    open("", options).map(|(source, _)| source)
}
