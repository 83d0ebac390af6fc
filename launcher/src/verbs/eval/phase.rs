//! One evaluation, or one tuning, of one checkpoint.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::config::{DecodeAnchors, Origin, Resolved, RetrievalConfig, RetrievalHead, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{ChooseJob, EvalJob, EvalSummary, HybridWish, Job, Place, ScoreJob};
use serde_json::{Value, json};

use super::files::EvalFolder;
use super::gather::Gather;
use super::{published, table};
use crate::error::LaunchError;
use crate::output::Output;
use crate::rendezvous::World;
use crate::run_folder::Checkpoint;
use crate::supervisor::{Echo, Supervisor};
use crate::verbs::run_attempt;

/// How long another evaluation of the run may take to score and write what it has.
const FOLDER_PATIENCE: Duration = Duration::from_secs(60);

/// One evaluation of one checkpoint.
pub(in crate::verbs) struct Phase<'a> {
    pub(in crate::verbs) supervisor: &'a mut Supervisor,
    pub(in crate::verbs) resolved: Resolved,
    pub(in crate::verbs) world: World,
    pub(in crate::verbs) run: &'a Path,
    pub(in crate::verbs) checkpoint: &'a Checkpoint,
    /// This launcher holds the run, and may write its event files.
    pub(in crate::verbs) is_held: bool,
    pub(in crate::verbs) output: Output,
}

impl Phase<'_> {
    /// Locates the test rows, writes answers and table, prints.
    pub(in crate::verbs) fn evaluate(&mut self, hybrid: HybridWish, is_table1: bool) -> anyhow::Result<Value> {
        let config = self.resolved.config.clone();
        rows_are_there("shards.test", &config.shards.test)?;
        let (gather, summary) = self.locate(&config.shards.test, hybrid, false)?;
        let folder = self.folder()?;
        let written = folder.write_answers(&gather)?;
        let board = self.is_held.then(|| (self.run.join("tensorboard"), summary.step));
        if board.is_none() {
            tracing::warn!("another launcher holds the run, so its TensorBoard is left alone");
        }
        let (thresholds_km, seed) = (config.eval.thresholds_km.clone(), config.train.seed);
        let data = table::data_words(&serde_json::to_value(&summary)?);
        let job = ScoreJob { truth: written.truth, methods: written.methods, thresholds_km, seed, data, board };
        let scores = self.one_worker(Job::Score(Box::new(job)))?;
        let mut rows = table::computed(&scores["rows"], &summary, &gather, &config);
        if is_table1 {
            rows.extend(published::beside(&config.eval.thresholds_km));
        }
        let result = json!({
            "ok": true, "run": self.run, "checkpoint": self.checkpoint.path, "data": summary,
            "rows": rows, "differences": scores["differences"],
        });
        let text = table::text(&result);
        let paths = folder.write_report(&result, &text, &config)?;
        self.output.people(&text);
        paths.iter().for_each(|path| self.output.people(&path.display().to_string()));
        Ok(result)
    }

    /// Chooses the settings of LocDiff-H on the validation rows and keeps them; they hold for this phase from now on.
    pub(in crate::verbs) fn tune(&mut self) -> anyhow::Result<Value> {
        let config = self.resolved.config.clone();
        rows_are_there("shards.validation", &config.shards.validation)?;
        let (gather, summary) = self.locate(&config.shards.validation, HybridWish::Wanted, true)?;
        let mut rows = tempfile::NamedTempFile::new().context("a file for the errors of all settings")?;
        for row in gather.rows() {
            writeln!(rows, "{}", serde_json::to_string(row)?).context("the errors of all settings")?;
        }
        rows.flush().context("the errors of all settings")?;
        let thresholds_km = config.eval.thresholds_km.clone();
        let chosen =
            self.one_worker(Job::Choose(Box::new(ChooseJob { rows: rows.path().to_owned(), thresholds_km })))?;
        let setting: Tuned = serde_json::from_value(chosen["setting"].clone())?;
        setting.put_into(&mut self.resolved);
        let kind = if summary.is_simulated { "simulated photos" } else { "photos" };
        let words = format!(
            "tuned on {} {kind} of {} at step {} of {}: {}",
            summary.rows,
            config.shards.validation,
            summary.step,
            self.run.display(),
            chosen["words"].as_str().unwrap_or_default()
        );
        let path = self.folder()?.write_tuned(&words, &setting)?;
        self.output.people(&format!("{words}\n{}", toml::to_string(&setting).unwrap_or_default().trim_end()));
        self.output.people(&path.display().to_string());
        Ok(json!({ "ok": true, "run": self.run, "data": summary, "tuned": path, "choice": chosen }))
    }

    /// The run's folder of results, for this evaluation alone: what is scored must be what it has written. Another one that writes
    /// there is waited for.
    fn folder(&mut self) -> anyhow::Result<EvalFolder> {
        let began = Instant::now();
        loop {
            self.supervisor.check_interrupted()?;
            match EvalFolder::create(self.run) {
                Err(LaunchError::RunHeld { .. }) if began.elapsed() < FOLDER_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                found => return Ok(found?),
            }
        }
    }

    /// Where every row of some shards is, in their order.
    fn locate(&mut self, data: &str, hybrid: HybridWish, tune: bool) -> anyhow::Result<(Gather, EvalSummary)> {
        let config = self.resolved.config.clone();
        let needs_gallery = hybrid != HybridWish::No && config.retrieval.head != RetrievalHead::Knn;
        let job = EvalJob { config, checkpoint: self.checkpoint.path.clone(), data: data.to_owned(), hybrid, tune };
        if needs_gallery {
            self.embed_gallery(&job)?;
        }
        let mut gather = Gather::default();
        let job = Job::Eval(Box::new(job));
        let found = run_attempt(self.supervisor, &self.resolved, &self.world, job, 0, &mut gather)?;
        let first = found.results.into_iter().next().unwrap_or_default();
        let summary: EvalSummary = serde_json::from_value(first)?;
        gather.check(summary.rows)?;
        Ok((gather, summary))
    }

    /// One worker with all cores embeds the gallery, once for all: afterwards it lies on the disk.
    fn embed_gallery(&mut self, job: &EvalJob) -> anyhow::Result<()> {
        let mut world = World { places: self.world.places[..1].to_vec(), share_gpu: false };
        world.places.iter_mut().for_each(|place| (place.world, place.threads) = (1, cores()));
        let job = Job::Gallery(Box::new(job.clone()));
        run_attempt(self.supervisor, &self.resolved, &world, job, 0, &mut Echo(true)).map(drop)
    }

    /// One worker on the CPU for what has been gathered.
    fn one_worker(&mut self, job: Job) -> anyhow::Result<Value> {
        let found = run_attempt(self.supervisor, &self.resolved, &one_on_the_cpu(), job, 0, &mut Echo(true))?;
        Ok(found.results.into_iter().next().unwrap_or_default())
    }
}

