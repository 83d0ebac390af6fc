//! `train`: opens the run, starts workers from the run's newest checkpoint, and restarts all workers when one of them
//! fails.
//!
//! - `ending`: the commands that are printed after training.
//! - `forecast`: estimates how long training takes.
//! - `metrics`: numbers for Prometheus.
//! - `record`: the description of a failure that is written to the run folder.

mod ending;
mod forecast;
mod metrics;
mod record;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use locdiff_core::config::{AutoOr, Resolved, RunConfig, TrainMethod, ValueOrigin};
use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode as _};
use locdiff_core::files::Files;
use locdiff_core::protocol::{
    FaultKind, InjectedFault, Job, PartsWritten, TimeBefore, ToLauncher, TrainJob, TrainSummary,
};
use locdiff_core::pulse::Beat;
use locdiff_core::text::nearest;
use serde_json::{Value, json};

use super::eval::{self, Evaluation};
use super::locations::require_shards;
use super::restarts::{FailedAttempt, RestartPolicy, RestartVerdict, after};
use super::runs::checkpoint_at;
use crate::cli::Global;
use crate::error::{LaunchError, exit_code_of, refuse};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{
    Commit, RunFolder, RunState, RunStatus, StatusKeeper, exact_unix_s, has_ended, host, is_run, new_run_name, runs,
    threads_of, unfinished_run,
};
use crate::supervisor::{CappedLog, GangObserver, Injection, Supervisor, hold_signals, parse_fault};
use crate::terminal::{Display, width, wrapped};
use ending::next_commands;
use forecast::Forecast;
use record::{failure_record, first_cause, resume_command};

pub(super) use record::quoted;

/// Begins the line of an error that names the command with which the run is resumed.
pub(super) const RESUME_HINT: &str = "  resume with: ";

/// Runs `train`.
pub(super) fn run(inject: &[String], is_new: bool, global: &Global, output: Output) -> anyhow::Result<Value> {
    hold_signals()?;
    if is_new {
        refuse_existing(global)?;
    }
    let resolved = super::resolve_with_run(global)?;
    warn_of_mixed_data(&resolved);
    let world = super::workers(global, &resolved)?;
    let faults = inject.iter().map(|text| parse_fault(text, world.slots.len())).collect::<Result<Vec<_>, _>>()?;
    let run = RunChoice { prefix: run_name_prefix(global, &resolved), is_new };
    run_resolved(&resolved, &world, faults, &run, output)
}

/// Fails if `--new` is given together with the name of an existing run.
fn refuse_existing(global: &Global) -> Result<(), LaunchError> {
    if let Some((_, folder)) = super::named_run_folder(global).filter(|(_, folder)| is_run(folder)) {
        refuse!(
            Exists,
            "--new: the run {} exists; give another name, or leave out --new to resume it",
            folder.display()
        );
    }
    Ok(())
}

/// Warns if the user set the training data, but left the validation or test data that the training uses at its default.
fn warn_of_mixed_data(resolved: &Resolved) {
    let is_chosen = |key: &str| match resolved.origin(key) {
        ValueOrigin::Default => false,
        ValueOrigin::Line { source, .. } => !source.starts_with("preset "),
        ValueOrigin::Set | ValueOrigin::Flag(_) => true,
    };
    let (shards, eval) = (&resolved.config.shards, &resolved.config.eval);
    // Without test shards, training ends with a warning of its own.
    let tests = eval.after_train && require_shards("shards.test", &shards.test).is_ok();
    let others = [("shards.validation", &shards.validation, eval.every > 0), ("shards.test", &shards.test, tests)];
    for (key, value, is_used) in others {
        if is_used && !value.is_empty() && is_chosen("shards.train") && !is_chosen(key) {
            let train = &shards.train;
            tracing::warn!("shards.train was set to {train}, but {key} is still {value}; set {key} too");
        }
    }
}

