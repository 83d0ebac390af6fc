//! `serve`: answers requests over HTTP as `predict` answers rows, and shows the answers on a page.
//!
//! - `http`: connections, and what each path answers.
//! - `guard`: who may ask: Host and Origin, the token, the rate.
//! - `question`: reads the JSON of a request.
//! - `desk`: the photos that wait for the worker.
//! - `page`: the page. Its globe is built on the map of the report.
//!
//! The main thread supervises the worker, which keeps the model loaded. A second thread serves HTTP. If the worker ends,
//! requests get status 503 until a new worker has loaded the model.

mod desk;
mod guard;
mod http;
mod page;
mod question;

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use locdiff_core::config::{RunConfig, TrainMethod};
use locdiff_core::exit_code::FailureKind;
use locdiff_core::protocol::{EvalTask, HybridRequest, Job, Prediction, ServedModel, ToLauncher, ToWorker};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::eval::{find_model, prepared_job, radii};
use super::restarts::{FailedAttempt, try_again};
use crate::cli::{Global, ServeRequest};
use crate::cluster::Token;
use crate::error::{LaunchError, refuse, reported};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::supervisor::{GangObserver, Supervisor, hold_signals};
use desk::Desk;
use guard::{Guard, TOKEN_LETTERS_MIN};
use http::Site;

/// A worker that has served for this long has worked. If it ends later, restarts are counted from 0.
const STABLE: Duration = Duration::from_secs(300);

/// Name of the photos in error messages of the worker.
const PHOTOS: &str = "request";

/// Runs `serve`. Ends only with an error, such as the one for Ctrl-C.
pub(super) fn run(request: &ServeRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let token = read_token(request.bind, global)?;
    let listener = bind(request.bind)?;
    let mut model = find_model(request.model.as_deref(), global, request.hybrid, output)?;
    // The true places are not known, so no gallery point can be left out for being near one.
    model.resolved.config.eval.exclude_km = 0.0;
    let (config, file) = (&model.resolved.config, &model.file);
    let calibration = radii::load(&model.source, config, file, request.hybrid, output)?;
    let hybrid = if request.hybrid { HybridRequest::Wanted } else { HybridRequest::No };
    let task = EvalTask::Predict(Prediction {
        with_truth: false,
        with_samples: true,
        skips_bad_rows: false,
        truth_temperatures: Vec::new(),
        cells_temperature: calibration.as_ref().and_then(|saved| Some(saved.density.as_ref()?.temperature)),
        prior: None,
    });
    let job = Job::Serve(Box::new(prepared_job(config.clone(), file, PHOTOS, hybrid, task)?));
    hold_signals()?;
    let mut supervisor = Supervisor::new()?;
    let (desk, mut orders) = Desk::new();
    let address = listener.local_addr().map_err(LaunchError::at("--bind"))?;
    let name = model.source.path().file_name().unwrap_or_default().display();
    let name = if model.source.run().is_some() { format!("run {name}") } else { name.to_string() };
    let facts = json!({
        "model": name, "hybrid": request.hybrid, "calibrated": calibration.is_some(), "token": token.is_some(),
        "samples": (config.train.method == TrainMethod::Locdiff).then_some(config.eval.samples),
    });
    http::start(listener, Site::new(Arc::clone(&desk), Guard::new(token), calibration, facts))?;
    let (run, checkpoint) = (model.source.run(), &file.path);
    let announce = |model: &ServedModel| {
        let url = format!("http://{address}/");
        output.print(&format!("serving {name} (step {}) at {url}; Ctrl-C ends it", model.step));
        output.result(&json!({
            "ok": true, "url": url, "run": run, "checkpoint": checkpoint, "pid": std::process::id(), "model": model,
        }));
    };
    match keep_serving(&mut supervisor, config, &job, (&desk, &mut orders), &announce)? {}
}

/// Keeps a worker running. Ends with an error if a signal arrives, or if workers fail repeatedly.
fn keep_serving(
    supervisor: &mut Supervisor,
    config: &RunConfig,
    job: &Job,
    (desk, orders): (&Desk, &mut UnboundedReceiver<ToWorker>),
    announce: &(dyn Fn(&ServedModel) + Sync),
) -> anyhow::Result<Infallible> {
    let world = NodeWorkers::plan(config, &gpus::inventory())?;
    let threads = world.threads();
    let world = world.first_worker_only(threads).with_all_cores();
    let mut is_announced = false;
    loop {
        try_again(supervisor, &config.supervise, |supervisor| {
            // Photos that the last worker did not get. Their clients have got an answer.
            while orders.try_recv().is_ok() {}
            let mut clerk = Clerk { desk, announce, is_announced, serving_since: None };
            let ended =
                supervisor.run_with::<Infallible>(config, &world, job.clone(), 0, &mut clerk, Some(&mut *orders));
            is_announced = clerk.is_announced;
            desk.close("the worker has ended and is being started again");
            let error = match ended {
                Ok(results) => match results.first()? {},
                Err(error) => error,
            };
            let has_worked = clerk.serving_since.is_some_and(|since| since.elapsed() >= STABLE);
            if has_worked && FailedAttempt::new(&error).kind != FailureKind::Final {
                tracing::warn!("{error:#}");
                tracing::warn!("starting again");
                return Ok(());
            }
            Err(error)
        })?;
    }
}

/// Passes the worker's answers to the desk.
struct Clerk<'a> {
    desk: &'a Desk,
    /// Says where the service is. Called when the first worker is ready.
    announce: &'a (dyn Fn(&ServedModel) + Sync),
    is_announced: bool,
    serving_since: Option<Instant>,
}

impl GangObserver for Clerk<'_> {
    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        match message {
            ToLauncher::Serving(model) => {
                self.desk.open(model.clone());
                self.serving_since = Some(Instant::now());
                if !std::mem::replace(&mut self.is_announced, true) {
                    (self.announce)(&model);
                } else {
                    tracing::info!("serving again");
                }
            }
            ToLauncher::Predicted(predicted) => predicted.rows.into_iter().for_each(|row| self.desk.answer(row)),
            ToLauncher::Refused(photo) => self.desk.refuse(photo),
            _ => {}
        }
        Ok(())
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener, LaunchError> {
    let bound = TcpListener::bind(address);
    bound.map_err(|error| reported!(Io, "--bind {address}: {error}; choose another port, or port 0 for any free one"))
}

/// Reads the token. It is needed unless `address` can be reached only from this machine.
fn read_token(address: SocketAddr, global: &Global) -> Result<Option<Token>, LaunchError> {
    match &global.token_file {
        Some(file) => Token::read(file.as_ref(), TOKEN_LETTERS_MIN).map(Some),
        None if address.ip().is_loopback() => Ok(None),
        None => refuse!(
            Usage,
            "--bind {address} can be reached from other machines, so clients need a token: write one to a file (`openssl \
             rand -hex 32 > FILE; chmod 600 FILE`) and give --token-file FILE"
        ),
    }
}
