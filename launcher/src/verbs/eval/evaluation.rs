//! Evaluates one checkpoint, or uses it to tune LocDiff-H.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use locdiff_core::cgroup::memory_available_bytes;
use locdiff_core::config::{
    DecodeAnchors, HybridMode, Resolved, RetrievalConfig, RetrievalHead, TrainMethod, ValueOrigin,
};
use locdiff_core::draw::{calibration_plot, distance_curves};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::metrics::PlaceGroups;
use locdiff_core::protocol::{EvalSummary, EvalTask, HybridRequest, Method};
use locdiff_core::tensorboard::board_folder;
use locdiff_core::tuning::{Hybrid, OF_CONSENSUS, Trials, choose};
use serde_json::{Value, json};

use super::calibrated;
use super::files::{CALIBRATION_PLOT, DISTANCE_PLOT, EvalFolder, TunedSetting};
use super::gather::{Gather, RowCollector};
use super::locator::LocatingGang;
use super::model::{ModelFile, ModelSource};
use super::published;
use super::radii;
use super::score::{BoardTarget, MethodScore, ScoreTask, by_distance};
use super::table::{self, Row, data_summary};
use crate::cli::Suite;
use crate::error::{LaunchError, exit_code_of, refuse};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::WholeCheckpoint;
use crate::supervisor::Supervisor;
use crate::terminal::{width, wrapped};
use crate::verbs::locations::require_shards;
use crate::verbs::report::write_beside;

/// How long to wait for the lock of `RUN/eval/` if another evaluation of the same run holds it.
const FOLDER_TIMEOUT: Duration = Duration::from_secs(60);

/// Width of the tables in `report.txt` and in files with tuned settings, in columns.
const REPORT_WIDTH: usize = 120;

/// Number of folds of the cross-validation, which checks the choice of settings. Each fold holds the photos of one part
/// of the Earth.
const FOLDS: u32 = 5;

/// The evaluation of one checkpoint.
pub(in crate::verbs) struct Evaluation<'a> {
    pub(in crate::verbs) supervisor: &'a mut Supervisor,
    pub(in crate::verbs) resolved: Resolved,
    pub(in crate::verbs) world: NodeWorkers,
    pub(in crate::verbs) run: &'a Path,
    pub(in crate::verbs) checkpoint: &'a WholeCheckpoint,
    /// Whether this launcher holds the lock of the run, and so may write the run's TensorBoard files.
    pub(in crate::verbs) is_held: bool,
    pub(in crate::verbs) output: Output,
}

/// The scores of an evaluation that writes nothing.
pub(super) struct Rated {
    pub(super) scores: Vec<MethodScore>,
    pub(super) summary: EvalSummary,
    /// Which rows share a true place.
    pub(super) places: PlaceGroups,
}

