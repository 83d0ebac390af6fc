//! `train`: opens the run, starts workers from its newest checkpoint, and starts them again when one of them fails.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use locdiff_core::config::{Resolved, RunConfig};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::files::Files;
use locdiff_core::protocol::{Fault, Job, PartsWritten, ToLauncher, TrainJob, TrainSummary};
use serde::Serialize;
use serde_json::{Value, json};

use super::eval::{self, Phase};
use crate::cli::Global;
use crate::error::{LaunchError, exit_code_of, refuse, reported};
use crate::gpus;
use crate::output::Output;
use crate::progress::Display;
use crate::rendezvous::World;
use crate::run_folder::{Commit, RunFolder, new_run_name, whole_checkpoint};
use crate::supervisor::{Observer, Supervisor};

/// `train`.
pub(super) fn run(inject: &[String], global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = super::plan(global)?;
    let faults = inject.iter().map(|text| parse_fault(text, &world)).collect::<Result<Vec<_>, _>>()?;
    run_resolved(&resolved, &world, faults, &preset_of(global), output)
}

/// The same for a configuration that is resolved.
pub(super) fn run_resolved(
    resolved: &Resolved,
    world: &World,
    faults: Vec<Fault>,
    preset: &str,
    output: Output,
) -> anyhow::Result<Value> {
    let config = &resolved.config;
    world.divides(config)?;
    eval::rows_are_there("shards.train", &config.shards.train)?;
    let dir = Path::new(&config.checkpoint.dir);
    let name = match config.checkpoint.run.as_str() {
        "" => new_run_name(preset, SystemTime::now()),
        name => name.to_owned(),
    };
    let opened = RunFolder::open(Files::real(), dir, &name, config)?;
    let told = |text: &str| tracing::info!("{text}");
    told(&format!(
        "run {}{}",
        opened.folder.path().display(),
        if opened.is_new { "" } else { ", which exists already" }
    ));
    opened.changes.iter().for_each(|line| told(line));
    let supervisor = Supervisor::new()?;
    let training = Training { resolved, world, run: opened.folder, supervisor, faults, restarts: 0 };
    training.finish(output)
}

/// A training run that this launcher holds.
struct Training<'a> {
    resolved: &'a Resolved,
    world: &'a World,
    run: RunFolder,
    supervisor: Supervisor,
    faults: Vec<Fault>,
    restarts: u32,
}

