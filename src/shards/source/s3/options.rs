//! The options for S3, from the environment and the configuration: server, credentials, retries and disk cache.

use std::path::PathBuf;
use std::time::Duration;

use locdiff_core::config::ShardsConfig;
use object_store::aws::AmazonS3ConfigKey;
use object_store::{BackoffConfig, RetryConfig};
use tracing::warn;

use super::cache::ObjectCache;
use super::failure::Secrets;

/// Server, credentials, retries and disk cache.
#[derive(Clone)]
pub struct S3Options {
    pub(super) variables: Vec<(AmazonS3ConfigKey, String)>,
    /// Number of retries and the waits between them.
    pub retry: RetryConfig,
    cache_folder: Option<PathBuf>,
    /// Maximum size of the disk cache. 0 turns the cache off.
    pub cache_bytes_max: u64,
}

impl std::fmt::Debug for S3Options {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The environment variables are left out, because they hold secrets.
        out.debug_struct("S3Options").field("cache_folder", &self.cache_folder).finish_non_exhaustive()
    }
}

impl S3Options {
    /// Takes credentials and server from the environment, and the cache from the configuration. If no cache folder is
    /// configured, the folder comes from XDG_CACHE_HOME or HOME.
    pub fn from_env(config: &ShardsConfig) -> Self {
        let utf8 =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Self::from_variables(utf8, config)
    }

    /// Like [`S3Options::from_env`], but takes the variables from `variables` instead of the environment.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>, config: &ShardsConfig) -> Self {
        let (mut aws, mut cache_home, mut home) = (Vec::new(), None, None);
        for (name, value) in variables.into_iter().filter(|(_, value)| !value.is_empty()) {
            match name.as_str() {
                "XDG_CACHE_HOME" => cache_home = Some(PathBuf::from(value)),
                "HOME" => home = Some(PathBuf::from(value).join(".cache")),
                _ if name.starts_with("AWS_") => {
                    aws.extend(name.to_ascii_lowercase().parse().ok().map(|key: AmazonS3ConfigKey| (key, value)));
                }
                _ => {}
            }
        }
        let default_folder = || Some(cache_home.filter(|path| path.is_absolute()).or(home)?.join("locdiff").join("s3"));
        let cache_folder = Some(PathBuf::from(&config.cache_dir)).filter(|path| !path.as_os_str().is_empty());
        Self {
            variables: aws,
            retry: RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 9,
                retry_timeout: Duration::from_secs(120),
            },
            cache_folder: cache_folder.or_else(default_folder),
            cache_bytes_max: u64::from(config.cache_gib) << 30,
        }
    }

    fn value(&self, wanted: AmazonS3ConfigKey) -> Option<&str> {
        self.variables.iter().find(|(key, _)| *key == wanted).map(|(_, value)| value.as_str())
    }

    /// Whether the variables contain credentials, name a service that provides credentials, or turn signatures off.
    pub(super) fn has_credentials(&self) -> bool {
        use AmazonS3ConfigKey::{
            AccessKeyId, ContainerCredentialsFullUri, ContainerCredentialsRelativeUri, MetadataEndpoint,
            SecretAccessKey, SkipSignature, WebIdentityTokenFile,
        };
        let container = [ContainerCredentialsFullUri, ContainerCredentialsRelativeUri];
        let others = [MetadataEndpoint, SkipSignature, WebIdentityTokenFile];
        (self.value(AccessKeyId).is_some() && self.value(SecretAccessKey).is_some())
            || container.into_iter().chain(others).any(|key| self.value(key).is_some())
    }

    pub(super) fn secrets(&self) -> Secrets {
        let keys = [AmazonS3ConfigKey::SecretAccessKey, AmazonS3ConfigKey::Token];
        Secrets(keys.into_iter().filter_map(|key| self.value(key).map(str::to_owned)).collect())
    }

    pub(super) fn cache(&self) -> Option<ObjectCache> {
        if self.cache_bytes_max == 0 {
            return None;
        }
        if self.cache_folder.is_none() {
            warn!("shards from S3 are not cached: no cache folder; set shards.cache_dir, XDG_CACHE_HOME or HOME");
        }
        Some(ObjectCache::new(self.cache_folder.clone()?, self.cache_bytes_max))
    }
}
