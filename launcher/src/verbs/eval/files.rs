//! The folder `RUN/eval/` of a run, with the results of the last evaluation. Each file is written atomically. A new
//! evaluation replaces all results, and a new tuning replaces the settings that were tuned with the same prior.
//!
//! ```text
//! truth.csv                 id,lat,lon of every evaluated row, in the order of the data
//! predictions-METHOD.csv    id,lat,lon of the answers of a method, in the order of the data
//! samples.csv               id,lat,lon of the first sample of each row, for density and coverage
//! images.json               single photos with samples, alternatives and densities, for the report
//! accuracy-by-distance.svg  accuracies over the distance to the nearest training photo
//! calibration.svg           how often the radii of a calibrated run hold the true place
//! calibration.json          radii and temperature measured by `eval --calibrate` (`radii`)
//! calibration-hybrid.json   the same for LocDiff-H
//! table.json                the JSON result, as `--json` prints it
//! report.txt                the table and the configuration
//! report.html               the report as a page, from all files of this folder (`verbs::report`)
//! report.md, report.json    the same as Markdown and as JSON
//! lock                      locked by the evaluation that writes to this folder
//! tuned.toml                settings of LocDiff-H chosen by `eval --tune` and used by `eval --hybrid`
//! tuned-even.toml           the same, for `eval.prior = "even"`
//! ```

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use locdiff_core::answers::quoted;
use locdiff_core::config::{Prior, RetrievalHead, RunConfig};
use locdiff_core::files::Files;
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::protocol::{LocatedRow, Method};
use locdiff_core::tuning::Hybrid;
use serde::Serialize;
use serde_json::Value;

use super::gather::Gather;
use super::score::Answers;
use crate::error::{LaunchError, reported};
use crate::run_folder::{CONFIG, RunLock};
use crate::verbs::report::{PHOTOS_FILE, PhotosFile};

/// Name of the plot of accuracies over the distance to the nearest training photo.
pub(super) const DISTANCE_PLOT: &str = "accuracy-by-distance.svg";
/// Name of the plot of the calibration.
pub(super) const CALIBRATION_PLOT: &str = "calibration.svg";

/// Prefix of the names of files with answers.
const PREDICTIONS: &str = "predictions-";

/// Tuned settings of LocDiff-H, as a file holds them.
#[derive(Debug, Serialize)]
pub(super) struct TunedSetting {
    /// The head that the settings were tuned for.
    pub(super) head: RetrievalHead,
    /// With a trained head, the run that trained it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) run: String,
    /// Factors that multiply the similarities in the two rounds of retrieval with consensus.
    pub(super) consensus_scale: f64,
    pub(super) consensus_fine_scale: f64,
    #[serde(flatten)]
    pub(super) setting: Hybrid,
}

/// Name of the file with the settings of LocDiff-H that were tuned with `prior`.
pub(super) fn tuned_name(prior: Prior) -> &'static str {
    match prior {
        Prior::Training => "tuned.toml",
        Prior::Even => "tuned-even.toml",
    }
}

/// Name of the file with the calibration of LocDiff, or of LocDiff-H.
pub(super) fn calibration_name(is_hybrid: bool) -> &'static str {
    if is_hybrid { "calibration-hybrid.json" } else { "calibration.json" }
}

/// The folder `RUN/eval/`, locked by this process.
pub(super) struct EvalFolder {
    path: PathBuf,
    files: Files,
    _lock: RunLock,
}

impl EvalFolder {
    /// Creates the folder if it is missing, and locks it. Fails if another evaluation holds the lock, or if the run was
    /// removed.
    pub(super) fn create(run: &Path) -> Result<Self, LaunchError> {
        let (path, files) = (run.join("eval"), Files::real());
        let configuration = run.join(CONFIG);
        std::fs::metadata(&configuration).map_err(LaunchError::at(configuration))?;
        files.create_folders(&path)?;
        Ok(Self { _lock: RunLock::take(&path)?, path, files })
    }

