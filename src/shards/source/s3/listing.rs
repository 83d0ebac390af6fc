//! Resolves a URL to objects. The URL names a folder with a manifest, a folder of Parquet files, an object or a glob.
//! The rules are the same as for local files.

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::stream::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};

use super::bucket::Bucket;
use super::failure::{self, Kind};
use super::objects::{Indexed, Object, S3Files};
use super::options::S3Options;
use super::url::Url;
use crate::shards::error::ShardsError;
use crate::shards::format::{MANIFEST_NAME, Manifest, ManifestFile};
use crate::shards::source::bytes::{ByteSource, Listed};

/// Finds the objects of an S3 URL, and the text of the manifest if there is one. `rest` is the URL without `s3://`.
pub(in crate::shards::source) fn open(rest: &str, options: &S3Options) -> Result<Listed, ShardsError> {
    let url = Url::parse(rest)?;
    let bucket = Bucket::connect(&url.bucket, options)?;
    let location = Url::of(&url.bucket, &url.key);
    let missing = |reason: &str| Err(ShardsError::Missing { location: location.clone(), reason: reason.to_owned() });
    let (objects, manifest_text) = if let Some(base) = url.glob_base() {
        (bucket.glob_objects(base, &url.key)?, None)
    } else {
        bucket.folder_or_object(&url)?
    };
    if objects.is_empty() {
        return match (&manifest_text, url.glob_base()) {
            (Some(_), _) => missing("its manifest lists no files"),
            (None, Some(_)) => missing("the glob matches nothing"),
            (None, None) => missing("it is neither an object nor a folder with a manifest.json or a *.parquet object"),
        };
    }
    let objects = objects.into_iter().map(|found| Object::new(&url.bucket, found)).collect();
    Ok((files(bucket, objects, options), manifest_text))
}

fn files(bucket: Bucket, objects: Vec<Object>, options: &S3Options) -> Arc<dyn ByteSource> {
    Arc::new(S3Files { bucket, objects, cache: options.cache() })
}

/// Opens the objects of an index without any request to the server.
pub(in crate::shards::source) fn from_index(
    entries: &[String],
    options: &S3Options,
) -> Result<Arc<dyn ByteSource>, ShardsError> {
    let fail = |reason: &str| ShardsError::Argument(format!("the index of the shards on S3 is not valid: {reason}"));
    let mut name = None;
    let mut objects = Vec::with_capacity(entries.len());
    for entry in entries {
        let entry: Indexed =
            serde_json::from_str(entry).map_err(|error| fail(&format!("an entry cannot be parsed: {error}")))?;
        if name.get_or_insert_with(|| entry.0.clone()) != &entry.0 {
            return Err(fail("it names more than one bucket"));
        }
        objects.push(Object::from_index(entry).map_err(|error| fail(&error.to_string()))?);
    }
    let bucket = Bucket::connect(&name.ok_or_else(|| fail("it lists no objects"))?, options)?;
    Ok(files(bucket, objects, options))
}

impl Bucket {
    fn key(&self, text: &str) -> Result<Key, ShardsError> {
        Key::parse(text).map_err(|error| {
            ShardsError::Argument(format!("{} is not a valid S3 key: {error}", Url::of(&self.name, text)))
        })
    }

    /// Lists the objects in the folder `prefix`. With `any_depth`, includes the objects in its subfolders. If the
    /// response breaks off, the listing is restarted.
    fn list(&self, prefix: &str, any_depth: bool) -> Result<Vec<ObjectMeta>, ShardsError> {
        let key = self.key(prefix)?;
        let mut retries_left = self.retry.max_retries;
        let mut wait = self.retry.backoff.init_backoff;
        loop {
            let listing = async {
                if any_depth {
                    return self.store.list(Some(&key)).try_collect::<Vec<_>>().await;
                }
                self.store.list_with_delimiter(Some(&key)).await.map(|found| found.objects)
            };
            match self.wait(listing) {
                Ok(found) => return Ok(found),
                Err(error) if failure::kind(&error) == Kind::BrokeOff && retries_left > 0 => {
                    retries_left -= 1;
                    self.wait(async { tokio::time::sleep(wait).await });
                    wait = (2 * wait).min(self.retry.backoff.max_backoff);
                }
                Err(error) => return Err(self.describe(prefix, "listing", &error)),
            }
        }
    }

