//! The HTTP server: connections, limits, and what each path answers. It runs on a thread of its own, so that the main
//! thread is free for the worker and for signals.
//!
//! Every error is a JSON object with the field `error`. Only requests that are not HTTP at all get a status without a
//! body, from the HTTP library.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue,
    REFERRER_POLICY, RETRY_AFTER, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use locdiff_core::answers::{WrittenRow, json_object};
use locdiff_core::geo::order_and_cell;
use locdiff_core::protocol::PredictedRow;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::desk::{Desk, NoAnswer};
use super::guard::{Guard, check_site};
use super::page::Page;
use super::question::{BadQuestion, ROWS_MAX, ServeQuestion, row_name};
use crate::verbs::eval::radii::SavedCalibration;

/// Most connections at a time.
const CONNECTIONS_MAX: usize = 256;
/// Most embeddings of a request for densities. A density may have 20,000 cells.
const DENSITIES_MAX: usize = 8;
/// Time for the headers of a request. A connection without a request is closed after this time.
const HEADERS_TIME: Duration = Duration::from_secs(30);
/// Age at which a connection is closed after its current request.
const CONNECTION_TIME: Duration = Duration::from_secs(600);
/// Largest body of a request, bytes.
const BODY_BYTES_MAX: u64 = 4 << 20;
/// Most bytes of a refused body that are read.
const DRAINED_BYTES_MAX: usize = 32 << 20;
/// Memory for the headers of a request, bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// The answer to a connection that is one too many.
const TOO_MANY_CONNECTIONS: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: \
    1\r\nConnection: close\r\nContent-Length: 48\r\n\r\n{\"error\":\"too many connections; try again soon\"}";

const SERVER_THREAD: &str = "http";

/// A policy under which nothing can be loaded or shown in a frame.
const CLOSED_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";

type HttpAnswer = Response<Full<Bytes>>;

/// How long clients and the worker may take.
#[derive(Debug, Clone, Copy)]
struct TimeLimits {
    /// Time for the body of a request.
    body: Duration,
    /// Time for the rest of a refused body. A client that still sends its body could not read the refusal.
    drain: Duration,
    /// Time until a request is answered.
    answer: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self { body: Duration::from_secs(10), drain: Duration::from_secs(2), answer: Duration::from_secs(60) }
    }
}

/// All that is needed to answer a request.
pub(super) struct Site {
    desk: Arc<Desk>,
    guard: Guard,
    limits: TimeLimits,
    calibration: Option<SavedCalibration>,
    /// Facts for `/healthz`.
    facts: Value,
    page: Page,
}

/// Starts the thread of the server.
pub(super) fn start(listener: std::net::TcpListener, site: Site) -> anyhow::Result<()> {
    listener.set_nonblocking(true).context("cannot prepare the socket")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let listener = {
        let _within = runtime.enter();
        TcpListener::from_std(listener).context("cannot prepare the socket")?
    };
    let serve = move || runtime.block_on(accept(listener, Arc::new(site)));
    std::thread::Builder::new().name(SERVER_THREAD.into()).spawn(serve).context("cannot start a thread")?;
    Ok(())
}

async fn accept(listener: TcpListener, site: Arc<Site>) {
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (mut stream, client) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        match Arc::clone(&free).try_acquire_owned() {
            Ok(permit) => {
                let site = Arc::clone(&site);
                tokio::spawn(async move {
                    serve_connection(stream, client.ip(), &site).await;
                    drop(permit);
                });
            }
            // The socket is new, so these few bytes fit into its buffer at once.
            Err(_) => drop(timeout(Duration::from_millis(10), stream.write_all(TOO_MANY_CONNECTIONS)).await),
        }
    }
}

/// Answers the requests of a connection until it closes or is too old. Its errors are of no interest: the client is gone,
/// or has got a status.
async fn serve_connection(stream: TcpStream, client: IpAddr, site: &Site) {
    let Ok(own) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| async move { Ok::<_, Infallible>(site.answer(request, client, own).await) });
    let mut builder = http1::Builder::new();
    // A client that has sent its request may close its half of the connection and still gets the answer.
    builder.half_close(true);
    builder.timer(TokioTimer::new()).header_read_timeout(HEADERS_TIME).max_buf_size(BUFFER_BYTES);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        _ = connection.as_mut() => return,
        () = tokio::time::sleep(CONNECTION_TIME) => connection.as_mut().graceful_shutdown(),
    }
    let _ = timeout(site.limits.answer + site.limits.body, connection).await;
}

/// A status other than 200, with its reason.
struct Refusal {
    status: StatusCode,
    text: String,
    header: Option<(HeaderName, HeaderValue)>,
}

