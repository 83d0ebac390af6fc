//! `predict`: locates photos from their embeddings, with or without known coordinates, and writes the answers.
//!
//! - `input`: the embeddings. CSV, `.npy`, safetensors and lines from stdin are first copied to a Parquet file.
//! - `pieces`: the rows are predicted in pieces. Each complete piece is kept in the folder `OUT.partial`, so that a
//!   command that was interrupted can be repeated and goes on with the pieces that are missing.

mod input;
mod pieces;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use locdiff_core::answers::{AnswerFormat, AnswerWriter, EXTENSIONS, WrittenRow};
use locdiff_core::cells::CellWriter;
use locdiff_core::config::{ShardsConfig, ValueOrigin};
use locdiff_core::files::{Files, parent};
use locdiff_core::protocol::{EvalSummary, EvalTask, HybridRequest, PredictedRow, Prediction};
use serde_json::{Value, json};

use super::eval::radii::{self, SavedCalibration};
use super::eval::{self, Evaluation};
use super::paths::{existing, require_new};
use crate::cli::{Global, PredictRequest};
use crate::error::{LaunchError, refuse};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::supervisor::{GangResult, Supervisor, hold_signals};
use crate::terminal::{wait_for_stdout, width, wrapped, write_stdout};
use input::Input;
use pieces::{Pieces, PiecesFolder};

/// How often a command that waits for the reader of its stdout looks for a signal.
const POLL: Duration = Duration::from_millis(100);

/// Runs `predict`.
pub(super) fn run(request: &PredictRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    // Without --out, stdout is for the answers.
    let output = if request.out.is_none() { Output { json: true } } else { output };
    let target = Destination::new(request)?;
    // `_use` keeps a launcher that trains the same run from removing the checkpoint meanwhile.
    let (run, checkpoint, _use, mut resolved) = eval::find(global, request.hybrid, output)?;
    let skips_bad_rows = !matches!(resolved.origin("shards.on_bad_rows"), ValueOrigin::Set);
    // The true places are not known, so no gallery point can be left out for being near one.
    resolved.config.eval.exclude_km = 0.0;
    let calibration = radii::load(&run, &resolved.config, checkpoint.manifest.step, request.hybrid, output)?;
    let cells_temperature = target.temperature(calibration.as_ref(), &run)?;
    let folder = PiecesFolder::open(&target.partial, request.overwrite)?;
    // Until now, Ctrl-C ends the process at once, also while it reads stdin or a long file.
    let input = Input::open(&request.input, folder.path())?;
    hold_signals()?;
    if input.is_copy {
        // The copy has the default names of columns.
        let names = ShardsConfig::default();
        let shards = &mut resolved.config.shards;
        (shards.id_column, shards.embedding_column) = (names.id_column, names.embedding_column);
    }
    let done = folder.claim(&json!({
        "input": input.identity, "checkpoint": checkpoint.path, "step": checkpoint.manifest.step,
        "hybrid": request.hybrid, "samples": request.samples, "shards": resolved.config.shards,
        "temperature": cells_temperature,
        "skips_bad_rows": skips_bad_rows, "device": resolved.config.parallel.device,
        "settings": radii::settings(&resolved.config, checkpoint.manifest.step), "build": locdiff_core::REVISION,
    }))?;
    if !done.is_empty() {
        output.print(&format!("resuming: complete pieces in {}: {}", target.partial.display(), done.len()));
    }
    let world = NodeWorkers::plan(&resolved.config, &gpus::inventory())?.with_all_cores();
    let mut supervisor = Supervisor::new()?;
    let summary = {
        let is_held = false;
        let (supervisor, run, checkpoint) = (&mut supervisor, run.as_path(), &checkpoint);
        let mut evaluation = Evaluation { supervisor, resolved, world, run, checkpoint, is_held, output };
        let hybrid = if request.hybrid { HybridRequest::Wanted } else { HybridRequest::No };
        let (with_truth, with_samples, truth_temperatures) = (false, request.samples, Vec::new());
        let wanted =
            Prediction { with_truth, with_samples, truth_temperatures, cells_temperature, skips_bad_rows, done };
        predict(&mut evaluation, &input.location, hybrid, wanted, &folder)?
    };
    let mut writers = (target.writer(request.samples)?, target.cell_writer()?);
    let pieces = folder.files(summary.rows)?;
    for piece in &pieces {
        supervisor.check_interrupted()?;
        write_piece(piece, calibration.as_ref(), &mut writers)?;
        target.wait_for_reader(&mut supervisor)?;
    }
    let rows = writers.0.finish()?;
    writers.1.map_or(Ok(()), CellWriter::finish)?;
    target.wait_for_reader(&mut supervisor)?;
    target.commit()?;
    folder.remove()?;
    let bad_rows = summary.skipped_rows + input.bad_rows;
    let left_out = if bad_rows > 0 { format!(", {bad_rows} bad rows left out") } else { String::new() };
    let what = if rows == 1 { "prediction" } else { "predictions" };
    let shown = request.out.as_ref().map_or_else(String::new, |out| format!(" in {}", out.display()));
    output.print(&wrapped(&format!("{rows} {what}{shown}{left_out}"), 2, width()));
    Ok(json!({
        "ok": true, "run": run, "checkpoint": checkpoint.path, "out": request.out, "rows": rows, "bad_rows": bad_rows,
        "density": request.density, "calibrated": calibration.is_some(), "data": summary,
    }))
}