    fn describe(&self, key: &str, what: &str, error: &object_store::Error) -> ShardsError {
        failure::describe(&Url::of(&self.name, key), what, error, &self.secrets)
    }

    /// The objects that match a glob, sorted like local paths. `base` is a folder that contains all of them.
    fn glob_objects(&self, base: &str, pattern: &str) -> Result<Vec<ObjectMeta>, ShardsError> {
        let fail = |error: glob::PatternError| {
            ShardsError::Argument(format!("{} is not a valid glob: {error}", Url::of(&self.name, pattern)))
        };
        let pattern = glob::Pattern::new(pattern).map_err(fail)?;
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        let mut found = self.list(base, true)?;
        found.retain(|object| pattern.matches_with(object.location.as_ref(), options));
        found.sort_by_key(|object| PathBuf::from(object.location.as_ref()));
        Ok(found)
    }

    /// Finds the objects of a key without wildcards, and the text of the manifest if there is one.
    fn folder_or_object(&self, url: &Url) -> Result<(Vec<ObjectMeta>, Option<Vec<u8>>), ShardsError> {
        let is_likely_object = !url.is_folder && url.key.ends_with(".parquet");
        if is_likely_object && let Some(object) = self.object(&url.key)? {
            return Ok((vec![object], None));
        }
        let (found, manifest_text) = self.folder(&url.key)?;
        if found.is_empty() && manifest_text.is_none() && !url.is_folder && !is_likely_object {
            return Ok((self.object(&url.key)?.into_iter().collect(), None));
        }
        Ok((found, manifest_text))
    }

    fn object(&self, key: &str) -> Result<Option<ObjectMeta>, ShardsError> {
        let path = self.key(key)?;
        match self.wait(self.store.head(&path)) {
            Ok(found) => Ok(Some(found)),
            Err(error) if failure::kind(&error) == Kind::Missing => Ok(None),
            Err(error) => Err(self.describe(key, "looking up the object", &error)),
        }
    }

    fn folder(&self, prefix: &str) -> Result<(Vec<ObjectMeta>, Option<Vec<u8>>), ShardsError> {
        let beneath = |object: &ObjectMeta| -> Option<String> {
            let key: &str = object.location.as_ref();
            let name = if prefix.is_empty() { key } else { key.strip_prefix(prefix)?.strip_prefix('/')? };
            (!name.contains('/')).then(|| name.to_owned())
        };
        let found = self.list(prefix, false)?;
        let mut named: Vec<(String, ObjectMeta)> =
            found.into_iter().filter_map(|object| Some((beneath(&object)?, object))).collect();
        named.sort_by(|one, other| one.0.cmp(&other.0));
        let Some((_, manifest)) = named.iter().find(|(name, _)| name == MANIFEST_NAME) else {
            named.retain(|(name, _)| name.ends_with(".parquet"));
            return Ok((named.into_iter().map(|(_, object)| object).collect(), None));
        };
        let text = self.wait(async { self.store.get(&manifest.location).await?.bytes().await });
        let text =
            text.map_err(|error| self.describe(manifest.location.as_ref(), "reading the manifest", &error))?.to_vec();
        let url = Url::of(&self.name, manifest.location.as_ref());
        let listed = Manifest::parse(&text, &url)?;
        let object = |file: &ManifestFile| {
            let index = named.binary_search_by(|(name, _)| name.as_str().cmp(&file.name));
            index.map(|index| named[index].1.clone()).map_err(|_| {
                let reason = format!("its manifest lists {}, which does not exist", file.name);
                ShardsError::Missing { location: Url::of(&self.name, prefix), reason }
            })
        };
        let objects = listed.files.iter().map(object).collect::<Result<Vec<_>, _>>()?;
        Ok((objects, Some(text)))
    }
}