impl Evaluation<'_> {
    /// Locates the test rows, writes the answers and the table, and prints the table. The table also has the published
    /// rows of `suite`.
    pub(in crate::verbs) fn evaluate(&mut self, hybrid: HybridRequest, suite: Option<Suite>) -> anyhow::Result<Value> {
        let config = self.resolved.config.clone();
        require_shards("shards.test", &config.shards.test)?;
        let saved = match hybrid {
            // Whether LocDiff-H is used is not known yet.
            HybridRequest::IfItFits { .. } => None,
            known => {
                let (source, model) = (ModelSource::Run(self.run.to_owned()), ModelFile::of(self.checkpoint)?);
                radii::load_to_check(&source, &config, &model, known != HybridRequest::No, self.output)?
            }
        };
        let temperature = saved.as_ref().and_then(|saved| Some(saved.density.as_ref()?.temperature));
        let task = EvalTask::Evaluate { temperature, report_photos: config.eval.report_photos };
        let (gather, summary) = self.locate(&config.shards.test, hybrid, task)?;
        let folder = self.folder()?;
        let (truth, answers) = folder.write_answers(&gather)?;
        // LocDiff-H if it was evaluated, else LocDiff.
        let best = answers.last().map_or(Method::Locdiff, |answers| answers.method);
        let lock_first = (!self.is_held).then(|| self.run.to_owned());
        let (places, overlaps) = (PlaceGroups::of(&truth), gather.overlaps(&truth));
        let (thresholds_km, seed, data) = (
            config.eval.thresholds_km.clone(),
            config.train.seed,
            data_summary(&summary, places.count(), &config.eval),
        );
        let board = BoardTarget { folder: board_folder(self.run), step: summary.step, lock_first, data: data.clone() };
        let task = ScoreTask { truth, answers, thresholds_km, seed, board: Some(board) };
        let (found, differences) = self.supervisor.compute(move || task.run())?;
        let by_distance = gather.training_km().map(|km| by_distance(&km, &found, &config.eval.thresholds_km));
        let names: Vec<String> = found.iter().map(|scored| table::name(scored.method, &summary)).collect();
        let plot = by_distance.as_ref().map(|found| distance_curves(found, &names));
        let plot = folder.write_or_remove(DISTANCE_PLOT, plot.as_deref())?;
        let checked = saved.map_or(Ok(None), |saved| {
            let photos = calibrated::photos(&saved.calibration, &gather, &found);
            self.supervisor.compute(move || calibrated::check(&photos, &places, seed))
        })?;
        let best_name = names.last().map_or("", String::as_str);
        let reliability = checked.as_ref().map(|checked| calibration_plot(checked, best_name));
        let reliability = folder.write_or_remove(CALIBRATION_PLOT, reliability.as_deref())?;
        let mut rows = table::computed(found, &summary, &gather, &config);
        if let Some(suite) = suite {
            rows.extend(published::rows_for(suite, &config.eval.thresholds_km).into_iter().map(Row::Published));
        }
        let text = |width: usize| {
            table::text(&data, &config.eval.thresholds_km, &rows, width)
                + &table::notes(&rows, &differences, width)
                + &checked.as_ref().map_or_else(String::new, |checked| calibrated::text(checked, best_name, width))
                + &table::known_places(&overlaps, width)
        };
        let result = json!({
            "ok": true, "run": self.run, "checkpoint": self.checkpoint.path, "data": summary,
            "exclude_km": table::exclude_km(&summary, &config.eval), "prior": config.eval.prior, "overlap": overlaps,
            "rows": rows,
            "differences": differences, "by_training_distance": by_distance, "calibration": checked,
            "likelihood": checked.as_ref().and_then(|checked| calibrated::likelihood(checked, temperature)),
        });
        let head = summary.head.map_or_else(String::new, |head| format!(", retrieval head {}", head.name()));
        let heading = format!("{}{head}\n", self.checkpoint.path.display());
        let report = folder.write_report(&result, &(heading + &text(REPORT_WIDTH)), &config)?;
        self.output.print(&text(width()));
        let run = self.run.to_owned();
        // The results are complete without the page.
        let page = self.supervisor.compute(move || Ok(write_beside(&run).map_err(|error| error.to_string())))?;
        let page = page.map_err(|error| tracing::warn!("the page of the report is not written: {error}")).ok();
        let answers = folder.answers_path(best);
        let plots = plot.into_iter().chain(reliability).map(|plot| ("plot", plot));
        let paths = [("answers", answers)].into_iter().chain(plots);
        for (what, path) in paths.chain([("report", report)]).chain(page.map(|page| ("page", page))) {
            self.output.print(&format!("{what}:\n  {}", path.display()));
        }
        Ok(result)
    }

    /// Locates the test rows and scores the answers. Writes and prints nothing.
    pub(super) fn rate(&mut self, hybrid: HybridRequest) -> anyhow::Result<Rated> {
        let config = self.resolved.config.clone();
        require_shards("shards.test", &config.shards.test)?;
        let task = EvalTask::Evaluate { temperature: None, report_photos: 0 };
        let (gather, summary) = self.locate(&config.shards.test, hybrid, task)?;
        let (truth, answers) = gather.answers()?;
        let places = PlaceGroups::of(&truth);
        let (thresholds_km, seed) = (config.eval.thresholds_km, config.train.seed);
        let task = ScoreTask { truth, answers, thresholds_km, seed, board: None };
        let (scores, _) = self.supervisor.compute(move || task.run())?;
        Ok(Rated { scores, summary, places })
    }

    /// Chooses the settings of LocDiff-H on the validation rows and writes them to a file. A later call of `evaluate`
    /// uses these settings. Fields that `--set` sets are not chosen.
    pub(in crate::verbs) fn tune(&mut self, hybrid: HybridRequest) -> anyhow::Result<Value> {
        let config = self.resolved.config.clone();
        if config.train.method == TrainMethod::Geoclip {
            refuse!(
                Config,
                "run {} has trained an image head, so there is nothing to tune; tune a run with \
                 train.method = \"locdiff\"",
                self.run.display()
            );
        }
        require_shards("shards.validation", &config.shards.validation)?;
        let fixed = fixed_fields(&self.resolved);
        let trials = Trials::default().fixed(&fixed);
        let task = EvalTask::Tune(fixed);
        let (gather, summary) = self.locate(&config.shards.validation, hybrid, task)?;
        let (rows, thresholds_km) = (gather.tuning()?, config.eval.thresholds_km.clone());
        let settings_tried = trials.hybrid.len();
        let chosen = self
            .supervisor
            .compute(move || Ok(choose(&trials, &rows, &thresholds_km, FOLDS).map_err(LaunchError::reported)?))?;
        let (head, setting) = (summary.head.unwrap_or(config.retrieval.head), chosen.setting);
        let (consensus_scale, consensus_fine_scale) = (chosen.consensus.scale, chosen.consensus.fine_scale);
        let run = if head == RetrievalHead::Trained { config.retrieval.run.clone() } else { String::new() };
        let tuned = TunedSetting { head, run, consensus_scale, consensus_fine_scale, setting };
        self.resolved.config.retrieval.head = tuned.head;
        apply_setting(&tuned, &mut self.resolved);
        let origin = format!(
            "tuned on {} {} from {} with the retrieval head {}, checkpoint at step {} of run {}{}",
            summary.rows,
            table::photo_kind(summary.is_simulated),
            config.shards.validation,
            tuned.head.name(),
            summary.step,
            self.run.display(),
            table::excluded(&summary, &config.eval),
        );
        let accuracies = |width: usize| table::choice(&chosen, &config.eval.thresholds_km, width);
        let path = self.folder()?.write_tuned(
            config.eval.prior,
            &format!("{origin}\n{}\n{}", chosen.setting, accuracies(REPORT_WIDTH)),
            &tuned,
        )?;
        self.output.print(&format!("{}\n{}", wrapped(&origin, 2, width()), accuracies(width())));
        let values = toml::to_string(&tuned)?;
        let values: Vec<String> = values.lines().map(|line| format!("\n  {line}")).collect();
        self.output.print(&format!("settings in {}:{}", path.display(), values.concat()));
        let mut choice = json!(chosen);
        choice["words"] = json!(chosen.setting.to_string());
        choice["settings_tried"] = json!(settings_tried);
        Ok(json!({ "ok": true, "run": self.run, "data": summary, "tuned": path, "choice": choice }))
    }

    /// Opens and locks `RUN/eval/`, so that no other evaluation of this run replaces the files. If another evaluation
    /// holds the lock, waits for the lock for at most `FOLDER_TIMEOUT`.
    fn folder(&mut self) -> anyhow::Result<EvalFolder> {
        let began = Instant::now();
        loop {
            self.supervisor.check_interrupted()?;
            match EvalFolder::create(self.run) {
                Err(error) if error.exit_code() == ExitCode::RunHeld && began.elapsed() < FOLDER_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                found => return Ok(found?),
            }
        }
    }

    /// Lets the workers locate every row of the shards at `data`. Returns the rows in the order of the data, and a
    /// summary.
    fn locate(&mut self, data: &str, hybrid: HybridRequest, task: EvalTask) -> anyhow::Result<(Gather, EvalSummary)> {
        let mut gather = Gather::default();
        let summary = self.run(data, hybrid, task, &mut gather)?;
        gather.check(summary.rows, &summary.fingerprint)?;
        Ok((gather, summary))
    }

    /// Lets the workers locate the rows of the shards at `data`, as [`LocatingGang::run`] does.
    pub(super) fn run(
        &mut self,
        data: &str,
        hybrid: HybridRequest,
        task: EvalTask,
        rows: &mut impl RowCollector,
    ) -> anyhow::Result<EvalSummary> {
        let model = &ModelFile::of(self.checkpoint)?;
        let Self { supervisor, resolved, world, .. } = self;
        LocatingGang { supervisor, config: &resolved.config, world, model }.run(data, hybrid, task, rows)
    }
}

