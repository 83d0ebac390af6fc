//! The life cycle of a worker: it connects to the launcher, receives a job, runs the job, sends the result, and exits.

mod bench_collectives;
mod bench_sample;
mod bench_shards;
mod bench_shdd;
mod control;
mod error;
mod eval;
mod outbox;
mod rendezvous;
mod self_check;
mod shards;

use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::bail;
use locdiff_core::exit_code::ExitCode;
use locdiff_core::files::Files;
use locdiff_core::protocol::{Job, JobResult, Probed, ToLauncher, ToWorker, TrainJob, TrainSummary, WorkerSlot};
use locdiff_core::pulse::{self, WorkPhase};

use crate::checkpoint;
use crate::comm::Communicator;
use crate::eval::perturbation;
use crate::native;
use crate::train::{self, TrainError};
use control::Control;
use error::JobError;

/// Runs a worker and returns the exit code of the process. The launcher passes the rank and the path of the control
/// socket in environment variables.
pub fn run() -> ExitCode {
    let mut control = match Control::connect() {
        Ok(control) => control,
        Err(error) => {
            tracing::error!("{error:#}");
            return ExitCode::Usage;
        }
    };
    let code = match work(&mut control) {
        Ok(()) => ExitCode::Success,
        Err(error) => {
            tracing::error!("{error:#}");
            let failure = error::failure(&error);
            let code = ExitCode::from_code(failure.exit_code.into()).unwrap_or(ExitCode::WorkerFailed);
            // If the launcher is gone, nobody asks for the reason: the worker was interrupted.
            control.send(&ToLauncher::Failed(failure)).map_or(ExitCode::Interrupted, |()| code)
        }
    };
    control.flush();
    code
}

fn work(control: &mut Control) -> anyhow::Result<()> {
    control.send_hello(&native::versions()?)?;
    let ToWorker::Start { place: slot, meeting, job } = control.receive()? else {
        bail!("the first message from the launcher is not `Start`");
    };
    let messages = control.watch_launcher()?;
    let _phase = pulse::enter(phase_of(&job));
    control.start_heartbeats(Duration::from_secs_f64(meeting.heartbeat_s))?;
    native::backtrace::print_on_request()?;
    // The threads of libtorch spin while they wait. A worker with a GPU needs the cores for its own threads, which
    // aggregate samples.
    let of_libtorch = if slot.gpu.is_some() && !matches!(job, Job::Train(_)) { 1 } else { slot.threads };
    tch::set_num_threads(i32::try_from(of_libtorch)?);
    native::call_vector_functions_once()?;
    let result: JobResult = match job {
        Job::Probe => Probed {}.into(),
        Job::SelfCheck => self_check::run(&slot)?.into(),
        Job::BenchCollectives { bytes_max } => {
            bench_collectives::run(&rendezvous::connect(control, &slot, &meeting)?, bytes_max)?.into()
        }
        Job::Shards(job) => shards::run(&job, &slot)?,
        Job::Export(job) => checkpoint::export(&Files::real(), &job).map_err(JobError::from)?.into(),
        Job::Train(job) => {
            let ranks = rendezvous::connect(control, &slot, &meeting)?;
            train(&job, meeting.attempt, &slot, control, &messages, ranks)?.into()
        }
        Job::Eval(job) => eval::run(&job, control, &slot)?.into(),
        Job::Gallery(job) => eval::embed_gallery(&job, control, &slot)?.into(),
        Job::Serve(job) => match eval::serve(&job, control, &messages, &slot)? {},
        Job::BenchShdd => bench_shdd::run(&slot)?.into(),
        Job::BenchTrain(job) => {
            let ranks = rendezvous::connect(control, &slot, &meeting)?;
            train::bench(&job, &ranks).map_err(JobError::from)?.into()
        }
        Job::BenchSample(job) => bench_sample::run(&job, &slot)?.into(),
        Job::Perturbation { points } => perturbation::run(points, &slot)?.into(),
    };
    Ok(control.send(&ToLauncher::Result(Box::new(result)))?)
}

/// The phase to report for a job until the job itself enters a phase.
fn phase_of(job: &Job) -> WorkPhase {
    match job {
        Job::Shards(_) => WorkPhase::Data,
        Job::Train(_)
        | Job::Probe
        | Job::SelfCheck
        | Job::BenchCollectives { .. }
        | Job::BenchShdd
        | Job::BenchTrain(_) => WorkPhase::Step,
        Job::Export(_) => WorkPhase::Checkpoint,
        Job::Eval(_) | Job::Gallery(_) | Job::Serve(_) | Job::Perturbation { .. } | Job::BenchSample(_) => {
            WorkPhase::Evaluation
        }
    }
}

/// Trains and reports progress to the launcher. Every rank returns the same summary.
fn train(
    job: &TrainJob,
    attempt: u32,
    slot: &WorkerSlot,
    control: &mut Control,
    messages: &Receiver<ToWorker>,
    ranks: Communicator,
) -> Result<TrainSummary, JobError> {
    let mut send = |message| {
        control.send(&message).map_err(|error| TrainError::Launcher(error.to_string()))?;
        if matches!(message, ToLauncher::Breaking(_)) {
            // Flush now, because the injected fault may end this process at once.
            control.flush();
        }
        Ok(())
    };
    let mut receive = || match messages.try_recv() {
        Ok(ToWorker::Inject(fault)) => Some(fault),
        _ => None,
    };
    let launcher = train::Launcher { send: &mut send, next_fault: &mut receive };
    // One process per machine compares the checkpoint with its checksums. On node 0, the launcher has done so.
    let checks_files = slot.node > 0 && slot.local_rank == 0;
    let trained = train::run(job, attempt, &ranks, checks_files, launcher);
    if trained.is_err() {
        // Keep the connections open until the process exits: otherwise peers could report a broken connection before
        // the launcher receives the real reason.
        std::mem::forget(ranks);
    }
    Ok(trained?)
}