    /// Removes the answers of an earlier evaluation, and writes the truth, the samples and the answers of the gathered
    /// rows, and the photos for the report. Returns the truth and the answers of each method, rounded as in the files.
    pub(super) fn write_answers(&self, gather: &Gather) -> Result<(Vec<UnitVector>, Vec<Answers>), LaunchError> {
        for entry in self.files.entries(&self.path)? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(PREDICTIONS) && name.ends_with(".csv") {
                self.files.remove_file(&entry)?;
            }
        }
        // True coordinates are written with all their digits. Answers and samples are rounded to about a millimetre.
        let truth = self.write_csv("truth.csv", gather, |row| row.truth.map(|degrees| degrees.to_string()))?;
        let rounded = |degrees: f64| format!("{degrees:.8}");
        let samples = self.write_csv("samples.csv", gather, |row| row.sample.map(rounded))?;
        let methods: Vec<Method> =
            gather.rows().next().map(|row| row.answers.iter().map(|(method, _)| *method).collect()).unwrap_or_default();
        let mut answers = Vec::new();
        for (place, method) in methods.into_iter().enumerate() {
            let places = self.write_csv(&answers_name(method), gather, |row| row.answers[place].1.map(rounded))?;
            let samples = (method == Method::Locdiff).then(|| samples.clone());
            answers.push(Answers { method, places, samples });
        }
        let photos = (gather.photos().len() > 0).then(|| gather.photos().collect::<PhotosFile>());
        let photos = photos.map(|photos| serde_json::to_string(&photos).expect("the photos can be written as JSON"));
        self.write_or_remove(PHOTOS_FILE, photos.as_deref())?;
        Ok((truth, answers))
    }

    /// Writes a file with one place per row. Returns the places, rounded as in the file.
    fn write_csv(
        &self,
        name: &str,
        gather: &Gather,
        place: impl Fn(&LocatedRow) -> [String; 2],
    ) -> Result<Vec<UnitVector>, LaunchError> {
        let (mut text, mut places) = (String::from("id,lat,lon\n"), Vec::new());
        for row in gather.rows() {
            let [latitude, longitude] = place(row);
            let degrees = [&latitude, &longitude].map(|text| Degrees(text.parse().unwrap_or(f64::NAN)));
            let place = Place::new(degrees[0], degrees[1])
                .map_err(|error| reported!(BadData, "{}: {}: {error}", self.path.join(name).display(), row.id))?;
            places.push(place.into());
            let _ = writeln!(text, "{},{latitude},{longitude}", quoted(&row.id));
        }
        self.write(name, text.as_bytes())?;
        Ok(places)
    }

    /// The file with the answers of a method.
    pub(super) fn answers_path(&self, method: Method) -> PathBuf {
        self.path.join(answers_name(method))
    }

    /// Writes the file `name`, and returns its path. Without text, removes the file of an earlier evaluation.
    pub(super) fn write_or_remove(&self, name: &str, text: Option<&str>) -> Result<Option<PathBuf>, LaunchError> {
        let path = self.path.join(name);
        match text {
            Some(text) => self.write(name, text.as_bytes()).map(Some),
            None if path.exists() => Ok(self.files.remove_file(&path).map(|()| None)?),
            None => Ok(None),
        }
    }

    /// Writes `table.json` and `report.txt`. Returns the path of `report.txt`.
    pub(super) fn write_report(&self, result: &Value, table: &str, config: &RunConfig) -> Result<PathBuf, LaunchError> {
        let json = serde_json::to_string_pretty(result).expect("a JSON value can be written as text");
        let settings = toml::to_string(config).expect("a checked configuration can be written as TOML");
        let version = format!("locdiff-launch {} ({})", locdiff_core::VERSION, locdiff_core::REVISION);
        let report = format!("{table}\n{version}\n\n{settings}");
        self.write("table.json", json.as_bytes())?;
        self.write("report.txt", report.as_bytes())
    }

    /// Writes settings of LocDiff-H that were tuned with `prior`, and the head that they were tuned for. The file begins
    /// with the lines of `comment`: the first describes the origin of the settings, and the second describes the
    /// settings.
    pub(super) fn write_tuned(
        &self,
        prior: Prior,
        comment: &str,
        tuned: &TunedSetting,
    ) -> Result<PathBuf, LaunchError> {
        let comment: String = comment.lines().map(|line| format!("# {line}\n")).collect();
        let values = toml::to_string(tuned).expect("the settings can be written as TOML");
        self.write(tuned_name(prior), format!("{comment}\n[retrieval]\n{values}").as_bytes())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, LaunchError> {
        let path = self.path.join(name);
        self.files.write_atomically(&path, bytes)?;
        Ok(path)
    }
}

/// Name of the file with the answers of a method.
fn answers_name(method: Method) -> String {
    format!("{PREDICTIONS}{}.csv", method.name())
}
