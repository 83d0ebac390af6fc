//! What is said when a server cannot be had or refuses: URL, range, number of tries, the server's answer, and no secret.

use std::error::Error as _;
use std::io::{self, ErrorKind};

use object_store::Error;
use object_store::client::HttpError;

use crate::shards::error::ShardsError;

/// Where credentials come from.
const VARIABLES: &str = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT";

/// Values that no message may show.
#[derive(Clone, Default)]
pub(super) struct Secrets(pub(super) Vec<String>);

impl Secrets {
    fn hide(&self, text: &str) -> String {
        // A secret of a letter or two would garble every message, and is none.
        let secrets = self.0.iter().filter(|secret| secret.len() > 3);
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "***"))
    }
}

/// What kind of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// No such object or bucket.
    Missing,
    /// Not with these credentials.
    Refused,
    /// The object is not the one that was opened.
    Changed,
    /// The answer began and broke off.
    BrokeOff,
    /// Anything else.
    Other,
}

/// Sorts an error by what the server answered.
pub(super) fn kind(error: &Error) -> Kind {
    let direct = match error {
        Error::NotFound { .. } => Kind::Missing,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Kind::Refused,
        Error::Precondition { .. } | Error::NotModified { .. } => Kind::Changed,
        _ => Kind::Other,
    };
    if direct != Kind::Other {
        return direct;
    }
    let mut requested = false;
    let mut source = error.source();
    while let Some(link) = source {
        if let Some(inner) = link.downcast_ref::<Error>() {
            return kind(inner);
        }
        let text = link.to_string();
        requested |= text.starts_with("Error performing");
        // A listing's error has its status in the text alone.
        match text.split_once("status code: ").map(|(_, status)| status.get(..3).unwrap_or_default()) {
            Some("404") => return Kind::Missing,
            Some("401" | "403") => return Kind::Refused,
            // The size was known: a range outside of it was inside before.
            Some("412" | "416") => return Kind::Changed,
            _ => {}
        }
        if link.is::<HttpError>() && !requested {
            return Kind::BrokeOff;
        }
        source = link.source();
    }
    Kind::Other
}

/// The error for the user. `what` is what was asked for, such as a range.
pub(super) fn describe(url: &str, what: &str, error: &Error, secrets: &Secrets) -> ShardsError {
    let text = error.to_string();
    let tries = tries(&text);
    let answer = secrets.hide(&answer(error, &text));
    let kind = kind(error);
    let io_kind = match kind {
        Kind::Missing => {
            let reason = format!("{what}: {answer}; AWS_ENDPOINT and AWS_REGION choose the server");
            return ShardsError::Missing { location: url.to_owned(), reason };
        }
        Kind::Changed => {
            let reason = format!("{what}: {answer}");
            return ShardsError::Changed { location: url.to_owned(), reason };
        }
        Kind::Refused => {
            let message = format!("{what}: {answer}; credentials come from {VARIABLES}");
            return ShardsError::io(url, io::Error::new(ErrorKind::PermissionDenied, message));
        }
        Kind::BrokeOff => ErrorKind::UnexpectedEof,
        Kind::Other => ErrorKind::Other,
    };
    let tries = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
    ShardsError::io(url, io::Error::new(io_kind, format!("{what}: gave up after {tries}: {answer}")))
}

/// No credentials at all.
pub(super) fn no_credentials(url: &str) -> ShardsError {
    let message = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, \
                   AWS_SKIP_SIGNATURE=true for a public bucket, or \
                   AWS_METADATA_ENDPOINT=http://169.254.169.254 for the role of a cloud machine";
    ShardsError::io(url, io::Error::new(ErrorKind::PermissionDenied, message))
}

/// How often it was tried: the client says it in its text alone.
fn tries(text: &str) -> u64 {
    let retries = text.split_once(", after ").and_then(|(_, rest)| rest.split_once(" retries"));
    retries.and_then(|(number, _)| number.parse::<u64>().ok()).unwrap_or(0) + 1
}

/// The server's answer in one line; where there was none, the innermost cause.
fn answer(error: &Error, text: &str) -> String {
    let status = text.split_once("status code: ").or_else(|| text.split_once("error response: "));
    if let Some((_, status)) = status {
        let (status, body) = status.split_once(": ").unwrap_or((status, ""));
        let parts = [element(body, "Code"), element(body, "Message")];
        let parts: Vec<String> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
        return if parts.is_empty() { status.to_owned() } else { format!("{status}, {}", parts.join(": ")) };
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// The text of an XML element, cut to a length that a message bears.
fn element(body: &str, name: &str) -> Option<String> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once('<')?;
    Some(text.chars().take(200).collect())
}