/// Which run to train if `checkpoint.run` does not name one.
#[derive(Debug)]
pub(super) struct RunChoice {
    /// The name of a new run begins with this text.
    pub(super) prefix: String,
    /// Whether to start a new run even if there is an unfinished one with the same configuration.
    pub(super) is_new: bool,
}

impl RunChoice {
    /// The name of the run.
    fn name(&self, config: &RunConfig) -> Result<String, LaunchError> {
        if !config.checkpoint.run.is_empty() {
            return Ok(config.checkpoint.run.clone());
        }
        let unfinished = match self.is_new {
            true => None,
            false => unfinished_run(Path::new(&config.checkpoint.dir), config)?,
        };
        let Some(found) = unfinished else { return Ok(new_run_name(&self.prefix, SystemTime::now())) };
        let name = found.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tracing::info!(
            "resuming {name}, the newest unfinished run with this configuration; `--new` starts another run"
        );
        Ok(name)
    }
}

/// `name` may be misspelt, so this note names the runs with similar names. The note is empty if no run has a similar
/// name, or if `name` is empty.
fn similar_runs(dir: &Path, name: &str) -> String {
    let folders = if name.is_empty() { Vec::new() } else { runs(dir).unwrap_or_default() };
    let others: Vec<String> =
        folders.iter().filter_map(|run| Some(run.file_name()?.to_string_lossy().into_owned())).collect();
    let similar = nearest(name, others.iter().map(String::as_str).filter(|other| *other != name));
    if similar.is_empty() { String::new() } else { format!("; runs with similar names: {}", similar.join(", ")) }
}

/// Replaces "auto" in `train.threads` with a number. An existing run keeps its number of threads, because the last bits
/// of results depend on this number. A new run gets the number of threads in `world`.
fn with_threads(resolved: &Resolved, world: &NodeWorkers, run: &Path) -> (Resolved, NodeWorkers) {
    let mut resolved = resolved.clone();
    let here = world.threads();
    let threads = match resolved.config.train.threads {
        AutoOr::Value(threads) => threads,
        AutoOr::Auto => threads_of(run).unwrap_or(here),
    };
    if threads != here {
        tracing::info!("each worker uses {threads} threads, as when the run was created; a new run would use {here}");
    }
    resolved.config.train.threads = AutoOr::Value(threads);
    (resolved, world.clone().with_threads(threads))
}

/// Trains with a resolved configuration.
pub(super) fn run_resolved(
    resolved: &Resolved,
    world: &NodeWorkers,
    injections: Vec<Injection>,
    choice: &RunChoice,
    output: Output,
) -> anyhow::Result<Value> {
    let config = &resolved.config;
    world.check_division(config)?;
    require_shards("shards.train", &config.shards.train)?;
    if !config.shards.validation.is_empty() && config.eval.every > 0 {
        require_shards("shards.validation", &config.shards.validation)?;
    }
    let dir = Path::new(&config.checkpoint.dir);
    let mut supervisor = Supervisor::new()?;
    let name = choice.name(config)?;
    let (resolved, world) = with_threads(resolved, world, &dir.join(&name));
    let resolved = &resolved;
    let config = &resolved.config;
    let metrics = metrics::listen(&config.network.metrics)?;
    let opened = RunFolder::open(Files::real(), dir, &name, config)?;
    let folder = opened.folder.path().display();
    match opened.is_new {
        true => tracing::info!("new run {folder}{}", similar_runs(dir, &config.checkpoint.run)),
        false => tracing::info!("run {folder} (existing)"),
    }
    opened.changes.iter().for_each(|line| tracing::info!("{line}"));
    let mut faults = Vec::new();
    for injection in injections {
        match injection {
            Injection::Planned(fault) => faults.push(fault),
            Injection::Random(random) => supervisor.inject_at_random(random),
        }
    }
    let policy = RestartPolicy::new(&config.supervise);
    let (run, is_created) = (opened.folder, opened.is_created);
    if has_ended(run.path(), config.train.steps) {
        return Ok(at_last_step(&run, config, output)?);
    }
    let (status, vanished) = StatusKeeper::new(run.path(), config.train.steps, config.train.global_batch);
    if let Some(RunStatus { pid, host, step, .. }) = vanished {
        tracing::warn!("the previous launcher (pid {pid} on {host}) was killed or crashed after step {step}");
        run.note("vanished", &json!({ "pid": pid, "host": host, "step": step }));
    }
    if let Some(listener) = metrics {
        metrics::serve(listener, run.path())?;
    }
    let training = HeldRun {
        resolved,
        world,
        run,
        is_created,
        supervisor,
        faults,
        restarts: 0,
        failing_node: None,
        workers_max: 0,
        policy,
        status,
    };
    training.run_to_end(output)
}

