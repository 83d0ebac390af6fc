//! Tests of `serve`: the bytes of its answers, bad requests, ends of its worker, and its page in a browser (`page`).

mod page;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use locdiff_core::random::{SPLITMIX_INCREMENT, splitmix};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::density::{calibrated, densities};
use super::support::stage;
use crate::small_shards::{WIDTH, embedding, npy};
use crate::stage::{Stage, eventually, is_alive, signal, wait, workers_of};

/// Longest time until a service is back after the end of its worker. It takes about a second, but other tests may use the
/// machine too.
const BACK_WITHIN: Duration = Duration::from_secs(20);

/// A running service.
pub(super) struct Service {
    child: Child,
    port: u16,
}

impl Service {
    /// Starts `serve` with more flags, and waits until it is ready.
    pub(super) fn start(stage: &Stage, flags: &str) -> Self {
        let bind = if flags.contains("--bind") { "" } else { "--bind 127.0.0.1:0" };
        let mut command = stage.command(&format!("--json serve {bind} {flags}"));
        let errors = std::fs::File::create(stage.path().join("serve.log")).expect("the test folder is writable");
        let mut child = command.stdout(Stdio::piped()).stderr(errors).spawn().expect("the launcher can be started");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("stdout can be read");
        let found: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}{}", log(stage)));
        let url = found["url"].as_str().expect("the result has a URL");
        let port = url.trim_end_matches('/').rsplit(':').next().and_then(|port| port.parse().ok());
        Self { child, port: port.unwrap_or_else(|| panic!("no port in {url}")) }
    }

    fn worker(&self) -> u32 {
        workers_of(self.child.id())[0]
    }

    pub(super) fn post(&self, body: &str) -> (u16, String) {
        self.send(post_text(self.port, body).as_bytes())
    }

    /// Sends bytes, and returns the status and the body of the answer.
    fn send(&self, request: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the service listens");
        // The service may answer and close before it has read everything.
        let _ = stream.write_all(request).and_then(|()| stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
        (status, answer.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned()))
    }

    /// Sends a signal and returns the exit code.
    pub(super) fn end(mut self, with: Signal) -> Option<i32> {
        let worker = self.worker();
        signal(self.child.id(), with);
        let code = wait(&mut self.child);
        eventually("the worker ends", || !is_alive(worker));
        code
    }
}

fn log(stage: &Stage) -> String {
    std::fs::read_to_string(stage.path().join("serve.log")).unwrap_or_default()
}