impl Training<'_> {
    /// Attempts, until one ends well or must not be repeated.
    fn finish(mut self, output: Output) -> anyhow::Result<Value> {
        loop {
            let error = match self.attempt() {
                Ok(trained) => return self.ended(&trained, output),
                Err(error) => error,
            };
            let code = exit_code_of(&error);
            let limit = self.resolved.config.supervise.max_restarts;
            let may_pass = matches!(code, ExitCode::WorkerFailed | ExitCode::Timeout);
            let failure = json!({ "error": format!("{error:#}"), "exit_code": code.code(), "restarts": self.restarts });
            let what = if code == ExitCode::Interrupted { "interrupted" } else { "failed" };
            said(self.run.event(what, &failure));
            if !may_pass || self.restarts >= limit {
                if code != ExitCode::Interrupted {
                    said(self.run.write_failure(&failure));
                }
                return Err(error);
            }
            self.restarts += 1;
            tracing::warn!("{error:#}");
            tracing::warn!("starting again from the newest checkpoint, restart {} of {limit}", self.restarts);
        }
    }

    fn attempt(&mut self) -> anyhow::Result<TrainSummary> {
        let point = self.run.resume_point()?;
        point.set_aside.iter().for_each(|line| tracing::warn!("{line}"));
        let init_from = match &point.checkpoint {
            Some(_) => None,
            None => initial_checkpoint(&self.resolved.config)?,
        };
        self.supervisor.check_interrupted()?;
        let attempt = self.run.begin_attempt()?;
        let step = point.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.manifest.step);
        match &point.checkpoint {
            Some(checkpoint) => tracing::info!("going on from {}", checkpoint.path.display()),
            None => tracing::info!("beginning with the first step"),
        }
        let workers = self.world.places.len();
        self.run.event("attempt", &json!({ "attempt": attempt, "step": step, "workers": workers }))?;
        let job = TrainJob {
            config: self.resolved.config.clone(),
            run_dir: self.run.path().to_owned(),
            init_from,
            resume: point.checkpoint.map(|checkpoint| checkpoint.path),
            best_score: point.best_score,
            restarts: attempt,
            faults: self.faults.clone(),
        };
        let mut observer = Watch::new(&mut self.run, attempt, workers, &mut self.faults)?;
        let job = Job::Train(Box::new(job));
        let result = self.supervisor.run(&self.resolved.config, self.world, job, attempt, &mut observer);
        observer.display.finish();
        let cleaned = self.run.clean();
        let result = result?;
        cleaned?;
        result.first()
    }

    fn ended(&mut self, trained: &TrainSummary, output: Output) -> anyhow::Result<Value> {
        self.run.keep_configuration()?;
        said(self.run.event("ended", trained));
        said(self.run.clear_failure());
        let (run, steps) = (self.run.path().display().to_string(), trained.step);
        let latest = self.run.checkpoints()?.last().map(|row| self.run.path().join(&row.name));
        let loss = trained.loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
        output.people(&format!("trained {steps} steps{loss}, {} restarts: {run}", self.restarts));
        if let Some(found) = &trained.evaluation {
            let percents = found.within_percent.map(|percent| format!("{percent:.1}")).join(" / ");
            let rows = found.rows;
            output.people(&format!("validation, {rows} rows: within 1 / 25 / 200 / 750 / 2500 km {percents} %"));
        }
        let evaluated = self.evaluate(output)?;
        output.people(&format!("tensorboard --logdir {}", self.resolved.config.checkpoint.dir));
        Ok(json!({
            "ok": true, "run": run, "step": trained.step, "from_step": trained.from_step, "loss": trained.loss,
            "skipped_steps": trained.skipped_steps, "restarts": self.restarts, "checkpoint": latest,
            "evaluation": trained.evaluation, "eval": evaluated,
        }))
    }

    /// `eval.after_train`: the same workers evaluate what they have trained.
    fn evaluate(&mut self, output: Output) -> anyhow::Result<Option<Value>> {
        let config = &self.resolved.config;
        if !config.eval.after_train {
            return Ok(None);
        }
        let (checkpoint, words) = eval::choose(self.run.path(), config.eval.checkpoint)?;
        output.people(&format!("evaluating {} ({words})", checkpoint.path.display()));
        let phase = Phase {
            supervisor: &mut self.supervisor,
            resolved: self.resolved.clone(),
            world: self.world.clone().with_all_cores(),
            run: self.run.path(),
            checkpoint: &checkpoint,
            is_held: true,
            output,
        };
        let evaluated = eval::after_training(phase);
        evaluated.with_context(|| format!("{} is trained, but not evaluated", self.run.path().display()))
    }
}

/// Hears one attempt: logs, events, progress, commits.
struct Watch<'a> {
    run: &'a mut RunFolder,
    attempt: u32,
    logs: Vec<File>,
    faults: &'a mut Vec<Fault>,
    display: Display,
    /// A line or an event could not be written; it was said.
    is_troubled: bool,
}

impl<'a> Watch<'a> {
    fn new(
        run: &'a mut RunFolder,
        attempt: u32,
        workers: usize,
        faults: &'a mut Vec<Fault>,
    ) -> Result<Self, LaunchError> {
        let open = |rank: usize| {
            let path = run.log_path(attempt, rank as u32);
            File::create(&path).map_err(LaunchError::at(path))
        };
        let logs = (0..workers).map(open).collect::<Result<_, _>>()?;
        Ok(Self { run, attempt, logs, faults, display: Display::new(), is_troubled: false })
    }

    fn event(&mut self, what: &str, details: &impl Serialize) {
        let written = self.run.event(what, details);
        self.said_once(written);
    }

    /// What a run tells about itself is worth a warning, not the run.
    fn said_once(&mut self, written: Result<(), LaunchError>) {
        if written.is_err() && !std::mem::replace(&mut self.is_troubled, true) {
            said(written);
        }
    }
}

