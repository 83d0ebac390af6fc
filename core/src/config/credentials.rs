//! Finds passwords and signatures in URLs. Such URLs are refused before anything is written, because a run's
//! `config.toml` and logs would keep the secrets.

/// Why a URL with credentials is refused. The message must not repeat the URL.
pub const NO_CREDENTIALS: &str = "must not contain credentials (they would appear in logs and saved configurations); \
    instead, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment";

/// Whether `location` is a URL that contains a user name, a password or a signature.
pub fn has_credentials(location: &str) -> bool {
    let Some((scheme, rest)) = location.split_once("://") else { return false };
    let (host, key) = rest.split_once('/').unwrap_or((rest, ""));
    // In `s3://KEY:SECRET@BUCKET`, the secret may contain a slash. In this case, `host` ends at the slash and contains
    // no `@`. So a colon in `host` also counts as a sign of a password, unless a port follows the colon.
    let has_port = |port: &str| scheme != "s3" && port.bytes().all(|byte| byte.is_ascii_digit());
    let has_password = host.contains('@') || host.split_once(':').is_some_and(|(_, port)| !has_port(port));
    let query = key.split_once('?').map_or("", |(_, query)| query);
    has_password || query.contains("X-Amz-") || query.contains("Signature=")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Layer, load};

    #[test]
    fn credentials_are_found_in_every_form() {
        for location in [
            "s3://KEY:hunter2@data/x",
            "s3://KEY:hunt/er2@data/x",
            "s3://token@data/x",
            "s3://data/x?X-Amz-Signature=hunter2",
            "https://me:hunter2@host:9000/x",
            "https://me:hunt/er2@host/x",
        ] {
            assert!(has_credentials(location), "{location}");
        }
        for location in ["", "shards/me@home:7", "s3://data/a@b:c?", "https://host:9000/x", "s3://data/x?.parquet"] {
            assert!(!has_credentials(location), "{location}");
        }
    }

    #[test]
    fn any_field_with_credentials_is_refused_without_repeating_them() {
        for key in ["shards.train", "shards.test", "eval.truth", "checkpoint.dir", "train.init_from"] {
            let error = load(&[Layer::Set(format!("{key}=s3://KEY:hunter2@data/x"))]).expect_err(key).to_string();
            assert!(error.contains(&format!("{key}: must not contain credentials")), "{error}");
            assert!(!error.contains("hunter2"), "the message repeats the password: {error}");
        }
    }
}