impl Refusal {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), header: None }
    }

    fn with(self, name: HeaderName, value: &'static str) -> Self {
        Self { header: Some((name, HeaderValue::from_static(value))), ..self }
    }

    /// A refusal of a request that may succeed later.
    fn later(status: StatusCode, text: impl Into<String>) -> Self {
        Self::new(status, text).with(RETRY_AFTER, "1")
    }
}

impl From<NoAnswer> for Refusal {
    fn from(reason: NoAnswer) -> Self {
        match reason {
            NoAnswer::Refused(text) => Self::new(StatusCode::BAD_REQUEST, text),
            NoAnswer::Closed(text) => Self::later(StatusCode::SERVICE_UNAVAILABLE, text),
            NoAnswer::Full => {
                Self::later(StatusCode::SERVICE_UNAVAILABLE, "too many photos are waiting; try again soon")
            }
        }
    }
}

impl Site {
    /// A site that asks `desk`. `facts` are shown at `/healthz`.
    pub(super) fn new(desk: Arc<Desk>, guard: Guard, calibration: Option<SavedCalibration>, facts: Value) -> Self {
        Self { desk, guard, limits: TimeLimits::default(), calibration, facts, page: Page::new() }
    }

    async fn answer(&self, request: Request<Incoming>, client: IpAddr, own: SocketAddr) -> HttpAnswer {
        let (head, mut body) = request.into_parts();
        let mut answer = match self.route(&head, &mut body, client, own).await {
            Ok(answer) => answer,
            Err(refusal) => {
                // A client that waits for "100 Continue" sends no body after a refusal.
                if !head.headers.contains_key(EXPECT) {
                    let _ = timeout(self.limits.drain, drain(&mut body)).await;
                }
                let mut answer = json_answer(refusal.status, &json!({ "error": refusal.text }));
                answer.headers_mut().extend(refusal.header);
                answer
            }
        };
        let headers = answer.headers_mut();
        headers.entry(CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(CLOSED_POLICY));
        for (name, value) in [
            (CACHE_CONTROL, "no-store"),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (REFERRER_POLICY, "no-referrer"),
            (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        answer
    }

    async fn route(
        &self,
        head: &Parts,
        body: &mut Incoming,
        client: IpAddr,
        own: SocketAddr,
    ) -> Result<HttpAnswer, Refusal> {
        if !self.guard.allows(client, Instant::now()) {
            return Err(Refusal::later(StatusCode::TOO_MANY_REQUESTS, "too many requests from this address"));
        }
        check_site(head, own).map_err(|text| Refusal::new(StatusCode::FORBIDDEN, text))?;
        let is_read = head.method == Method::GET || head.method == Method::HEAD;
        let wanted = match head.uri.path() {
            "/" if is_read => return Ok(self.page.answer()),
            "/healthz" if is_read => return self.health(),
            "/predict" if head.method == Method::POST => return self.predict(head, body).await,
            "/" | "/healthz" => "GET, HEAD",
            "/predict" => "POST",
            path => {
                let text = format!("no page {path:?}; known: GET /, GET /healthz, POST /predict");
                return Err(Refusal::new(StatusCode::NOT_FOUND, text));
            }
        };
        let text = format!("{} {} is not possible, wanted {wanted}", head.method, head.uri.path());
        Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text).with(ALLOW, wanted))
    }

    /// Whether a worker serves, and what.
    fn health(&self) -> Result<HttpAnswer, Refusal> {
        let model = self.desk.model()?;
        let mut found = json!({ "ok": true, "step": model.step, "width": model.width, "rows_max": ROWS_MAX });
        if let (Value::Object(found), Value::Object(facts)) = (&mut found, &self.facts) {
            found.extend(facts.clone());
            found.insert("density".to_owned(), json!(self.has_densities()));
        }
        Ok(json_answer(StatusCode::OK, &found))
    }