impl Observer for Watch<'_> {
    fn line(&mut self, rank: usize, line: &str) {
        tracing::info!("[rank {rank}] {line}");
        let path = self.run.log_path(self.attempt, rank as u32);
        let written = writeln!(self.logs[rank], "{line}").map_err(LaunchError::at(path));
        self.said_once(written);
    }

    fn report(&mut self, message: ToLauncher) {
        match message {
            ToLauncher::Progress(progress) => {
                // The workers have taken data and checkpoint: from now on this is the run's configuration.
                let kept = self.run.keep_configuration();
                self.said_once(kept);
                self.display.report(&progress);
                self.event("progress", &progress);
            }
            ToLauncher::Evaluated(found) => {
                self.display.evaluated(&found);
                self.event("evaluated", &found);
            }
            ToLauncher::Breaking(fault) => {
                self.faults.retain(|known| *known != fault);
                tracing::warn!("injected: {fault:?}");
                self.event("injected", &json!({ "fault": fault }));
            }
            _ => {}
        }
    }

    fn commit(&mut self, parts: &[PartsWritten]) -> Result<(), LaunchError> {
        let step = parts.first().map_or(0, |written| written.step);
        match self.run.commit(self.attempt, step, parts)? {
            Commit::Done { checkpoint, pruned } => {
                let path = checkpoint.path.display();
                tracing::info!("checkpoint {path}");
                self.event(
                    "checkpoint",
                    &json!({ "step": step, "score": checkpoint.manifest.score, "pruned": pruned }),
                );
            }
            Commit::AlreadyThere(path) => {
                tracing::warn!("{} is there already and stays", path.display());
            }
        }
        Ok(())
    }
}

/// A warning in the place of an error.
fn said(written: Result<(), LaunchError>) {
    if let Err(error) = written {
        tracing::warn!("not written: {error}");
    }
}

/// `kill@rank=1,step=7`.
fn parse_fault(text: &str, world: &World) -> Result<Fault, LaunchError> {
    let wrong = |reason: &str| reported!(Usage, "--inject {text}: {reason}, wanted kill@rank=R,step=S");
    let fields = text.strip_prefix("kill@").ok_or_else(|| wrong("no fault of this name"))?;
    let (mut rank, mut step) = (None, None);
    for field in fields.split(',') {
        match field.split_once('=') {
            Some(("rank", value)) => rank = value.parse::<u32>().ok(),
            Some(("step", value)) => step = value.parse::<u64>().ok(),
            _ => return Err(wrong(&format!("\"{field}\" is no field"))),
        }
    }
    let (Some(rank), Some(step)) = (rank, step) else { return Err(wrong("rank or step is missing or no number")) };
    if rank as usize >= world.places.len() || step == 0 {
        return Err(wrong(&format!("ranks are 0 to {}, steps count from 1", world.places.len() - 1)));
    }
    Ok(Fault::Kill { rank, step })
}

/// The checkpoint that a new run starts from: the newest whole one of a run, or the one that is named.
fn initial_checkpoint(config: &RunConfig) -> Result<Option<PathBuf>, LaunchError> {
    if config.train.init_from.is_empty() {
        return Ok(None);
    }
    let from = Path::new(&config.train.init_from);
    if !from.is_dir() {
        refuse!(NoData, "train.init_from: {} is no run and no checkpoint", from.display());
    }
    let (checkpoint, passed_over) = whole_checkpoint(from)?;
    passed_over.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(Some(checkpoint.path))
}

/// What a new run is called after.
fn preset_of(global: &Global) -> String {
    match &global.config {
        Some(path) => path.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned()),
        None => super::default_preset(global, &gpus::inventory()).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::HasExitCode;
    use locdiff_core::protocol::Place;

    use super::*;

    fn world(workers: u32) -> World {
        let place = |rank| Place { rank, world: workers, local_rank: rank, gpu: None, threads: 1 };
        World { places: (0..workers).map(place).collect(), share_gpu: false }
    }

    #[test]
    fn faults_are_read_or_refused_with_a_reason() {
        let world = world(2);
        assert_eq!(parse_fault("kill@rank=1,step=7", &world).expect("right"), Fault::Kill { rank: 1, step: 7 });
        for (text, reason) in [
            ("hang@rank=1,step=7", "no fault of this name"),
            ("kill@rank=2,step=7", "ranks are 0 to 1"),
            ("kill@rank=1,step=0", "steps count from 1"),
            ("kill@rank=1", "missing"),
            ("kill@rank=1,when=7", "\"when=7\" is no field"),
        ] {
            let error = parse_fault(text, &world).expect_err(text);
            assert_eq!(error.exit_code(), ExitCode::Usage);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