/// A number in the section `retrieval` of the configuration.
type RetrievalField = fn(&mut RetrievalConfig) -> &mut f64;

/// The numbers that tuning chooses, by name.
const TUNED_FIELDS: [(&str, RetrievalField); 10] = [
    ("radius_km", |config| &mut config.radius_km),
    ("scale", |config| &mut config.scale),
    ("density_weight", |config| &mut config.density_weight),
    ("samples_weight", |config| &mut config.samples_weight),
    ("fine_scale", |config| &mut config.fine_scale),
    ("fine_samples_weight", |config| &mut config.fine_samples_weight),
    ("density_km", |config| &mut config.density_km),
    ("top_margin", |config| &mut config.top_margin),
    ("consensus_scale", |config| &mut config.consensus_scale),
    ("consensus_fine_scale", |config| &mut config.consensus_fine_scale),
];

/// Whether tuning may choose a field, because `--set` does not set it.
fn is_free(resolved: &Resolved, field: &str) -> bool {
    !matches!(resolved.origin(&format!("retrieval.{field}")), ValueOrigin::Set)
}

/// The fields that `--set` sets.
fn fixed_fields(resolved: &Resolved) -> BTreeMap<String, f64> {
    let mut config = resolved.config.retrieval.clone();
    if config.mode != HybridMode::Consensus && !is_free(resolved, "mode") {
        // The fields have another meaning in another mode.
        return BTreeMap::new();
    }
    let set = TUNED_FIELDS.iter().filter(|(name, _)| !is_free(resolved, name));
    set.map(|(name, field)| ((*name).to_owned(), *field(&mut config))).collect()
}

