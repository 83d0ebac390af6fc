//! A real S3 server (`s3s-fs`) that serves a temporary folder, counts requests and injects faults.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3ServiceBuilder, SharedS3Service};
use tokio::net::{TcpListener, TcpStream};

pub(crate) const ACCESS_KEY: &str = "AKIDEXAMPLE";
pub(crate) const SECRET_KEY: &str = "hunter2-is-no-secret-key";
pub(crate) const BUCKET: &str = "bucket";

/// Which faults the server injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    None,
    /// Every second request fails. The server answers with status 503, closes the connection without a response, or
    /// closes or resets the connection after half of the response.
    Mixed,
    Always503,
    /// The server resets the connection after half of every response.
    AlwaysReset,
}

/// The fault that the server injects into one response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Unavailable,
    CloseBefore,
    CloseAmid,
    ResetAmid,
}

/// The numbers of requests of each kind, and the faults that the server currently injects.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) all: AtomicUsize,
    pub(crate) lists: AtomicUsize,
    /// GET requests for Parquet files.
    pub(crate) gets: AtomicUsize,
    pub(crate) failed: AtomicUsize,
    faults: AtomicUsize,
}

impl Counts {
    fn of(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::SeqCst)
    }
    pub(crate) fn lists(&self) -> usize {
        Self::of(&self.lists)
    }
    pub(crate) fn gets(&self) -> usize {
        Self::of(&self.gets)
    }
    pub(crate) fn all(&self) -> usize {
        Self::of(&self.all)
    }
    pub(crate) fn failed(&self) -> usize {
        Self::of(&self.failed)
    }
}

/// A server that runs until the process ends.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) counts: Arc<Counts>,
    root: PathBuf,
}

impl Server {
    pub(crate) fn start(root: &Path) -> Self {
        std::fs::create_dir_all(root.join(BUCKET)).expect("the folder can be created");
        let counts = Arc::<Counts>::default();
        let (server_counts, folder) = (Arc::clone(&counts), root.to_owned());
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be started");
            runtime.block_on(async move {
                let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder).expect("the folder exists"));
                builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
                let service = builder.build().into_shared();
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
                send.send(listener.local_addr().expect("the listener has an address"))
                    .expect("the test waits for the address");
                loop {
                    let (stream, _) = listener.accept().await.expect("the listener is open");
                    tokio::spawn(serve(stream, service.clone(), Arc::clone(&server_counts)));
                }
            });
        });
        Self { address: receive.recv().expect("the server sends its address"), counts, root: root.to_owned() }
    }

    pub(crate) fn fail(&self, faults: Faults) {
        self.counts.faults.store(faults as usize, Ordering::SeqCst);
    }

    pub(crate) fn path(&self, key: &str) -> PathBuf {
        self.root.join(BUCKET).join(key)
    }

    /// Environment variables for a client of this server.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT", &format!("http://{}", self.address)),
            ("AWS_ALLOW_HTTP", "true"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }
}

async fn serve(stream: TcpStream, service: SharedS3Service, counts: Arc<Counts>) {
    let stream = stream.into_std().expect("the socket is open");
    let twin = TcpStream::from_std(stream.try_clone().expect("the socket is open")).expect("the socket is open");
    let twin = Arc::new(twin);
    let stream = TcpStream::from_std(stream).expect("the socket is open");
    let answer = service_fn(move |request| respond(request, service.clone(), Arc::clone(&counts), Arc::clone(&twin)));
    // The result is ignored, because injected faults end the connection with an error.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

fn fault(counts: &Counts, number: usize) -> Fault {
    let faults = counts.faults.load(Ordering::SeqCst);
    match (faults, number % 8) {
        (faults, 1) if faults == Faults::Mixed as usize => Fault::Unavailable,
        (faults, 3) if faults == Faults::Mixed as usize => Fault::CloseBefore,
        (faults, 5) if faults == Faults::Mixed as usize => Fault::CloseAmid,
        (faults, 7) if faults == Faults::Mixed as usize => Fault::ResetAmid,
        (faults, _) if faults == Faults::Always503 as usize => Fault::Unavailable,
        (faults, _) if faults == Faults::AlwaysReset as usize => Fault::ResetAmid,
        _ => Fault::None,
    }
}

async fn respond(
    request: Request<Incoming>,
    service: SharedS3Service,
    counts: Arc<Counts>,
    socket: Arc<TcpStream>,
) -> Result<Response<Answer>, std::io::Error> {
    let number = counts.all.fetch_add(1, Ordering::SeqCst);
    let is_list = request.uri().query().is_some_and(|query| query.contains("list-type"));
    if is_list {
        counts.lists.fetch_add(1, Ordering::SeqCst);
    } else if *request.method() == Method::GET && request.uri().path().ends_with(".parquet") {
        counts.gets.fetch_add(1, Ordering::SeqCst);
    }
    let fault = fault(&counts, number);
    if fault != Fault::None {
        counts.failed.fetch_add(1, Ordering::SeqCst);
    }
    match fault {
        Fault::Unavailable => {
            let body =
                "<Error><Code>SlowDown</Code><Message>reduce your rate, hunter2-is-no-secret-key</Message></Error>";
            let answer = Answer { bytes: Bytes::from_static(body.as_bytes()), breaks: false };
            return Ok(Response::builder().status(503).body(answer).expect("the status is valid"));
        }
        Fault::CloseBefore => return Err(std::io::Error::other("the server closes the connection")),
        // With a linger time of zero, closing the socket sends a TCP reset (RST) instead of a regular end (FIN).
        Fault::ResetAmid => socket.set_zero_linger().expect("the socket is open"),
        Fault::None | Fault::CloseAmid => {}
    }
    let response = hyper::service::Service::call(&service, request)
        .await
        .map_err(|_| std::io::Error::other("the S3 service failed"))?;
    let (mut parts, mut body) = response.into_parts();
    let mut bytes = body.store_all_unlimited().await.map_err(std::io::Error::other)?;
    let breaks = matches!(fault, Fault::CloseAmid | Fault::ResetAmid);
    if breaks {
        parts.headers.insert("content-length", bytes.len().max(1).into());
        bytes.truncate(bytes.len() / 2);
    }
    Ok(Response::from_parts(parts, Answer { bytes, breaks }))
}

/// The body of a response. If `breaks` is true, `bytes` is only the first half of the body, and the connection breaks
/// after these bytes.
struct Answer {
    bytes: Bytes,
    breaks: bool,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if !self.bytes.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.bytes)))));
        }
        if std::mem::take(&mut self.breaks) {
            return Poll::Ready(Some(Err(std::io::Error::other("the server breaks the connection"))));
        }
        Poll::Ready(None)
    }
}
