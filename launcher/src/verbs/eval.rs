//! `eval`: the coordinator's phase of evaluation. Workers locate rows, this side gathers them in the order of the data,
//! writes them to the run's folder, has them scored, and prints the table.
//!
//! - `target`: which run, which checkpoint, which configuration.
//! - `gather`: rows as they come from the workers.
//! - `files`: what is left in `RUN/eval/`.
//! - `table`: for people; `published`: the paper's rows.

mod files;
mod gather;
mod published;
mod table;
mod target;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::Global;
use crate::config::Resolved;
use crate::error::LaunchError;
use crate::exit_code::ExitCode;
use crate::gpus;
use crate::output::Output;
use crate::protocol::{EvalJob, EvalSummary, Job, Place, ScoreJob};
use crate::rendezvous::World;
use crate::run_folder::Checkpoint;
use crate::supervisor::{Echo, Supervisor};

use files::EvalFolder;
use gather::Gather;
use target::Target;

/// What `eval` is asked for.
#[derive(Debug, Clone, Default)]
pub(super) struct Request {
    /// LocDiff-H too.
    pub(super) hybrid: bool,
    /// The table of the paper to print.
    pub(super) suite: Option<String>,
    /// Score these predictions instead.
    pub(super) predictions: Option<PathBuf>,
    /// Choose the hybrid's settings.
    pub(super) tune: bool,
}

/// `eval`.
pub(super) fn run(request: &Request, global: &Global, output: Output) -> anyhow::Result<Value> {
    match request.suite.as_deref() {
        None | Some("main") => {}
        Some("perturbation") => return super::perturbation::run(global, output),
        Some(other) => {
            let text = format!("eval --suite {other}: no such suite; there are main and perturbation");
            return Err(LaunchError::Reported { text, code: ExitCode::Usage }.into());
        }
    }
    let target = Target::find(global, output)?;
    let world = World::plan(&target.resolved.config, &gpus::inventory())?;
    let mut phase = Phase {
        supervisor: &mut Supervisor::new()?,
        resolved: &target.resolved,
        world: with_all_cores(world),
        run: &target.run,
        checkpoint: &target.checkpoint,
        output,
    };
    phase.evaluate(request)
}

/// One evaluation of one checkpoint.
pub(super) struct Phase<'a> {
    pub(super) supervisor: &'a mut Supervisor,
    pub(super) resolved: &'a Resolved,
    pub(super) world: World,
    pub(super) run: &'a Path,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) output: Output,
}

impl Phase<'_> {
    /// Locates the test rows, writes answers and table, prints.
    pub(super) fn evaluate(&mut self, request: &Request) -> anyhow::Result<Value> {
        let config = &self.resolved.config;
        rows_are_there("shards.test", &config.shards.test)?;
        let (gather, summary) = self.locate(&config.shards.test)?;
        let folder = EvalFolder::create(self.run)?;
        let written = folder.write_answers(&gather)?;
        let seed = config.train.seed;
        let job = ScoreJob { truth: written.truth.clone(), methods: written.methods.clone(), seed, board: None };
        let scores = self.score(job)?;
        let mut rows = table::computed(&scores["rows"], &summary, &config.shards.test);
        if request.suite.is_some() {
            rows.extend(published::table1());
        }
        let result =
            json!({ "ok": true, "run": self.run, "checkpoint": self.checkpoint.path, "data": summary, "rows": rows });
        let text = table::text(&result);
        let paths = folder.write_report(&result, &text, config)?;
        self.output.people(&text);
        paths.iter().for_each(|path| self.output.people(&path.display().to_string()));
        Ok(result)
    }

    /// Where every row of some shards is, in their order.
    fn locate(&mut self, data: &str) -> anyhow::Result<(Gather, EvalSummary)> {
        let config = self.resolved.config.clone();
        let job = EvalJob { config, checkpoint: self.checkpoint.path.clone(), data: data.to_owned() };
        let mut gather = Gather::default();
        let found =
            super::run_attempt(self.supervisor, self.resolved, &self.world, Job::Eval(Box::new(job)), 0, &mut gather)?;
        let first = found.results.into_iter().next().unwrap_or_default();
        let summary: EvalSummary = serde_json::from_value(first)?;
        gather.check(summary.rows)?;
        Ok((gather, summary))
    }

    /// One worker on the CPU scores what was gathered.
    fn score(&mut self, job: ScoreJob) -> anyhow::Result<Value> {
        let place = Place { rank: 0, world: 1, local_rank: 0, gpu: None, threads: cores() };
        let world = World { places: vec![place], share_gpu: false };
        let job = Job::Score(Box::new(job));
        let found = super::run_attempt(self.supervisor, self.resolved, &world, job, 0, &mut Echo(true))?;
        Ok(found.results.into_iter().next().unwrap_or_default())
    }
}

/// Workers on GPUs share the cores of the machine: no bit of what a GPU computes depends on how many there are.
fn with_all_cores(mut world: World) -> World {
    let workers = u32::try_from(world.places.len()).unwrap_or(u32::MAX).max(1);
    for place in world.places.iter_mut().filter(|place| place.gpu.is_some()) {
        place.threads = (cores() / workers).max(1);
    }
    world
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Before workers are started for nothing: is there anything where the configuration says?
fn rows_are_there(field: &str, location: &str) -> Result<(), LaunchError> {
    let is_plain = !location.contains("://") && !location.contains(['*', '?', '[']);
    if !location.is_empty() && (!is_plain || Path::new(location).exists()) {
        return Ok(());
    }
    let text = format!(
        "no shards at {location:?} ({field}); make some with `locdiff-launch shards simulate --views 16 --out {}`, build them from \
         embeddings of your own with `shards build`, or name others with `--set {field}=...`",
        if location.is_empty() { "DIR" } else { location }
    );
    Err(LaunchError::Reported { text, code: ExitCode::NoData })
}
