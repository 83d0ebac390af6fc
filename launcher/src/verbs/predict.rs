//! `predict`: locates photos from their embeddings, with or without known coordinates, and writes the answers.
//!
//! - `input`: the embeddings. CSV, `.npy`, safetensors and lines from stdin are first copied to a Parquet file.
//! - `pieces`: the rows are predicted in pieces. Each complete piece is kept in the folder `OUT.partial`, so that a
//!   command that was interrupted can be repeated and goes on with the pieces that are missing.

mod input;
mod pieces;

use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use locdiff_core::answers::{AnswerFormat, AnswerWriter, EXTENSIONS, PreparedRow, WrittenRow};
use locdiff_core::cells::CellWriter;
use locdiff_core::config::{Aggregator, EvalConfig, RunConfig, ValueOrigin};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::files::{Files, parent};
use locdiff_core::parallel::in_parallel;
use locdiff_core::prior_file::{PriorError, PriorFile};
use locdiff_core::protocol::{EvalSummary, EvalTask, HybridRequest, PredictedRow, Prediction};
use serde_json::{Value, json};

use super::eval::radii::{self, SavedCalibration};
use super::eval::{ChosenModel, LocatingGang, ModelSource, find_model};
use super::paths::{existing, require_file, require_new};
use crate::cli::{Global, PredictRequest};
use crate::error::{LaunchError, exit_code_of, refuse, reported};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::supervisor::{Supervisor, hold_signals};
use crate::terminal::{wait_for_stdout, width, wrapped, write_stdout};
use input::Input;
use pieces::{Pieces, PiecesFolder};

/// How often a command that waits for the reader of its stdout looks for a signal.
const POLL: Duration = Duration::from_millis(100);
/// Size of the rows that are in memory at once when a piece is written, bytes.
const BYTES_AT_ONCE: usize = 16 << 20;

