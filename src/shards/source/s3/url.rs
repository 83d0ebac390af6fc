//! `s3://bucket/key`, where the key is a folder, an object or a glob.

use locdiff_core::config::{NO_CREDENTIALS, has_credentials};

use crate::shards::error::ShardsError;

/// A parsed URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) bucket: String,
    /// The key without leading and trailing slashes.
    pub(super) key: String,
    /// Whether the URL ends in a slash or names a whole bucket.
    pub(super) is_folder: bool,
}

impl Url {
    /// Parses the part of a URL after `s3://`. A URL that contains credentials is an error, and the message does not
    /// repeat the credentials.
    pub(super) fn parse(rest: &str) -> Result<Self, ShardsError> {
        let refuse = |reason: &str| Err(ShardsError::Argument(format!("an s3:// URL {reason}")));
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if has_credentials(&format!("s3://{rest}")) {
            return refuse(NO_CREDENTIALS);
        }
        let legal = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        if bucket.len() < 3 || bucket.len() > 63 || !bucket.chars().all(legal) {
            return refuse(&format!(
                "has the bucket name {bucket:?}, wanted s3://BUCKET/PREFIX, \
                 where BUCKET is 3 to 63 letters, digits, `-`, `.` or `_`"
            ));
        }
        let is_folder = key.is_empty() || key.ends_with('/');
        Ok(Self { bucket: bucket.to_owned(), key: key.trim_matches('/').to_owned(), is_folder })
    }

    /// Formats the URL of an object.
    pub(super) fn of(bucket: &str, key: &str) -> String {
        format!("s3://{bucket}/{key}")
    }

    /// The folders of the key before the first wildcard. `None` if the key has no wildcard.
    pub(super) fn glob_base(&self) -> Option<&str> {
        let wild = self.key.find(['*', '?', '['])?;
        Some(self.key[..wild].rsplit_once('/').map_or("", |(base, _)| base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_split_into_bucket_and_key_and_must_not_have_credentials() {
        let parsed = |rest| Url::parse(rest).map(|url| (url.bucket, url.key, url.is_folder)).ok();
        let url = |bucket: &str, key: &str, is_folder| Some((bucket.to_owned(), key.to_owned(), is_folder));
        assert_eq!(parsed("data/mp16"), url("data", "mp16", false));
        assert_eq!(parsed("data/a/b/"), url("data", "a/b", true));
        assert_eq!(parsed("data"), url("data", "", true));
        let glob = Url::parse("data/a/b*/c?.parquet").expect("the URL is valid");
        assert_eq!((glob.glob_base(), glob.is_folder), (Some("a"), false));
        for refused in ["", "/x", "ab/x", "no space/x", "user:hunter2@data/x", "data/x?X-Amz-Signature=hunter2"] {
            let text = Url::parse(refused).expect_err("the URL is not valid").to_string();
            assert!(!text.contains("hunter2"), "the message repeats the password: {text}");
        }
    }
}