/// Lets the workers predict the pieces that are not done, and keeps them in the folder.
fn predict(
    evaluation: &mut Evaluation<'_>,
    location: &str,
    hybrid: HybridRequest,
    wanted: Prediction,
    folder: &PiecesFolder,
) -> anyhow::Result<EvalSummary> {
    let before = wanted.done.len() as u64;
    let task = EvalTask::Predict(wanted);
    let finish = |pieces: &mut Pieces<'_>, found: anyhow::Result<GangResult<EvalSummary>>| {
        pieces.finish()?;
        found?.first()
    };
    evaluation.run(location, hybrid, &task, || Pieces::new(folder, before), finish).map(|(_, summary)| summary)
}

fn write_piece(
    path: &Path,
    saved: Option<&SavedCalibration>,
    (answers, densities): &mut (AnswerWriter, Option<CellWriter>),
) -> anyhow::Result<()> {
    let file = BufReader::new(File::open(path).map_err(LaunchError::at(path))?);
    for line in file.lines() {
        let line = line.map_err(LaunchError::at(path))?;
        let row: PredictedRow = serde_json::from_str(&line).with_context(|| path.display().to_string())?;
        if let Some(densities) = densities {
            densities.write(&row.id, &row.density.cells)?;
        }
        let radii_km = saved.map(|saved| saved.calibration.radii_km(row.spread_km));
        answers.write(WrittenRow { row, radii_km })?;
    }
    Ok(())
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
        require_new("--out", out, request.overwrite)?;
        if let Some(density) = &request.density {
            check_density(density, out, request.overwrite)?;
        }
        let mut partial = out.clone().into_os_string();
        partial.push(".partial");
        let (out, density) = (Some((out.clone(), format)), request.density.clone());
        Ok(Self { out, density, partial: partial.into(), _temporary: None })
    }

    /// The temperature of the densities; `None` if they are not wanted. Fails if the run has none.
    fn temperature(&self, saved: Option<&SavedCalibration>, run: &Path) -> Result<Option<f64>, LaunchError> {
        let fitted = saved.and_then(|saved| saved.density.as_ref());
        if self.density.is_some() && fitted.is_none() {
            refuse!(
                NoData,
                "--density: run {} has no temperature for these settings; measure it with `eval --calibrate`",
                run.display()
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

    /// Gives the files their final names.
    fn commit(&self) -> Result<(), LaunchError> {
        let density = self.density.iter().map(|density| (self.unfinished_density(), density));
        let out = self.out.iter().map(|(out, _)| (self.unfinished(), out));
        let files = Files::real();
        density.chain(out).try_for_each(|(from, to)| {
            File::open(&from).and_then(|file| file.sync_all()).map_err(LaunchError::at(&from))?;
            files.rename(&from, to)?;
            Ok(files.sync_folder(parent(to))?)
        })
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
fn check_density(density: &Path, out: &Path, overwrite: bool) -> Result<(), LaunchError> {
    if AnswerFormat::of(density) != Some(AnswerFormat::Parquet) {
        refuse!(Usage, "--density {}: wanted a name that ends in .parquet", density.display());
    }
    let [one, other] = [density, out].map(|path| std::path::absolute(path).ok());
    if one == other {
        refuse!(Usage, "--density and --out name the same file, {}", out.display());
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