    async fn predict(&self, head: &Parts, body: &mut Incoming) -> Result<HttpAnswer, Refusal> {
        if !self.guard.has_token(head) {
            let text = "the token is missing or wrong; send `Authorization: Bearer TOKEN`";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, text).with(WWW_AUTHENTICATE, "Bearer"));
        }
        check_type_and_length(head)?;
        let width = self.desk.model()?.width as usize;
        let question = match ServeQuestion::parse(&self.read(body).await?, width) {
            Ok(question) => question,
            Err(BadQuestion::TooMany(text)) => return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text)),
            Err(BadQuestion::Wrong(text)) => return Err(Refusal::new(StatusCode::BAD_REQUEST, text)),
        };
        if question.with_density && !self.has_densities() {
            let text = "there are no densities, because the model has no temperature for these settings; `eval \
                        --calibrate` measures it for a run, and `checkpoint export` exports it";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, text));
        }
        if question.with_density && question.embeddings.len() > DENSITIES_MAX {
            let count = question.embeddings.len();
            let text = format!("{count} embeddings with \"density\": true, wanted at most {DENSITIES_MAX}");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        let ServeQuestion { embeddings, ids, with_samples, with_density, is_single } = question;
        let limit = self.limits.answer;
        let rows = timeout(limit, self.locate(embeddings, with_density)).await.map_err(|_| {
            let text = format!("there was no answer within {} s", limit.as_secs_f64());
            Refusal::later(StatusCode::SERVICE_UNAVAILABLE, text)
        })??;
        let rows = rows.into_iter().zip(ids).map(|(row, id)| PredictedRow { id, ..row });
        let mut rows: Vec<Value> = rows.map(|row| self.written(row, with_samples)).collect();
        let found = if is_single { rows.pop().unwrap_or_default() } else { json!({ "rows": rows }) };
        Ok(json_answer(StatusCode::OK, &found))
    }

    /// Reads a body. Its Content-Length, which the HTTP library enforces, has been checked.
    async fn read(&self, body: &mut Incoming) -> Result<Bytes, Refusal> {
        match timeout(self.limits.body, body.collect()).await {
            Ok(Ok(whole)) => Ok(whole.to_bytes()),
            Ok(Err(error)) => Err(Refusal::new(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}"))),
            Err(_) => {
                let text = format!("the body did not arrive within {} s", self.limits.body.as_secs_f64());
                Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, text))
            }
        }
    }

    fn has_densities(&self) -> bool {
        self.calibration.as_ref().is_some_and(|saved| saved.density.is_some())
    }

    /// Waits until all photos are located. Fails with the first photo that cannot be located.
    async fn locate(&self, embeddings: Vec<Vec<u16>>, with_density: bool) -> Result<Vec<PredictedRow>, Refusal> {
        let count = embeddings.len();
        let mut rows = Vec::with_capacity(count);
        for (row, reply) in self.desk.ask(embeddings, with_density)?.into_iter().enumerate() {
            let found = reply.await.unwrap_or_else(|_| Err(NoAnswer::Closed("the worker gave no answer".to_owned())));
            rows.push(found.map_err(|reason| match reason {
                NoAnswer::Refused(text) => NoAnswer::Refused(format!("{}: {text}", row_name(row, count))),
                other => other,
            })?);
        }
        Ok(rows)
    }

    /// A row as a JSON object, like a line of `predict`.
    fn written(&self, mut row: PredictedRow, with_samples: bool) -> Value {
        let cells = std::mem::take(&mut row.density.cells);
        let radii_km = self.calibration.as_ref().map(|saved| saved.calibration.radii_km(row.spread_km));
        let mut found = json_object(&WrittenRow { row, radii_km }, with_samples);
        if let Value::Object(fields) = &mut found
            && !cells.is_empty()
        {
            fields.insert("density".to_owned(), cells.into_iter().map(cell_json).collect());
        }
        found
    }
}

/// A cell of a density as JSON: its order, its number in the nested scheme, and its probability.
fn cell_json((unique, probability): (u64, f32)) -> Value {
    let (order, cell) = order_and_cell(unique);
    // With the digits that an f32 has.
    json!([order, cell, probability.to_string().parse::<f64>().unwrap_or_default()])
}

/// Checks what the headers say about the body.
fn check_type_and_length(head: &Parts) -> Result<(), Refusal> {
    let text = |name: &HeaderName| head.headers.get(name).and_then(|value| value.to_str().ok());
    let media = text(&CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !media.eq_ignore_ascii_case("application/json") {
        let text = format!("Content-Type is {media:?}, wanted application/json");
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
    }
    let Some(length) = text(&CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()) else {
        return Err(Refusal::new(StatusCode::LENGTH_REQUIRED, "the request has no Content-Length"));
    };
    if length > BODY_BYTES_MAX {
        let text = format!("the body has {length} bytes, wanted at most {BODY_BYTES_MAX}");
        return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    Ok(())
}

/// Reads the rest of a body and forgets it, unless it is too long.
async fn drain(body: &mut Incoming) {
    let mut left = DRAINED_BYTES_MAX;
    while !body.is_end_stream()
        && let Some(Ok(frame)) = body.frame().await
    {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return;
        }
    }
}

/// An answer with one line of JSON.
fn json_answer(status: StatusCode, value: &Value) -> HttpAnswer {
    let mut answer = Response::new(Full::from(format!("{value}\n")));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