/// Runs `predict`.
pub(super) fn run(request: &PredictRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    // Without --out, stdout is for the answers.
    let output = if request.out.is_none() { Output { json: true } } else { output };
    let target = Destination::new(request)?;
    let mut model = find_model(request.model.as_deref(), global, request.hybrid, output)?;
    let resolved = &mut model.resolved;
    let skips_bad_rows = !matches!(resolved.origin("shards.on_bad_rows"), ValueOrigin::Set);
    // The true places are not known, so no gallery point can be left out for being near one.
    resolved.config.eval.exclude_km = 0.0;
    let prior = request.prior.as_ref().map(|path| read_prior(path, &resolved.config.eval)).transpose()?;
    let mut calibration = radii::load(&model.source, &resolved.config, &model.file, request.hybrid, output)?;
    let cells_temperature = target.temperature(calibration.as_ref(), &model.source)?;
    if prior.is_some() && calibration.take().is_some() {
        let line = "the answers have no radii, because radii are measured without a prior and would be wrong with one";
        output.print(&wrapped(line, 2, width()));
    }
    let folder = PiecesFolder::open(&target.partial)?;
    // Until now, Ctrl-C ends the process at once, also while it reads stdin or a long file.
    let input = Input::open(&request.input, folder.path(), model.file.width)?;
    hold_signals()?;
    input.name_columns(&mut resolved.config.shards);
    let world = super::workers(global, resolved)?.with_all_cores();
    let job = json!({
        "input": input.identity, "checkpoint": model.file.xxh3, "hybrid": request.hybrid,
        "samples": request.samples, "shards": resolved.config.shards,
        "temperature": cells_temperature, "prior": prior.as_ref().map(PriorFile::xxh3),
        "skips_bad_rows": skips_bad_rows, "on_gpu": world.slots.iter().any(|slot| slot.gpu.is_some()),
        "training_photos": request.hybrid.then(|| radii::contents(&training_manifest(&resolved.config))),
        "settings": radii::settings(&resolved.config, &model.file), "build": locdiff_core::REVISION,
    });
    let done = folder.claim(&job, request.overwrite)?;
    if input.is_copy {
        folder.forget_data_version()?;
    }
    let prior = prior.map(|prior| folder.keep_prior(&prior)).transpose()?;
    if !done.is_empty() {
        output.print(&format!("resuming: complete pieces in {}: {}", target.partial.display(), done.len()));
    }
    let mut supervisor = Supervisor::new()?;
    let summary = {
        let hybrid = if request.hybrid { HybridRequest::Wanted } else { HybridRequest::No };
        let (with_truth, with_samples, truth_temperatures) = (false, request.samples, Vec::new());
        let wanted =
            Prediction { with_truth, with_samples, truth_temperatures, cells_temperature, prior, skips_bad_rows };
        let wanted = (hybrid, wanted);
        let mut attempt = || predict(&mut supervisor, (&model, &world), &input.location, &wanted, &folder);
        match attempt() {
            Err(error) if request.overwrite && exit_code_of(&error) == ExitCode::DataChanged => {
                tracing::warn!("{error:#}");
                folder.remove_pieces()?;
                folder.claim(&job, true)?;
                attempt()?
            }
            found => found?,
        }
    };
    let mut writers = (target.writer(request.samples)?, target.cell_writer()?);
    let pieces = folder.files(summary.rows)?;
    for (piece, rows) in pieces {
        supervisor.check_interrupted()?;
        write_piece(&piece, rows, calibration.as_ref(), &mut writers).inspect_err(|error| {
            if exit_code_of(error) == ExitCode::Corrupt {
                // Ignore an error: the command has failed already.
                let _ = std::fs::remove_file(&piece);
            }
        })?;
        target.wait_for_reader(&mut supervisor)?;
    }
    let rows = writers.0.finish()?;
    writers.1.map_or(Ok(()), CellWriter::finish)?;
    target.wait_for_reader(&mut supervisor)?;
    folder.place(&target.outputs())?;
    folder.remove()?;
    let bad_rows = summary.skipped_rows + input.bad_rows;
    let left_out = if bad_rows > 0 { format!(", {bad_rows} bad rows left out") } else { String::new() };
    let what = if rows == 1 { "prediction" } else { "predictions" };
    let shown = request.out.as_ref().map_or_else(String::new, |out| format!(" in {}", out.display()));
    output.print(&wrapped(&format!("{rows} {what}{shown}{left_out}"), 2, width()));
    Ok(json!({
        "ok": true, "run": model.source.run(), "checkpoint": model.file.path, "out": request.out, "rows": rows,
        "bad_rows": bad_rows, "prior": request.prior, "density": request.density,
        "calibrated": calibration.is_some(), "data": summary,
    }))
}

/// Reads and checks the file of a prior. Fails if a setting cannot be combined with one.
fn read_prior(path: &Path, config: &EvalConfig) -> Result<PriorFile, LaunchError> {
    let about = |error: PriorError| LaunchError::reported(error).about("--prior");
    if config.neighbourhood_km > 0.0 {
        refuse!(Config, "--prior needs eval.neighbourhood_km = 0, got {}", config.neighbourhood_km);
    }
    if !matches!(config.aggregator, Aggregator::PosteriorMedoid | Aggregator::KernelMedoid) {
        let reason = "others may answer with a place outside the prior";
        refuse!(Config, "--prior needs eval.aggregator = \"posterior-medoid\" or \"kernel-medoid\"; {reason}");
    }
    // Only a failure looks at the path again: opening a pipe twice could lose its contents.
    let file = PriorFile::read(path).map_err(|error| require_file("--prior", path).err().unwrap_or(about(error)))?;
    file.prior().map_err(about)?;
    Ok(file)
}

/// The manifest of the training shards. LocDiff-H depends on their places.
fn training_manifest(config: &RunConfig) -> PathBuf {
    Path::new(&config.shards.train).join("manifest.json")
}