/// A training run whose lock this launcher holds.
struct HeldRun<'a> {
    resolved: &'a Resolved,
    world: NodeWorkers,
    run: RunFolder,
    /// Whether this launcher created the folder of the run.
    is_created: bool,
    supervisor: Supervisor,
    faults: Vec<InjectedFault>,
    restarts: u32,
    /// The node whose worker was the root cause of the last failure.
    failing_node: Option<u32>,
    /// The largest number of workers that this launcher has seen or expects.
    workers_max: usize,
    policy: RestartPolicy,
    status: StatusKeeper,
}

impl HeldRun<'_> {
    /// Makes attempts until one succeeds, a signal asks to stop, or [`RestartPolicy`] gives up.
    fn run_to_end(mut self, output: Output) -> anyhow::Result<Value> {
        let began = Instant::now();
        loop {
            let error = match self.attempt() {
                Ok(trained) if trained.stopped => {
                    let saved = if trained.step > 0 { " with a checkpoint" } else { "" };
                    tracing::info!("stopped after step {}{saved}", trained.step);
                    match self.supervisor.check_interrupted() {
                        Err(interrupted) => interrupted.into(),
                        Ok(()) => {
                            // More nodes take part from now on.
                            self.failing_node = None;
                            continue;
                        }
                    }
                }
                Ok(trained) => return self.report_success(&trained, output),
                Err(error) => error,
            };
            self.leave_out_failing_node(&error);
            let verdict = self.policy.judge(&FailedAttempt::new(&error), self.newest_step(), began.elapsed());
            let (wait, count) = match verdict {
                RestartVerdict::Restart { wait, count } => (wait, count),
                RestartVerdict::GiveUp(reason) => return Err(self.give_up(error, reason)),
            };
            self.status.failed(&first_cause(&error));
            self.run.note("failed", &failure_record(&error, self.restarts));
            self.restarts += 1;
            tracing::warn!("{error:#}");
            tracing::warn!("restarting from the newest checkpoint{} ({count})", after(wait));
            if let Err(interrupted) = self.supervisor.pause(wait.max(Duration::from_millis(1))) {
                return Err(self.give_up(interrupted.into(), None));
            }
        }
    }

    /// If the workers of a node have failed in two attempts in a row, names the node, and goes on without it if that is
    /// allowed.
    fn leave_out_failing_node(&mut self, error: &anyhow::Error) {
        let known = error.downcast_ref::<LaunchError>();
        if known.is_some_and(|known| known.failure_kind() == FailureKind::Outage) {
            // Storage that does not respond is not the fault of the node that notices it first.
            return;
        }
        let gang = known.and_then(LaunchError::gang);
        let node = gang.and_then(|gang| gang.node).filter(|_| self.world.cluster.is_some());
        let before = std::mem::replace(&mut self.failing_node, node);
        let (Some(number), Some(cluster)) = (node.filter(|_| node == before), &self.world.cluster) else { return };
        let host = self.world.node(number).map_or_else(host, |node| node.host.clone());
        let reason = format!("the workers of node {number} ({host}) failed in two attempts in a row");
        let may_go_on = self.world.nodes.len() > self.resolved.config.parallel.nodes_needed() as usize;
        if number > 0 && cluster.may_shrink() && may_go_on {
            tracing::warn!("{reason}; going on without this node");
            cluster.leave_out(number, &format!("{reason}; start a launcher there when it is mended"));
        } else {
            tracing::warn!("{reason}");
        }
    }

    /// The configuration of the workers. If nodes are missing, each worker processes more rows, but not more at once than
    /// with all nodes, so that it does not need more memory.
    fn config_of_workers(&self) -> RunConfig {
        let mut config = self.resolved.config.clone();
        let replicas = self.workers_max / config.parallel.tensor as usize;
        if self.world.slots.len() < self.workers_max {
            let share = config.train.global_batch.div_ceil(u32::try_from(replicas).unwrap_or(u32::MAX));
            config.train.micro_batch =
                if config.train.micro_batch == 0 { share } else { config.train.micro_batch.min(share) };
        }
        config
    }

    /// Records the failure. Returns the error, with the reason why the run is not restarted and the command that
    /// resumes the run.
    fn give_up(&mut self, error: anyhow::Error, reason: Option<String>) -> anyhow::Error {
        let code = exit_code_of(&error);
        if self.run.is_superseded() {
            // The files of the run belong to another launcher now.
            return error;
        }
        let is_final = FailedAttempt::new(&error).kind == FailureKind::Final;
        if self.is_created && is_final && is_refusal(code) && !self.status.has_trained() {
            // The first step was never done, and trying again would not help. Leave no empty run behind.
            warn_on_error(self.run.discard());
            return error;
        }
        let resume = self.resume_command();
        let mut record = failure_record(&error, self.restarts);
        record["gave_up"] = json!(reason);
        record["resume"] = json!(resume);
        let state = end_state(code);
        self.run.note(state.name(), &record);
        if state == RunState::Failed {
            warn_on_error(self.run.write_failure(&record));
            self.status.failed(&first_cause(&error));
        }
        self.status.end(state);
        tracing::info!("{}", self.status.goodput().summary());
        let reason = reason.map_or_else(String::new, |reason| format!("\n  not restarted: {reason}"));
        // With other data, the same command would fail again.
        let resume = if code == ExitCode::DataChanged { String::new() } else { format!("\n{RESUME_HINT}{resume}") };
        let text = format!("{error:#}{reason}{resume}");
        LaunchError::new(code, text).into()
    }

    /// The step of the newest checkpoint; `None` if there is no checkpoint or the run folder cannot be read.
    fn newest_step(&self) -> Option<u64> {
        let rows = self.run.checkpoints().ok()?;
        rows.iter().filter(|row| row.state == "present").map(|row| row.step).max()
    }

    /// The command that resumes this run: the command line of this launcher, with the name of the run and without
    /// injected faults.
    fn resume_command(&self) -> String {
        let name = self.run.path().file_name().unwrap_or_default().to_string_lossy();
        resume_command(std::env::args(), &name)
    }

    fn attempt(&mut self) -> anyhow::Result<TrainSummary> {
        self.supervisor.check_interrupted()?;
        self.world = self.supervisor.gather(&self.world)?;
        self.workers_max = self.workers_max.max(self.world.workers_expected());
        self.world.check_division(&self.resolved.config)?;
        let attempt = self.run.begin_attempt()?;
        let point = self.run.resume_point()?;
        point.set_aside.iter().for_each(|line| tracing::warn!("{line}"));
        let init_from = match &point.checkpoint {
            Some(_) => None,
            None => initial_checkpoint(&self.resolved.config)?,
        };
        self.supervisor.check_interrupted()?;
        let step = point.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.manifest.step);
        match &point.checkpoint {
            Some(checkpoint) => tracing::info!("resuming from {}", checkpoint.path.display()),
            None => tracing::info!("starting at the first step"),
        }
        self.policy.begin(step);
        let workers = self.world.slots.len();
        self.run.note("attempt", &json!({ "attempt": attempt, "step": step, "workers": workers }));
        let resumed = point.checkpoint.as_ref().map(|checkpoint| &checkpoint.manifest);
        self.status.begin(attempt, self.restarts, resumed, self.world.places());
        let time_before = TimeBefore {
            spent: self.status.goodput(),
            began_unix_s: exact_unix_s(SystemTime::now()),
            is_restart: self.restarts > 0,
        };
        let job = TrainJob {
            config: self.config_of_workers(),
            run_dir: self.run.path().to_owned(),
            init_from,
            resume: point.checkpoint.map(|checkpoint| checkpoint.path),
            best_score: point.best_score,
            restarts: attempt,
            nodes: u32::try_from(self.world.nodes.len().max(1)).unwrap_or(u32::MAX),
            time_before,
            faults: self.faults.clone(),
        };
        let (run, status, faults) = (&mut self.run, &mut self.status, &mut self.faults);
        let mut observer = AttemptObserver::new(run, status, attempt, workers, &self.resolved.config, faults)?;
        let job = Job::Train(Box::new(job));
        let result = self.supervisor.run(&self.resolved.config, &self.world, job, attempt, &mut observer);
        observer.display.finish();
        let cleaned = self.run.clean();
        let result = result?;
        cleaned?;
        result.first()
    }

    fn report_success(&mut self, trained: &TrainSummary, output: Output) -> anyhow::Result<Value> {
        self.run.keep_configuration()?;
        let latest = self.run.checkpoints()?.last().map(|row| self.run.path().join(&row.name));
        self.status.evaluating();
        let spent = self.status.goodput();
        self.run.note("ended", trained);
        warn_on_error(self.run.clear_failure());
        let (run, steps) = (self.run.path().display().to_string(), trained.step);
        let loss = trained.loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
        let (restarts, goodput) = (self.restarts, spent.summary());
        output.print(&wrapped(&format!("trained {steps} steps{loss}, {restarts} restarts, {goodput}"), 2, width()));
        output.print(&format!("run:\n  {run}"));
        if let Some(found) = &trained.evaluation {
            let percents = found.within_percent.map(|percent| format!("{percent:.1}")).join(" / ");
            let (rows, config) = (found.rows, &self.resolved.config);
            let samples = match config.train.method {
                TrainMethod::Locdiff => format!(", {} samples each", config.eval.quick_samples),
                TrainMethod::Geoclip => String::new(),
            };
            let line = format!("validation, {rows} rows{samples}: {percents} % within 1 / 25 / 200 / 750 / 2500 km");
            output.print(&wrapped(&line, 2, width()));
        }
        let evaluated = match self.evaluate(output) {
            Ok(evaluated) => evaluated,
            Err(error) => {
                let state = end_state(exit_code_of(&error));
                self.status.evaluation_failed(state, &first_cause(&error));
                return Err(error);
            }
        };
        self.status.end(RunState::Ended);
        let name = self.run.path().file_name().unwrap_or_default().to_string_lossy();
        output.print(&next_commands(&name, &self.resolved.config, evaluated.is_some()));
        Ok(json!({
            "ok": true, "run": run, "step": trained.step, "from_step": trained.from_step, "loss": trained.loss,
            "skipped_steps": trained.skipped_steps, "restarts": self.restarts, "checkpoint": latest,
            "evaluation": trained.evaluation, "overlap": trained.overlap, "eval": evaluated,
            "goodput_percent": spent.percent(), "goodput": spent,
        }))
    }

    /// Evaluates the trained model on the devices that trained it. Returns `None` if `eval.after_train` is not set or
    /// there are no test shards.
    fn evaluate(&mut self, output: Output) -> anyhow::Result<Option<Value>> {
        let config = &self.resolved.config;
        if !config.eval.after_train {
            return Ok(None);
        }
        let (checkpoint, reason) = eval::choose(self.run.path(), config.eval.checkpoint)?;
        output.print(&format!("evaluating ({reason}):\n  {}", checkpoint.path.display()));
        let evaluation = Evaluation {
            supervisor: &mut self.supervisor,
            resolved: self.resolved.clone(),
            world: self.world.clone().with_all_cores(),
            run: self.run.path(),
            checkpoint: &checkpoint,
            is_held: true,
            output,
        };
        let evaluated = eval::after_training(evaluation);
        evaluated.map_err(|error| {
            let run = self.run.path().display();
            let context = match end_state(exit_code_of(&error)) {
                RunState::Interrupted => format!("{run} is trained; the same command evaluates it"),
                _ => format!("{run} was trained, but its evaluation failed"),
            };
            error.context(context)
        })
    }
}

