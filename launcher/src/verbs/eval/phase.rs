//! One evaluation, or one tuning, of one checkpoint.

use std::path::Path;
use std::time::{Duration, Instant};

use locdiff_core::config::{DecodeAnchors, Origin, Resolved, RetrievalConfig, RetrievalHead, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{EvalJob, EvalSummary, GalleryEmbedded, HybridWish, Job};
use locdiff_core::tuning::{self, Choice, Hybrid, choose};
use serde_json::{Value, json};

use super::files::EvalFolder;
use super::gather::Gather;
use super::published;
use super::score::Task;
use super::table::{self, Row, data_words};
use crate::error::{LaunchError, exit_code_of, reported};
use crate::output::Output;
use crate::rendezvous::{World, cores};
use crate::run_folder::Checkpoint;
use crate::supervisor::{Echo, Supervisor};

/// How long another evaluation of the run may take to score and write what it has.
const FOLDER_PATIENCE: Duration = Duration::from_secs(60);

/// Parts of the Earth by which the choice of settings is checked.
const FOLDS: u32 = 5;

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
        let (truth, answers) = folder.write_answers(&gather)?;
        let board = self.is_held.then(|| (self.run.join("tensorboard"), summary.step));
        if board.is_none() {
            tracing::warn!("another launcher holds the run, so its TensorBoard is left alone");
        }
        let (thresholds_km, seed, data) = (config.eval.thresholds_km.clone(), config.train.seed, data_words(&summary));
        let task = Task { truth, answers, thresholds_km, seed, data: data.clone(), board };
        let (found, differences) = self.supervisor.compute(move || task.run())?;
        let mut rows = table::computed(found, &summary, &gather, &config);
        if is_table1 {
            rows.extend(published::beside(&config.eval.thresholds_km).into_iter().map(Row::Published));
        }
        let text = table::text(&data, &config.eval.thresholds_km, &rows) + &table::notes(&rows, &differences);
        let result = json!({
            "ok": true, "run": self.run, "checkpoint": self.checkpoint.path, "data": summary,
            "rows": rows, "differences": differences,
        });
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
        let (rows, thresholds_km) = (gather.tuning()?, config.eval.thresholds_km.clone());
        let chosen = self.supervisor.compute(move || {
            Ok(choose(&tuning::settings(), &rows, &thresholds_km, FOLDS).map_err(LaunchError::reported)?)
        })?;
        let setting = chosen.setting;
        put_into(setting, &mut self.resolved);
        let words = choice_words(&chosen);
        let said = format!(
            "tuned on {} {} of {} at step {} of {}: {words}",
            summary.rows,
            table::photos(summary.is_simulated),
            config.shards.validation,
            summary.step,
            self.run.display(),
        );
        let path = self.folder()?.write_tuned(&said, &setting)?;
        self.output.people(&format!("{said}\n{}", toml::to_string(&setting)?.trim_end()));
        self.output.people(&path.display().to_string());
        let mut choice = json!(chosen);
        choice["words"] = json!(words);
        choice["settings_tried"] = json!(tuning::settings().len());
        Ok(json!({ "ok": true, "run": self.run, "data": summary, "tuned": path, "choice": choice }))
    }

    /// The run's folder of results, for this evaluation alone: what is scored must be what it has written. Another one that writes
    /// there is waited for.
    fn folder(&mut self) -> anyhow::Result<EvalFolder> {
        let began = Instant::now();
        loop {
            self.supervisor.check_interrupted()?;
            match EvalFolder::create(self.run) {
                Err(error) if error.exit_code() == ExitCode::RunHeld && began.elapsed() < FOLDER_PATIENCE => {
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
        let found = self.supervisor.run(&self.resolved.config, &self.world, job, 0, &mut gather)?;
        let summary: EvalSummary = found.first()?;
        gather.check(summary.rows)?;
        Ok((gather, summary))
    }

    /// One worker with all cores embeds the gallery, once for all: afterwards it lies on the disk.
    fn embed_gallery(&mut self, job: &EvalJob) -> anyhow::Result<()> {
        let world = self.world.clone().alone(cores());
        let job = Job::Gallery(Box::new(job.clone()));
        self.supervisor.run::<GalleryEmbedded>(&self.resolved.config, &world, job, 0, &mut Echo).map(drop)
    }
}

/// What was chosen, and what it is worth on places that it was not chosen on.
fn choice_words(choice: &Choice) -> String {
    let list =
        |percents: &[f64]| percents.iter().map(|percent| format!("{percent:.1}")).collect::<Vec<_>>().join(" / ");
    let held_out = choice
        .held_out_percent
        .as_deref()
        .map_or_else(String::new, |percents| format!(", {} with settings from other places", list(percents)));
    format!(
        "{}; LocDiff-H {} %{held_out}; LocDiff {}, retrieval {}",
        choice.setting,
        list(&choice.hybrid_percent),
        list(&choice.own_percent),
        list(&choice.retrieval_percent)
    )
}

/// Takes the settings that were chosen; what the command line says stays.
fn put_into(setting: Hybrid, resolved: &mut Resolved) {
    let is_free = |field: &str| !matches!(resolved.origin(&format!("retrieval.{field}")), Origin::Set);
    let free = ["mode", "radius_km", "density_weight", "density_km"].map(is_free);
    let config: &mut RetrievalConfig = &mut resolved.config.retrieval;
    let choose = |field: usize, tuned: f64, own: f64| if free[field] { tuned } else { own };
    config.mode = if free[0] { setting.mode } else { config.mode };
    config.radius_km = choose(1, setting.radius_km, config.radius_km);
    config.density_weight = choose(2, setting.density_weight, config.density_weight);
    config.density_km = choose(3, setting.density_km, config.density_km);
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
    matches!(exit_code_of(error), ExitCode::Config | ExitCode::BadData)
}

/// Before workers are started for nothing: is there anything where the configuration says?
pub(in crate::verbs) fn rows_are_there(field: &str, location: &str) -> Result<(), LaunchError> {
    if ShardsConfig::may_be_at(location) {
        return Ok(());
    }
    let out = if location.is_empty() { "DIR" } else { location };
    let views = if field == "shards.train" { "" } else { "--views 16 " };
    Err(reported!(
        NoData,
        "no shards at {location:?} ({field}); make some with `locdiff-launch shards simulate {views}--out {out}`, build them \
         from embeddings of your own with `shards build`, or name others with `--set {field}=...`"
    ))
}