/// The settings of LocDiff-H that tuning chooses, as `tuned.toml` has them.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Tuned {
    mode: locdiff_core::config::HybridMode,
    radius_km: f64,
    density_weight: f64,
    density_km: f64,
}

impl Tuned {
    /// What the command line says stays.
    fn put_into(&self, resolved: &mut Resolved) {
        let is_free = |field: &str| !matches!(resolved.origin(&format!("retrieval.{field}")), Origin::Set);
        let free = ["mode", "radius_km", "density_weight", "density_km"].map(is_free);
        let config: &mut RetrievalConfig = &mut resolved.config.retrieval;
        let choose = |field: usize, tuned: f64, own: f64| if free[field] { tuned } else { own };
        config.mode = if free[0] { self.mode } else { config.mode };
        config.radius_km = choose(1, self.radius_km, config.radius_km);
        config.density_weight = choose(2, self.density_weight, config.density_weight);
        config.density_km = choose(3, self.density_km, config.density_km);
    }
}

/// `eval.after_train`: what there is to evaluate with is used, what is missing is said. `None` where there are no test rows.
pub(in crate::verbs) fn after_training(mut phase: Phase<'_>) -> anyhow::Result<Option<Value>> {
    let config = &mut phase.resolved.config;
    if let Err(missing) = rows_are_there("shards.test", &config.shards.test) {
        tracing::warn!("not evaluated: {missing}");
        return Ok(None);
    }
    let mut hybrid = HybridWish::IfItFits;
    if let Some(missing) = missing_for_retrieval(&config.retrieval) {
        hybrid = HybridWish::No;
        tracing::warn!("there is nothing at {missing}, so there is no retrieval and no LocDiff-H");
        if config.eval.anchors == DecodeAnchors::Gallery && !Path::new(&config.retrieval.gallery).exists() {
            tracing::warn!("codes are decoded on a grid, refined");
            (config.eval.anchors, config.eval.refine) = (DecodeAnchors::Grid, true);
        }
    }
    let has_validation = rows_are_there("shards.validation", &config.shards.validation).is_ok();
    if hybrid != HybridWish::No && has_validation {
        match phase.tune() {
            Err(error) if is_misfit(&error) => tracing::warn!("not tuned: {error:#}"),
            tuned => drop(tuned?),
        }
    }
    phase.evaluate(hybrid, false).map(Some)
}

/// What retrieval cannot do without, where it is not there.
fn missing_for_retrieval(config: &RetrievalConfig) -> Option<&str> {
    // Photos are compared with training photos, which have been there a moment ago.
    let geoclip = (config.head != RetrievalHead::Knn).then_some(config.geoclip.as_str());
    let wanted = [geoclip, Some(config.gallery.as_str()).filter(|gallery| !gallery.is_empty())];
    wanted.into_iter().flatten().find(|path| !Path::new(path).exists())
}

/// The head does not fit the data, or there is too little of it: no reason not to evaluate LocDiff alone.
fn is_misfit(error: &anyhow::Error) -> bool {
    let code = error.downcast_ref::<LaunchError>().map(LaunchError::exit_code);
    matches!(code, Some(ExitCode::Config | ExitCode::BadData))
}

/// A world of one worker on the CPU, with all cores.
pub(super) fn one_on_the_cpu() -> World {
    let place = Place { rank: 0, world: 1, local_rank: 0, gpu: None, threads: cores() };
    World { places: vec![place], share_gpu: false }
}

/// Workers on GPUs share the cores of the machine: no bit of what a GPU computes depends on how many there are.
pub(in crate::verbs) fn with_all_cores(mut world: World) -> World {
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
pub(super) fn rows_are_there(field: &str, location: &str) -> Result<(), LaunchError> {
    if ShardsConfig::may_be_at(location) {
        return Ok(());
    }
    let text = format!(
        "no shards at {location:?} ({field}); make some with `locdiff-launch shards simulate --views 16 --out {}`, build them \
         from embeddings of your own with `shards build`, or name others with `--set {field}=...`",
        if location.is_empty() { "DIR" } else { location }
    );
    Err(LaunchError::Reported { text, code: ExitCode::NoData })
}