/// The state of a run after its command failed with `code`.
fn end_state(code: ExitCode) -> RunState {
    match code {
        ExitCode::Interrupted | ExitCode::Preempted => RunState::Interrupted,
        _ => RunState::Failed,
    }
}

/// Whether the exit code means that the data, the configuration or the machine does not allow training.
fn is_refusal(code: ExitCode) -> bool {
    use ExitCode::{BadData, Config, Corrupt, Device, NoData, WorkerIncompatible, WorkerMissing};
    matches!(code, BadData | Config | Corrupt | Device | NoData | WorkerIncompatible | WorkerMissing)
}

/// The result of `train` for a run that has nothing left to do.
fn at_last_step(run: &RunFolder, config: &RunConfig, output: Output) -> Result<Value, LaunchError> {
    let (name, step) = (run.path().file_name().unwrap_or_default().to_string_lossy(), run.newest_step()?);
    output.print(&format!(
        "run {} is at its last step, {} of {}",
        run.path().display(),
        step.unwrap_or_default(),
        config.train.steps,
    ));
    output.print(&next_commands(&name, config, true));
    let latest = run.checkpoints()?.last().map(|row| run.path().join(&row.name));
    let spent = RunStatus::current(run.path()).map(|status| status.goodput).unwrap_or_default();
    Ok(json!({
        "ok": true, "run": run.path(), "step": step, "from_step": step, "loss": null, "skipped_steps": 0,
        "restarts": 0, "checkpoint": latest, "evaluation": null, "eval": null,
        "goodput_percent": spent.percent(), "goodput": spent,
    }))
}

