//! Error messages for S3 failures. They contain the URL, the request and the server's response, but no secrets.

use std::error::Error as _;
use std::io::{self, ErrorKind};

use object_store::Error;
use object_store::client::HttpError;

use crate::shards::error::ShardsError;

/// Names of the environment variables for credentials and server.
const VARIABLES: &str = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT";

/// Values that must not appear in messages.
#[derive(Clone, Default)]
pub(super) struct Secrets(pub(super) Vec<String>);

impl Secrets {
    fn hide(&self, text: &str) -> String {
        // Values of up to three characters are not replaced. They are not real secrets, and replacing them would garble
        // every message.
        let secrets = self.0.iter().filter(|secret| secret.len() > 3);
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "***"))
    }
}

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The object or bucket does not exist.
    Missing,
    /// The server rejected the credentials.
    Refused,
    /// The object has changed since it was opened.
    Changed,
    /// The connection broke during the response.
    BrokeOff,
    /// Anything else.
    Other,
}

/// Classifies an error by the server's response.
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
        // For a failed listing, only the text of the error contains the HTTP status.
        match text.split_once("status code: ").map(|(_, status)| status.get(..3).unwrap_or_default()) {
            Some("404") => return Kind::Missing,
            Some("401" | "403") => return Kind::Refused,
            // The requested range was within the object when it was opened, so 416 means that the object has changed.
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

/// Builds the error for a failed request. `what` describes the request, for example by its byte range.
pub(super) fn describe(url: &str, what: &str, error: &Error, secrets: &Secrets) -> ShardsError {
    let text = error.to_string();
    let tries = tries(&text);
    let answer = secrets.hide(&answer(error, &text));
    let kind = kind(error);
    let io_kind = match kind {
        Kind::Missing => {
            let reason = format!(
                "{what}: {answer}; check the URL, and check AWS_ENDPOINT and AWS_REGION, which choose the server"
            );
            return ShardsError::Missing { location: url.to_owned(), reason };
        }
        Kind::Changed => {
            let reason = format!("{what}: {answer}");
            return ShardsError::Changed { location: url.to_owned(), reason };
        }
        Kind::Refused => {
            let message = format!("{what}: {answer}; check the environment variables {VARIABLES}");
            return ShardsError::io(url, io::Error::new(ErrorKind::PermissionDenied, message));
        }
        // The launcher restarts the workers after errors of the kind `TimedOut` (see `FailureKind::of_io`).
        Kind::BrokeOff => ErrorKind::TimedOut,
        Kind::Other if is_outage(&text) => ErrorKind::TimedOut,
        Kind::Other => ErrorKind::Other,
    };
    let tries = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
    ShardsError::io(url, io::Error::new(io_kind, format!("{what}: gave up after {tries}: {answer}")))
}

/// Whether the server did not answer, or answered that it cannot serve the request now.
fn is_outage(text: &str) -> bool {
    let status = text.split_once("status code: ").or_else(|| text.split_once("error response: "));
    let status = status.map(|(_, status)| status.get(..3).unwrap_or_default());
    match status {
        Some(status) => status.starts_with('5') || matches!(status, "408" | "429"),
        None => text.contains("Error performing"),
    }
}

/// The error for missing credentials.
pub(super) fn no_credentials(url: &str) -> ShardsError {
    let message = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment; \
                   for a public bucket, set AWS_SKIP_SIGNATURE=true; \
                   for the role of a cloud machine, set AWS_METADATA_ENDPOINT=http://169.254.169.254";
    ShardsError::io(url, io::Error::new(ErrorKind::PermissionDenied, message))
}

/// Number of tries. The client reports this number only in the text of its error.
fn tries(text: &str) -> u64 {
    let retries = text.split_once(", after ").and_then(|(_, rest)| rest.split_once(" retries"));
    retries.and_then(|(number, _)| number.parse::<u64>().ok()).unwrap_or(0) + 1
}

/// The server's response in one line, or the innermost cause of the error if there was no response.
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

/// The first 200 characters of the text of an XML element.
fn element(body: &str, name: &str) -> Option<String> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once('<')?;
    Some(text.chars().take(200).collect())
}