/// Lets the workers predict the pieces that are not done, and keeps them in the folder.
fn predict(
    supervisor: &mut Supervisor,
    (model, world): (&ChosenModel, &NodeWorkers),
    location: &str,
    (hybrid, wanted): &(HybridRequest, Prediction),
    folder: &PiecesFolder,
) -> anyhow::Result<EvalSummary> {
    let config = &model.resolved.config;
    let task = EvalTask::Predict(wanted.clone());
    let mut gang = LocatingGang { supervisor, config, world, model: &model.file };
    gang.run(location, *hybrid, task, &mut Pieces::new(folder)?)
}

/// Writes the rows of a piece, whose indices are `rows`. Most of the time goes into parsing and formatting them, which
/// all cores share.
fn write_piece(
    path: &Path,
    mut rows: Range<u64>,
    saved: Option<&SavedCalibration>,
    (answers, densities): &mut (AnswerWriter, Option<CellWriter>),
) -> anyhow::Result<()> {
    let (style, threads) = (answers.style(), available_parallelism().map_or(1, usize::from));
    let prepare = |line: &String| -> serde_json::Result<PreparedAnswer> {
        let mut row: PredictedRow = serde_json::from_str(line)?;
        let (index, id, cells) = (row.index, row.id.clone(), std::mem::take(&mut row.density.cells));
        let radii_km = saved.map(|saved| saved.calibration.radii_km(row.spread_km));
        Ok(PreparedAnswer { index, id, cells, row: style.prepare(WrittenRow { row, radii_km }) })
    };
    let damaged = |reason: &dyn Display| {
        let advice = "the piece was removed; repeat the command";
        reported!(Corrupt, "{} is damaged: {reason}; {advice}", path.display())
    };
    let mut lines = BufReader::new(File::open(path).map_err(LaunchError::at(path))?).lines();
    loop {
        let (mut some, mut bytes) = (Vec::new(), 0);
        while bytes < BYTES_AT_ONCE
            && let Some(line) = lines.next()
        {
            let line = line.map_err(LaunchError::at(path))?;
            bytes += line.len();
            some.push(line);
        }
        if some.is_empty() {
            let rest = rows.count();
            return if rest == 0 { Ok(()) } else { Err(damaged(&format!("{rest} rows are missing")).into()) };
        }
        for prepared in in_parallel(threads, &some, prepare) {
            let PreparedAnswer { index, id, cells, row } = prepared.map_err(|error| damaged(&error))?;
            if rows.next() != Some(index) {
                return Err(damaged(&format!("row {index} is not the next one")).into());
            }
            if let Some(densities) = densities {
                densities.write(&id, &cells)?;
            }
            answers.write(row)?;
        }
    }
}

/// A row that is ready to be written, with the cells of its density.
struct PreparedAnswer {
    index: u64,
    id: String,
    cells: Vec<(u64, f32)>,
    row: PreparedRow,
}

/// Where the answers go.
struct Destination {
    out: Option<(PathBuf, AnswerFormat)>,
    /// The file of the densities.
    density: Option<PathBuf>,
    /// The folder of complete pieces.
    partial: PathBuf,
    /// Keeps a folder for a command that writes to stdout.
    _temporary: Option<tempfile::TempDir>,
}

impl Destination {
    fn new(request: &PredictRequest) -> Result<Self, LaunchError> {
        let Some(out) = &request.out else {
            let folder = tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?;
            let partial = folder.path().join("partial");
            return Ok(Self { out: None, density: None, partial, _temporary: Some(folder) });
        };
        let Some(format) = AnswerFormat::of(out) else {
            refuse!(Usage, "--out {}: the name decides the format, wanted {EXTENSIONS}", out.display());
        };
        if out.is_dir() {
            refuse!(Exists, "--out: {} is a folder, wanted the name of a file", out.display());
        }
        let mut partial = out.clone().into_os_string();
        partial.push(".partial");
        let placed = pieces::placed(Path::new(&partial));
        let may_replace =
            |path: &Path| request.overwrite || std::path::absolute(path).is_ok_and(|path| placed.contains(&path));
        require_new("--out", out, may_replace(out))?;
        if let Some(density) = &request.density {
            check_density(density, (out, Path::new(&partial)), may_replace(density))?;
        }
        let (out, density) = (Some((out.clone(), format)), request.density.clone());
        Ok(Self { out, density, partial: partial.into(), _temporary: None })
    }