/// Observes one attempt: writes logs and events, shows progress, and commits checkpoints.
struct AttemptObserver<'a> {
    run: &'a mut RunFolder,
    status: &'a mut StatusKeeper,
    attempt: u32,
    logs: Vec<CappedLog>,
    faults: &'a mut Vec<InjectedFault>,
    display: Display,
    forecast: Forecast,
    /// Whether a warning about a failed write was logged.
    has_warned: bool,
    /// Injected fault: damages the first checkpoint that is committed at this step or later.
    corrupt_from: Option<u64>,
}

impl<'a> AttemptObserver<'a> {
    fn new(
        run: &'a mut RunFolder,
        status: &'a mut StatusKeeper,
        attempt: u32,
        workers: usize,
        config: &RunConfig,
        faults: &'a mut Vec<InjectedFault>,
    ) -> Result<Self, LaunchError> {
        let open = |rank: usize| {
            let path = run.log_path(attempt, rank as u32);
            CappedLog::create(&path, config.supervise.log_bytes_max).map_err(LaunchError::at(path))
        };
        let logs = (0..workers).map(open).collect::<Result<_, _>>()?;
        let (display, forecast) = (Display::new(), Forecast::new(config.train.steps));
        Ok(Self { run, status, attempt, logs, faults, display, forecast, has_warned: false, corrupt_from: None })
    }

