//! Tests of the limits of the server. The worker is played by the tests themselves.

use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;

use locdiff_core::protocol::{RefusedPhoto, ServedModel, ToWorker};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;

/// Embeddings have this many numbers.
const WIDTH: u32 = 2;

/// A server, the desk behind it, and the photos for its worker.
struct Server {
    address: SocketAddr,
    desk: Arc<Desk>,
    orders: UnboundedReceiver<ToWorker>,
}

impl Server {
    /// Starts a server that already has a model. `prepare` may change its limits.
    fn start(prepare: impl FnOnce(&mut Site)) -> Self {
        let (desk, orders) = Desk::new();
        desk.open(ServedModel { step: 1, width: WIDTH, head: None, gallery_points: None });
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a free port");
        let address = listener.local_addr().expect("the socket is bound");
        let mut site = Site::new(Arc::clone(&desk), Guard::new(None), None, json!({}));
        prepare(&mut site);
        start(listener, site).expect("a thread can be started");
        Self { address, desk, orders }
    }

    /// Sends a request, and returns the connection.
    fn send(&self, method_and_path: &str, length: usize, body: &str) -> std::net::TcpStream {
        let mut stream = std::net::TcpStream::connect(self.address).expect("the server listens");
        let request = format!(
            "{method_and_path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}",
            self.address
        );
        stream.write_all(request.as_bytes()).expect("the server reads");
        stream
    }

    fn post(&self, body: &str) -> std::net::TcpStream {
        self.send("POST /predict", body.len(), body)
    }
}

/// The whole answer of a connection.
fn answer(mut stream: std::net::TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the server answers and closes");
    text
}

#[track_caller]
fn assert_refused(answer: &str, status: &str, text: &str, may_retry: bool) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    assert!(answer.contains(&format!("{{\"error\":\"{text}\"}}")), "{answer}");
    assert_eq!(answer.contains("retry-after: 1\r\n"), may_retry, "{answer}");
}

#[test]
fn body_that_does_not_arrive_is_refused_in_time() {
    let short = Duration::from_millis(20);
    let server = Server::start(|site| site.limits = TimeLimits { body: short, drain: short, ..site.limits });
    // The connection stays open, and the rest of the body never comes.
    let found = answer(server.send("POST /predict", 100, "[1,"));
    assert_refused(&found, "408", "the body did not arrive within 0.02 s", false);
}

#[test]
fn worker_that_is_too_slow_does_not_keep_its_clients_waiting() {
    let mut server = Server::start(|site| site.limits.answer = Duration::from_millis(20));
    let found = answer(server.post("[1, 2]"));
    assert_refused(&found, "503", "there was no answer within 0.02 s", true);
    // The worker answers too late, which disturbs nobody.
    let Some(ToWorker::Locate(photo)) = server.orders.blocking_recv() else { panic!("the worker got no photo") };
    server.desk.refuse(RefusedPhoto { number: photo.number, reason: "late".to_owned() });
    assert!(answer(server.send("GET /healthz", 0, "")).starts_with("HTTP/1.1 200 "));
}

#[test]
fn client_that_asks_too_often_is_told_to_wait() {
    for path in ["GET /healthz", "GET /", "POST /predict"] {
        let server = Server::start(|site| {
            // All that a client may ask until ten seconds from now.
            let later = Instant::now() + Duration::from_secs(10);
            while site.guard.allows(Ipv4Addr::LOCALHOST.into(), later) {}
        });
        let found = answer(server.send(path, 0, ""));
        assert_refused(&found, "429", "too many requests from this address", true);
    }
}

#[test]
fn photos_beyond_the_limit_are_refused_until_others_are_answered() {
    let mut server = Server::start(|_| ());
    let body = format!("{{\"embeddings\": [{}]}}", vec!["[1, 2]"; ROWS_MAX].join(","));
    let waiting: Vec<_> = (0..1024 / ROWS_MAX).map(|_| server.post(&body)).collect();
    let orders: Vec<_> = (0..1024).filter_map(|_| server.orders.blocking_recv()).collect();
    assert_refused(&answer(server.post("[1, 2]")), "503", "too many photos are waiting; try again soon", true);
    for order in orders {
        let ToWorker::Locate(photo) = order else { panic!("not a photo: {order:?}") };
        server.desk.refuse(RefusedPhoto { number: photo.number, reason: "no direction".to_owned() });
    }
    for stream in waiting {
        assert_refused(&answer(stream), "400", "embedding 1 of 64: no direction", false);
    }
    let client = server.post("[1, 2]");
    assert!(server.orders.blocking_recv().is_some(), "the photo was not passed to the worker");
    server.desk.close("the worker has ended and is being started again");
    assert_refused(&answer(client), "503", "the worker has ended and is being started again", true);
}

#[test]
fn densities_of_a_run_without_a_temperature_are_refused() {
    let server = Server::start(|_| ());
    let found = answer(server.post("{\"embeddings\": [[1, 2]], \"density\": true}"));
    let text = "there are no densities, because the model has no temperature for these settings; `eval --calibrate` \
                measures it for a run, and `checkpoint export` exports it";
    assert_refused(&found, "400", text, false);
    let health = answer(server.send("GET /healthz", 0, ""));
    assert!(health.contains("\"density\":false"), "{health}");
}
