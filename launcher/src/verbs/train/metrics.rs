//! The numbers of a training run for Prometheus: `GET /metrics` at the address `network.metrics`. They come from the file
//! `status.json`, which is written about once a second, so that questions cannot slow down training.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::timeout;

use crate::error::{LaunchError, refuse};
use crate::run_folder::{RunStatus, exact_unix_s};

/// How long a client may take to send its request and to read the answer.
const CLIENT_TIME: Duration = Duration::from_secs(5);

/// The content type that Prometheus expects.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Listens at `address`, which is PORT, a port on the loopback interface, or HOST:PORT. `None` if it is empty.
pub(super) fn listen(address: &str) -> Result<Option<TcpListener>, LaunchError> {
    if address.is_empty() {
        return Ok(None);
    }
    let wrong = |error| LaunchError::at(address)(error).about("network.metrics");
    let listener = TcpListener::bind(resolve(address)?).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let listener = listener.map_err(wrong)?;
    let found = listener.local_addr().map_err(wrong)?;
    tracing::info!("metrics for Prometheus: http://{found}/metrics");
    Ok(Some(listener))
}

/// Serves the numbers of the run in the folder `run` until the process ends.
pub(super) fn serve(listener: TcpListener, run: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (runtime, run) = (runtime.context("cannot start the async runtime")?, run.to_owned());
    let thread = std::thread::Builder::new().name("metrics".into());
    thread.spawn(move || runtime.block_on(accept(listener, run))).context("cannot start a thread")?;
    Ok(())
}

fn resolve(address: &str) -> Result<SocketAddr, LaunchError> {
    if let Ok(port) = address.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    match address.to_socket_addrs().map(|mut found| found.next()) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => refuse!(Config, "network.metrics: {address} has no address"),
        Err(error) => refuse!(Config, "network.metrics: is \"{address}\", wanted PORT or HOST:PORT: {error}"),
    }
}

async fn accept(listener: TcpListener, run: PathBuf) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        // One client at a time is enough, and cannot use up memory.
        let service = service_fn(|request| {
            let answer = answer(&request, &run);
            async move { Ok::<_, Infallible>(answer) }
        });
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(CLIENT_TIME).keep_alive(false);
        let _ = timeout(CLIENT_TIME, server.serve_connection(TokioIo::new(stream), service)).await;
    }
}

fn answer(request: &Request<Incoming>, run: &Path) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => match RunStatus::current(run) {
            Some(found) => (StatusCode::OK, text(&found, SystemTime::now())),
            None => (StatusCode::SERVICE_UNAVAILABLE, "the run has no status yet\n".to_owned()),
        },
        _ => (StatusCode::NOT_FOUND, "only GET /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(TEXT));
    response
}

/// The numbers in the format of Prometheus.
fn text(status: &RunStatus, now: SystemTime) -> String {
    let run = status.run.replace('\\', "\\\\").replace('"', "\\\"");
    let mut text = String::new();
    let mut put = |name: &str, kind: &str, help: &str, rows: &[(String, Option<f64>)]| {
        let rows: Vec<_> = rows.iter().filter_map(|(labels, value)| Some((labels, (*value)?))).collect();
        if !rows.is_empty() {
            let _ = writeln!(text, "# HELP locdiff_{name} {help}\n# TYPE locdiff_{name} {kind}");
        }
        for (labels, value) in rows {
            let _ = writeln!(text, "locdiff_{name}{{run=\"{run}\"{labels}}} {value}");
        }
    };
    let mut one = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        put(name, kind, help, &[(String::new(), value)]);
    };
    one("step", "gauge", "Training steps done.", Some(status.step as f64));
    one("steps", "gauge", "Training steps to do.", Some(status.steps as f64));
    one("loss", "gauge", "Loss of the last report.", status.loss);
    one("samples_per_second", "gauge", "Rows per second over all workers.", status.samples_per_s);
    one(
        "goodput_ratio",
        "gauge",
        "Share of the time that made lasting progress.",
        status.goodput.percent().map(|percent| percent / 100.0),
    );
    one("restarts_total", "counter", "Restarts by this launcher.", Some(status.restarts.into()));
    one("checkpoint_step", "gauge", "Step of the newest checkpoint.", status.checkpoint_step.map(|step| step as f64));
    let age = |unix_s: f64| (exact_unix_s(now) - unix_s).max(0.0);
    one("checkpoint_age_seconds", "gauge", "Age of the newest checkpoint.", status.checkpoint_unix_s.map(age));
    one("status_age_seconds", "gauge", "Age of these numbers.", Some(status.age_s(now)));
    let state = format!(",state=\"{}\"", status.state.name());
    put("state", "gauge", "1 for what the run is doing.", &[(state, Some(1.0))]);
    let mut phases: BTreeMap<(u32, String), u32> = BTreeMap::new();
    for worker in &status.workers {
        *phases.entry((worker.node, worker.phase.to_string())).or_default() += 1;
    }
    let phases = phases
        .into_iter()
        .map(|((node, phase), count)| (format!(",node=\"{node}\",phase=\"{phase}\""), Some(f64::from(count))));
    put("workers", "gauge", "Workers by node and phase.", &phases.collect::<Vec<_>>());
    text
}