fn post_text(port: u16, body: &str) -> String {
    let length = body.len();
    format!(
        "POST /predict HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}

/// An embedding as a JSON list.
pub(super) fn numbers(row: usize) -> String {
    json!(embedding(row, 0).collect::<Vec<f32>>()).to_string()
}

fn error_of((status, body): &(u16, String)) -> (u16, String) {
    let found: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{status} {body:?}: {error}"));
    (*status, found["error"].as_str().unwrap_or_else(|| panic!("{status} {body}")).to_owned())
}

#[test]
fn answers_have_the_bytes_of_predict_alone_in_a_batch_and_among_other_clients() {
    let stage = calibrated();
    let rows: Vec<usize> = (1000..1030).collect();
    let all: Vec<f32> = rows.iter().flat_map(|row| embedding(*row, 0)).collect();
    std::fs::write(stage.path().join("photos.npy"), npy(&all, WIDTH)).expect("the test folder is writable");
    stage.run("predict photos.npy --out a.csv --density density.parquet").exits_with(ExitCode::Success);
    let cells = densities(&stage, "density.parquet");
    for flag in ["", "--hybrid"] {
        let ran = stage.run(&format!("predict photos.npy --samples {flag}"));
        let lines: Vec<&str> = ran.exits_with(ExitCode::Success).stdout.lines().collect();
        assert_eq!((lines.len(), lines[0].contains("\"radius_50_km\":null")), (30, flag == "--hybrid"), "{}", lines[0]);
        let service = Service::start(&stage, flag);
        let embeddings: Vec<String> = rows.iter().map(|row| numbers(*row)).collect();
        let body = format!("{{\"embeddings\": [{}], \"samples\": true}}", embeddings.join(","));
        assert_eq!(service.post(&body), (200, format!("{{\"rows\":[{}]}}\n", lines.join(","))));
        // Each photo by itself, first one after another, then all at once.
        let alone = |at: usize| {
            let mut found: Value = serde_json::from_str(lines[at]).expect("the line is JSON");
            found.as_object_mut().expect("it is an object").remove("samples");
            found["id"] = json!("0");
            assert_eq!(service.post(&numbers(rows[at])), (200, format!("{found}\n")), "photo {at}");
        };
        (0..3).for_each(alone);
        std::thread::scope(|scope| {
            (0..30).for_each(|at| drop(scope.spawn(move || alone(at))));
        });
        let dense = |at: usize| {
            let body = format!("{{\"embeddings\": [{}], \"density\": true}}", embeddings[at]);
            let answer = service.post(&body);
            if flag == "--hybrid" {
                assert!(matches!(error_of(&answer), (400, text) if text.contains("`eval --calibrate`")), "{answer:?}");
                return;
            }
            let found: Value = serde_json::from_str(&answer.1).expect("the answer is JSON");
            let mut wanted: Value = serde_json::from_str(lines[at]).expect("the line is JSON");
            wanted["id"] = json!("0");
            wanted.as_object_mut().expect("it is an object").remove("samples");
            let mut row = found["rows"][0].clone();
            let density = row.as_object_mut().expect("it is an object").remove("density");
            let density: Vec<(u8, u64, f32)> =
                serde_json::from_value(density.unwrap_or_default()).expect("the density is a list of cells");
            assert!(row == wanted && density == cells[&at.to_string()], "photo {at}: {answer:?}");
        };
        // Densities for some of the photos that are located together.
        std::thread::scope(|scope| {
            (0..10).for_each(|at| drop(scope.spawn(move || if at % 3 == 0 { dense(at) } else { alone(at) })));
        });
        let zeros = format!("{{\"embeddings\": [{}, {}]}}", numbers(1000), json!(vec![0; WIDTH]));
        let found = service.post(&zeros);
        assert!(matches!(error_of(&found), (400, text) if text.starts_with("embedding 2 of 2: all numbers of")));
        let worker = service.worker();
        (0..2).for_each(alone);
        assert_eq!(worker, service.worker(), "an embedding ended the worker");
        assert_eq!(service.end(Signal::SIGINT), Some(ExitCode::Interrupted.code().into()), "{}", log(&stage));
    }
    assert_eq!(stage.leftover_sockets(), 0);
}

/// A request that is wrong in a way that `random` chooses, and a part of the message that it should get. HTTP that cannot
/// be parsed gets no message.
fn malformed(port: u16, random: &mut u64) -> (Vec<u8>, &'static str) {
    let mut below = |bound: usize| {
        *random = random.wrapping_add(SPLITMIX_INCREMENT);
        (splitmix(*random) % bound as u64) as usize
    };
    let good = numbers(1000 + below(50));
    let (head, right) = (post_text(port, &good), good.as_str());
    let column = below(WIDTH);
    let with = |value: &str| {
        let mut words: Vec<&str> = right.trim_matches(['[', ']']).split(',').collect();
        words[column] = value;
        format!("[{}]", words.join(","))
    };
    let body = |text: String, part: &'static str| (post_text(port, &text).into_bytes(), part);
    match below(23) {
        0 => body(good[..1 + below(good.len() - 1)].to_owned(), "not valid JSON"),
        1 => body(with("\"1\""), "is a string"),
        2 => body(with("null"), "is null"),
        3 => body(with("1e40"), "float16"),
        4 => body(with("NaN"), "not valid JSON"),
        5 => body(with("1,2"), "13 numbers, wanted 12"),
        6 => body(format!("[{good}]"), "list of lists"),
        7 => body(format!("{{\"embeddings\": [{good}], \"x\": 1}}"), "unknown field"),
        8 => body(format!("{{\"embeddings\": [{good}], \"ids\": [1]}}"), "id 1 is a number"),
        9 => body(format!("{{\"embeddings\": [{}]}}", vec![right; 65].join(",")), "at most 64"),
        10 => body("[".repeat(1 + below(5000)), "not valid JSON"),
        11 => {
            (head.replace("POST", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE"][below(5)]).into_bytes(), "wanted POST")
        }
        12 => (head.replace("/predict", ["/x", "/predict/", "//", "/../etc/passwd"][below(4)]).into_bytes(), "no page"),
        13 => (head.replace("application/json", "text/plain").into_bytes(), "wanted application/json"),
        14 => (head.replace(&format!("Content-Length: {}\r\n", good.len()), "").into_bytes(), "Content-Length"),
        15 => (
            head.replace(&format!("Content-Length: {}", good.len()), "Content-Length: 5000000").into_bytes(),
            "at most",
        ),
        16 => (head.replace("Host: localhost", "Host: evil.example").into_bytes(), "Host is"),
        17 => (head.replace("Connection:", "Origin: http://evil.example\r\nConnection:").into_bytes(), "Origin is"),
        18 => (head.replace(&good, &good[..good.len() - 1]).into_bytes(), "cannot be read"),
        19 => (head.replace("HTTP/1.1", ["HTTP/7.3", "SMTP", "HTTP/1.1 x"][below(3)]).into_bytes(), ""),
        21 => body(format!("{{\"embeddings\": [{good}], \"density\": true}}"), "there are no densities"),
        20 => (head.replace("Host:", "Ho st:").into_bytes(), ""),
        _ => {
            let mut bytes: Vec<u8> = (0..1 + below(200)).map(|_| below(256) as u8).collect();
            bytes.extend(b"\r\n\r\n");
            (bytes, "")
        }
    }
}

/// One test, because each stage trains a model.
#[test]
fn malformed_requests_dead_workers_and_foreign_clients_do_no_harm() {
    let stage = stage();
    malformed_requests_get_a_status_and_a_reason(&stage);
    service_comes_back_and_ends_with_the_cause_if_workers_keep_dying(&stage);
    other_machines_need_a_token_and_unusable_addresses_are_refused(&stage);
}

fn malformed_requests_get_a_status_and_a_reason(stage: &Stage) {
    let service = Service::start(stage, "");
    let (worker, before) = (service.worker(), service.post(&numbers(1000)));
    assert_eq!(before.0, 200, "{}", before.1);
    let mut random = 5;
    for number in 0..1000 {
        let (request, part) = malformed(service.port, &mut random);
        let (status, body) = service.send(&request);
        let text = String::from_utf8_lossy(&request);
        assert!((400..500).contains(&status), "request {number} got {status} {body}: {text}");
        if !part.is_empty() {
            let (_, error) = error_of(&(status, body));
            assert!(error.contains(part), "request {number} got {error:?} without {part:?}: {text}");
        }
    }
    assert_eq!((service.post(&numbers(1000)), service.worker()), (before, worker));

    // More connections than the service takes.
    let idle: Vec<TcpStream> =
        (0..256).map(|_| TcpStream::connect(("127.0.0.1", service.port)).expect("the service listens")).collect();
    let found = error_of(&service.send(b"GET /healthz HTTP/1.1\r\n\r\n"));
    assert_eq!(found, (503, "too many connections; try again soon".to_owned()));
    drop(idle);
    let get = |path: &str| {
        service.send(format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", service.port).as_bytes())
    };
    eventually("the connections are closed", || get("/healthz").0 == 200);
    let (status, page) = get("/");
    assert!(status == 200 && page.starts_with("<!DOCTYPE html>"), "{status} {page}");
    // One more client that asks and goes away before it gets the answer.
    let mut stream = TcpStream::connect(("127.0.0.1", service.port)).expect("the service listens");
    stream.write_all(post_text(service.port, &numbers(1001)).as_bytes()).expect("the service reads");
    drop(stream);
    assert_eq!(service.post(&numbers(1000)).0, 200);
    assert_eq!(service.end(Signal::SIGTERM), Some(ExitCode::Preempted.code().into()), "{}", log(stage));
}

fn service_comes_back_and_ends_with_the_cause_if_workers_keep_dying(stage: &Stage) {
    let mut service = Service::start(stage, "--max-restarts 1");
    let worker = service.worker();
    signal(worker, Signal::SIGKILL);
    let (killed, mut refused) = (Instant::now(), 0);
    loop {
        let found = service.post(&numbers(1000));
        if found.0 == 200 {
            break;
        }
        let (status, text) = error_of(&found);
        assert!(status == 503 && text.contains("the worker has ended"), "{status} {text}");
        refused += 1;
        assert!(killed.elapsed() < BACK_WITHIN, "the service was away for {:?}", killed.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(refused > 0, "no request was refused, so the worker was not killed");
    assert_ne!(service.worker(), worker);
    signal(service.worker(), Signal::SIGKILL);
    assert_eq!(wait(&mut service.child), Some(ExitCode::WorkerFailed.code().into()), "{}", log(stage));
    let text = log(stage);
    assert!(text.contains("SIGKILL") && text.contains("not restarted: 1 restarts without progress"), "{text}");
}

fn other_machines_need_a_token_and_unusable_addresses_are_refused(stage: &Stage) {
    stage.run("serve --bind 0.0.0.0:0").exits_with(ExitCode::Usage).stderr_has("--token-file FILE");
    stage.run("serve --bind nonsense").exits_with(ExitCode::Usage);
    let file = stage.path().join("token");
    std::fs::write(&file, "0123456789abcdef\n").expect("the test folder is writable");
    let mode = |mode: u32| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&file, mode).expect("the file is ours");
    };
    mode(0o644);
    let line = "serve --bind 0.0.0.0:0 --token-file token";
    stage.run(line).exits_with(ExitCode::Usage).stderr_has("chmod 600 token");
    mode(0o600);
    std::fs::write(&file, "short").expect("the test folder is writable");
    stage.run(line).exits_with(ExitCode::Usage).stderr_has("at least 16");
    std::fs::write(&file, "0123456789abcdef\n").expect("the test folder is writable");
    let service = Service::start(stage, "--bind 0.0.0.0:0 --token-file token");
    // The address at which a connection arrives is the right Host; `localhost` is one of its names.
    assert_eq!(error_of(&service.post(&numbers(1000))).0, 401);
    let with = |token: &str| {
        let text = post_text(service.port, &numbers(1000));
        service.send(text.replace("Connection:", &format!("Authorization: Bearer {token}\r\nConnection:")).as_bytes()).0
    };
    assert_eq!(["0123456789abcdeX", "0123456789abcdef"].map(with), [401, 200]);
    let ran = stage.run(&format!("serve --bind 127.0.0.1:{}", service.port));
    ran.exits_with(ExitCode::Io).stderr_has("choose another port");
    service.end(Signal::SIGINT);
}
