//! The page: one HTML document with its script and its style, which the content security policy allows by their hashes.
//! It loads nothing, and connects only to the service itself.

use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use locdiff_core::tables::{AUTHOR_NAMES, EMBEDDING_NAMES, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES};

use crate::verbs::report::{MAP_SCRIPT, MAP_STYLE, land_json, source_hash};

const STYLE: &str = include_str!("page/serve.css");
const SCRIPT: &str = concat!(
    include_str!("page/files.js"),
    include_str!("page/globe.js"),
    include_str!("page/density.js"),
    include_str!("page/serve.js"),
);

/// The page, with its policy.
pub(super) struct Page {
    html: Bytes,
    policy: HeaderValue,
}

impl Page {
    /// Puts the page together.
    pub(super) fn new() -> Self {
        let others = [ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, AUTHOR_NAMES].concat();
        let columns =
            format!("const [EMBEDDING_COLUMNS, OTHER_COLUMNS] = {};\n", serde_json::json!([EMBEDDING_NAMES, others]));
        let (style, script) = (format!("{MAP_STYLE}{STYLE}"), format!("{columns}{MAP_SCRIPT}{SCRIPT}"));
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'",
            source_hash(&script),
            source_hash(&style),
        );
        let html = include_str!("page/page.html");
        let parts = [("{style}", &style), ("{land}", &land_json()), ("{script}", &script)];
        let html = parts.into_iter().fold(html.to_owned(), |html, (mark, part)| html.replacen(mark, part, 1));
        let policy = HeaderValue::from_str(&policy).expect("hashes in base64 are ASCII");
        Self { html: html.into(), policy }
    }

    /// The page as an answer.
    pub(super) fn answer(&self) -> Response<Full<Bytes>> {
        let mut answer = Response::new(Full::from(self.html.clone()));
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, self.policy.clone());
        answer
    }
}
