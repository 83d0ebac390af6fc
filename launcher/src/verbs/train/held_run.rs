//! Training of a run whose lock this launcher holds: attempts, restarts, and the evaluation at the end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use locdiff_core::config::{Resolved, RunConfig, TrainMethod};
use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode as _};
use locdiff_core::protocol::{InjectedFault, Job, TimeBefore, TrainJob, TrainSummary};
use serde_json::{Value, json};

use super::attempt_observer::{AttemptObserver, warn_on_error};
use super::ending::next_commands;
use super::record::{RESUME_HINT, failure_record, first_cause, resume_command};
use crate::error::{LaunchError, exit_code_of};
use crate::output::Output;
use crate::rendezvous::{NodeWorkers, RunNode};
use crate::run_folder::{RunFolder, RunState, StatusKeeper, exact_unix_s};
use crate::supervisor::Supervisor;
use crate::terminal::{width, wrapped};
use crate::verbs::eval::{self, Evaluation};
use crate::verbs::restarts::{FailedAttempt, RestartPolicy, RestartVerdict, after};
use crate::verbs::runs::checkpoint_at;

/// A training run whose lock this launcher holds.
pub(super) struct HeldRun<'a> {
    pub(super) resolved: &'a Resolved,
    pub(super) world: NodeWorkers,
    pub(super) run: RunFolder,
    /// Whether this launcher created the folder of the run.
    pub(super) is_created: bool,
    pub(super) supervisor: Supervisor,
    pub(super) faults: Vec<InjectedFault>,
    pub(super) restarts: u32,
    /// The launcher whose worker was the root cause of the last failure, by [`RunNode::process`].
    pub(super) failing_launcher: Option<u64>,
    /// Launchers whose workers have taken part in a step.
    pub(super) trained: BTreeSet<u64>,
    /// The largest number of workers that the run has had or expects.
    pub(super) workers_max: usize,
    pub(super) policy: RestartPolicy,
    pub(super) status: StatusKeeper,
}

impl HeldRun<'_> {
    /// Makes attempts until one succeeds, a signal asks to stop, or [`RestartPolicy`] gives up.
    pub(super) fn run_to_end(mut self, output: Output) -> anyhow::Result<Value> {
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
                            self.failing_launcher = None;
                            continue;
                        }
                    }
                }
                Ok(trained) => return self.report_success(&trained, output),
                Err(error) => error,
            };
            let verdict = match self.leave_out_failing_node(&error) {
                Some(node) => self.policy.without_node(node),
                None => self.policy.judge(&FailedAttempt::new(&error), self.newest_step(), began.elapsed()),
            };
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

    /// Names a node whose workers have failed in two attempts in a row, and a node that cannot train although others
    /// have. Leaves the node out if that is allowed, and returns its number.
    fn leave_out_failing_node(&mut self, error: &anyhow::Error) -> Option<u32> {
        let known = error.downcast_ref::<LaunchError>()?;
        let (kind, gang) = (known.failure_kind(), known.gang()?);
        if kind == FailureKind::Outage || gang.is_held {
            // Storage that does not respond is not the fault of the node that notices it first.
            return None;
        }
        let cluster = self.world.cluster.as_ref()?;
        let node = gang.node.and_then(|number| self.world.node(number));
        let before = std::mem::replace(&mut self.failing_launcher, node.map(|node| node.process));
        let RunNode { number, host, process, .. } = node?;
        let reason = match kind {
            FailureKind::Final if self.trained.is_empty() || self.trained.contains(process) => return None,
            FailureKind::Final => {
                format!("node {number} ({host}) cannot train, but others can: {}", first_cause(error))
            }
            _ if before == Some(*process) => {
                format!("the workers of node {number} ({host}) failed in two attempts in a row")
            }
            _ => return None,
        };
        let may_go_on = self.world.nodes.len() > self.resolved.config.parallel.nodes_needed() as usize;
        if *number == 0 || !cluster.may_shrink() || !may_go_on || !self.policy.allows_restarts() {
            tracing::warn!("{reason}");
            return None;
        }
        tracing::warn!("{reason}; going on without this node");
        cluster.leave_out(*number, *process, &format!("{reason}; start a launcher there when it is mended"));
        self.failing_launcher = None;
        Some(*number)
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
            let (workers, rows) = (self.workers_max, config.train.micro_batch);
            tracing::info!("each worker processes at most {rows} rows at once, as with {workers} workers");
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
        let attempt = self.run.begin_attempt(u32::try_from(self.world.slots.len()).unwrap_or(u32::MAX))?;
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
        if self.status.has_trained_since(step) {
            self.trained.extend(self.world.nodes.iter().map(|node| node.process));
        }
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

/// The checkpoint to take the initial weights from. `None` if `train.init_from` is empty.
fn initial_checkpoint(config: &RunConfig) -> Result<Option<PathBuf>, LaunchError> {
    let from = &config.train.init_from;
    let find = || checkpoint_at("train.init_from", Path::new(from), &config.checkpoint.dir);
    Ok((!from.is_empty()).then(find).transpose()?.map(|checkpoint| checkpoint.path))
}