    /// Logs a warning for the first failed write and ignores later ones. Lost logs must not stop the run.
    fn warn_once(&mut self, written: Result<(), LaunchError>) {
        if written.is_err() && !std::mem::replace(&mut self.has_warned, true) {
            warn_on_error(written);
        }
    }
}

impl GangObserver for AttemptObserver<'_> {
    fn line(&mut self, rank: usize, line: &str) {
        let path = self.run.log_path(self.attempt, rank as u32);
        let written = self.logs[rank].add(line).map_err(LaunchError::at(path));
        self.warn_once(written);
    }

    fn beat(&mut self, rank: usize, beat: &Beat) {
        if rank == 0
            && let Some(estimate) = self.forecast.beat(beat.step, Instant::now())
        {
            estimate.log();
        }
        if let Some((slow, ratio)) = self.status.beat(rank, beat) {
            tracing::warn!("rank {slow} is slow: its work takes {ratio:.1} times as long as the median over all ranks");
            self.run.note("straggler", &json!({ "rank": slow, "ratio": ratio }));
        }
    }

    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        match message {
            ToLauncher::Progress(progress) => {
                self.status.progress(&progress);
                // The workers have accepted the data and the checkpoint, so this configuration becomes the run's
                // configuration.
                let written = self.run.keep_configuration();
                self.warn_once(written);
                self.display.report(&progress);
                self.run.note("progress", &progress);
            }
            ToLauncher::Evaluated(found) => {
                self.display.evaluated(&found);
                self.run.note("evaluated", &found);
            }
            ToLauncher::Breaking(fault) => {
                self.faults.retain(|known| *known != fault);
                if fault.kind == FaultKind::CorruptCheckpoint {
                    self.corrupt_from = Some(fault.step);
                }
                tracing::warn!("injected: {fault}");
                self.run.note("injected", &json!({ "fault": fault }));
            }
            _ => {}
        }
        Ok(())
    }

    fn commit(&mut self, parts: &[PartsWritten]) -> Result<(), LaunchError> {
        let step = parts.first().map_or(0, |written| written.step);
        match self.run.commit(self.attempt, step, parts)? {
            Commit::Done { checkpoint, pruned } => {
                let path = checkpoint.path.display();
                tracing::info!("committed checkpoint {path}");
                if self.corrupt_from.take_if(|from| *from <= step).is_some() {
                    flip_byte(&checkpoint.path)?;
                }
                self.status.committed(step);
                self.run
                    .note("checkpoint", &json!({ "step": step, "score": checkpoint.manifest.score, "pruned": pruned }));
            }
            Commit::AlreadyThere(path) => {
                tracing::warn!("checkpoint {} already exists and is kept", path.display());
            }
        }
        Ok(())
    }
}