/// Writes the chosen settings to the configuration, except for fields that `--set` sets.
fn apply_setting(tuned: &TunedSetting, resolved: &mut Resolved) {
    let mut setting = tuned.setting;
    if is_free(resolved, "mode") {
        resolved.config.retrieval.mode = setting.mode;
    } else if resolved.config.retrieval.mode != setting.mode {
        // The settings have another meaning in another mode.
        return;
    }
    let (scale, fine_scale) = (tuned.consensus_scale, tuned.consensus_fine_scale);
    let mut consensus = Hybrid { scale, fine_scale, ..setting };
    for (name, field) in TUNED_FIELDS {
        let chosen = match name.strip_prefix(OF_CONSENSUS) {
            Some(name) => consensus.field(name),
            None => setting.field(name),
        };
        if is_free(resolved, name) {
            *field(&mut resolved.config.retrieval) = *chosen.expect("the names are those of a setting");
        }
    }
}

/// `eval.after_train`: evaluates a trained run with the data that exists. Without test shards, logs a warning and
/// returns `None`. Without the files that retrieval needs, logs a warning and evaluates LocDiff alone. Without
/// validation shards, evaluates LocDiff-H without tuning it.
pub(in crate::verbs) fn after_training(mut evaluation: Evaluation<'_>) -> anyhow::Result<Option<Value>> {
    let config = &mut evaluation.resolved.config;
    if let Err(missing) = require_shards("shards.test", &config.shards.test) {
        tracing::warn!("the run is not evaluated: {missing}");
        return Ok(None);
    }
    // The galleries of all workers together may take half of the available memory.
    let gallery_bytes_max = memory_available_bytes(Path::new("/")) / 2 / evaluation.world.slots.len().max(1) as u64;
    let mut hybrid = HybridRequest::IfItFits { gallery_bytes_max };
    if let Some(missing) = missing_for_retrieval(&config.retrieval) {
        hybrid = HybridRequest::No;
        tracing::warn!("{missing} does not exist, so retrieval and LocDiff-H are not evaluated");
        if config.eval.anchors == DecodeAnchors::Gallery && !Path::new(&config.retrieval.gallery).exists() {
            tracing::warn!("no gallery file exists, so eval.anchors = \"grid\" and eval.refine = true are used");
            (config.eval.anchors, config.eval.refine) = (DecodeAnchors::Grid, true);
        }
    }
    let can_tune = config.train.method == TrainMethod::Locdiff
        && require_shards("shards.validation", &config.shards.validation).is_ok();
    if hybrid != HybridRequest::No && can_tune {
        match evaluation.tune(hybrid) {
            Err(error) if is_unsuitable(&error) => tracing::warn!("LocDiff-H is not tuned: {error:#}"),
            tuned => drop(tuned?),
        }
    }
    evaluation.evaluate(hybrid, None).map(Some)
}

/// Of the paths that retrieval needs, the first that does not exist. `None` if all of them exist.
fn missing_for_retrieval(config: &RetrievalConfig) -> Option<&str> {
    // The head `knn` uses the training photos instead of GeoCLIP. They exist, because training has just read them.
    let geoclip = config.may_need_geoclip().then_some(config.geoclip.as_str());
    let wanted = [geoclip, Some(config.gallery.as_str()).filter(|gallery| !gallery.is_empty())];
    wanted.into_iter().flatten().find(|path| !Path::new(path).exists())
}

/// Whether tuning failed because of the configuration or the data, for example because the retrieval head cannot be
/// used with the validation photos. After such a failure, an evaluation without tuning is still possible.
fn is_unsuitable(error: &anyhow::Error) -> bool {
    matches!(exit_code_of(error), ExitCode::Config | ExitCode::BadData)
}