    /// The temperature of the densities; `None` if they are not wanted. Fails if the model has none.
    fn temperature(&self, saved: Option<&SavedCalibration>, source: &ModelSource) -> Result<Option<f64>, LaunchError> {
        let fitted = saved.and_then(|saved| saved.density.as_ref());
        if self.density.is_some() && fitted.is_none() {
            refuse!(
                NoData,
                "--density: {} has no temperature for these settings, which is measured with the radii; {}",
                source.described(),
                source.how_to_calibrate(false)
            );
        }
        Ok(self.density.as_ref().and(fitted).map(|fitted| fitted.temperature))
    }

    /// The file that becomes OUT.
    fn unfinished(&self) -> PathBuf {
        self.partial.join("out")
    }

    /// The file that becomes the file of the densities.
    fn unfinished_density(&self) -> PathBuf {
        self.partial.join("density")
    }

    fn cell_writer(&self) -> Result<Option<CellWriter>, LaunchError> {
        let Some(density) = &self.density else { return Ok(None) };
        Files::real().create_folders(parent(density))?;
        Ok(Some(CellWriter::create(&self.unfinished_density())?))
    }

    fn writer(&self, with_samples: bool) -> Result<AnswerWriter, LaunchError> {
        match &self.out {
            Some((_, format)) => Ok(AnswerWriter::create(&self.unfinished(), *format, with_samples)?),
            None => Ok(AnswerWriter::lines(Box::new(Lines), with_samples)),
        }
    }

    /// The unfinished files and their final names.
    fn outputs(&self) -> Vec<(PathBuf, &Path)> {
        let density = self.density.iter().map(|density| (self.unfinished_density(), density.as_path()));
        density.chain(self.out.iter().map(|(out, _)| (self.unfinished(), out.as_path()))).collect()
    }

    /// If the answers go to stdout, waits until its reader has taken them.
    fn wait_for_reader(&self, supervisor: &mut Supervisor) -> anyhow::Result<()> {
        while self.out.is_none() && !wait_for_stdout(POLL).map_err(LaunchError::at("stdout"))? {
            supervisor.check_interrupted()?;
        }
        Ok(())
    }
}

/// Checks the name of the file of the densities.
fn check_density(density: &Path, (out, partial): (&Path, &Path), overwrite: bool) -> Result<(), LaunchError> {
    if AnswerFormat::of(density) != Some(AnswerFormat::Parquet) {
        refuse!(Usage, "--density {}: wanted a name that ends in .parquet", density.display());
    }
    let [one, other] = [density, out].map(|path| std::path::absolute(path).ok());
    if one == other {
        refuse!(Usage, "--density and --out name the same file, {}", out.display());
    }
    let is_within = |folder: &Path| {
        std::path::absolute(folder).is_ok_and(|folder| one.iter().any(|path| path.starts_with(&folder)))
    };
    if is_within(out) || is_within(partial) {
        refuse!(
            Usage,
            "--density: {} is in the folder of --out or of its pieces; choose another folder",
            density.display()
        );
    }
    if density.is_dir() {
        refuse!(Exists, "--density: {} is a folder, wanted the name of a file", density.display());
    }
    require_new("--density", density, overwrite)?;
    let device = |path: &Path| {
        let folder = existing(parent(path));
        std::fs::metadata(&folder).map(|found| found.dev()).map_err(LaunchError::at(folder))
    };
    if device(density)? != device(out)? {
        // Files are written to OUT.partial and renamed at the end, which works on one file system only.
        refuse!(Usage, "--density and --out are on different file systems; choose the same for both");
    }
    Ok(())
}

/// Writes to this process's stdout.
struct Lines;

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        write_stdout(String::from_utf8_lossy(bytes).into_owned());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