/// Flips a bit in the middle of the largest file of a checkpoint.
fn flip_byte(checkpoint: &Path) -> Result<(), LaunchError> {
    let fail = LaunchError::at(checkpoint);
    let entries = std::fs::read_dir(checkpoint).map_err(&fail)?.filter_map(Result::ok);
    let largest = entries.max_by_key(|entry| entry.metadata().map_or(0, |metadata| metadata.len()));
    let path = largest.map(|entry| entry.path()).unwrap_or_default();
    let mut bytes = std::fs::read(&path).map_err(&fail)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).map_err(fail)
}

/// Logs a failed write as a warning.
fn warn_on_error(written: Result<(), LaunchError>) {
    if let Err(error) = written {
        tracing::warn!("cannot write to the run folder: {error}");
    }
}

/// The checkpoint to take the initial weights from. `None` if `train.init_from` is empty.
fn initial_checkpoint(config: &RunConfig) -> Result<Option<PathBuf>, LaunchError> {
    let from = &config.train.init_from;
    let find = || checkpoint_at("train.init_from", Path::new(from), &config.checkpoint.dir);
    Ok((!from.is_empty()).then(find).transpose()?.map(|checkpoint| checkpoint.path))
}

/// The prefix of a new run's name: the name of the preset, or the name of the configuration file without its extension.
/// If `--config` is not given and `--set` names the training data, the prefix is "run".
fn run_name_prefix(global: &Global, resolved: &Resolved) -> String {
    match global.config.last() {
        Some(path) => path.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned()),
        None if matches!(resolved.origin("shards.train"), ValueOrigin::Set) => "run".into(),
        None => super::default_preset(global, &gpus::inventory()).to_owned(),
    }
}
