//! `bench shards`: measures how fast one core reads embeddings, compared with pyarrow on the same files.
//!
//! Our reader runs the same code as training. It reads windows of row groups, copies rows in random order into
//! contiguous batches, and verifies every checksum. pyarrow reads in file order. Both read from the page cache with one
//! thread, and they take turns, so that other load on the machine affects both.
//!
//! Each speed is computed from the median time of several runs, once with wall-clock time and once with CPU time. CPU
//! time is more reliable on a busy machine.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::Context;
use half::f16;
use locdiff_core::config::ShardsConfig;
use locdiff_core::protocol::{ReadingSpeed, ShardsBenched};
use serde::Deserialize;

use super::error::JobError;
use crate::shards::{
    DataLayout, Dataset, ELEMENT_BYTES, ImageHead, InlineBatches, Mask, Plan, PlanOptions, ShardWriter, ShardsError,
    Share, WriterOptions, WriterRows,
};

const WIDTH: usize = 768;
const ROWS: usize = 196_608;
const FOREIGN_ROWS: usize = 65_536;
const RUNS: usize = 9;
const WINDOW_BLOCKS: u32 = 16;
/// Rows per batch. The number of rows of every case is a multiple of this number, so that an epoch contains every row.
const BATCH_ROWS: usize = 4096;

const SCRIPT: &str = include_str!("bench_shards.py");

/// A temporary folder that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("locdiff-bench-shards-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Measures the reading speed for each kind of file.
pub(super) fn run(python: Option<&Path>) -> anyhow::Result<ShardsBenched> {
    let scratch = Scratch::new()?;
    let peer = Peer::find(python, &scratch.0)?;
    let own = scratch.0.join("own");
    write_own(&own, ROWS)?;
    let own_case = "ours, float16, shuffled";
    let mut rows = vec![measure(own_case, &own, &own.join("part-00000.parquet"), ELEMENT_BYTES, peer.as_ref())?];
    let foreign = scratch.0.join("foreign.parquet");
    match &peer {
        Some(peer) => peer.write(&foreign)?,
        None => foreign::write(&foreign, FOREIGN_ROWS, WIDTH)?,
    }
    rows.push(measure("list<float32>, plain, shuffled", &foreign, &foreign, 4, peer.as_ref())?);
    if peer.is_some() {
        let foreign = scratch.0.join("foreign.parquet.default");
        let case = "list<float32>, pyarrow's defaults, shuffled";
        rows.push(measure(case, &foreign, &foreign, 4, peer.as_ref())?);
    }
    Ok(ShardsBenched { peer: peer.map(|peer| peer.version), rows })
}

fn measure(case: &str, ours: &Path, file: &Path, bytes: usize, peer: Option<&Peer>) -> anyhow::Result<ReadingSpeed> {
    let (dataset, plan) = open(ours)?;
    let mut batches = InlineBatches::new(&dataset, plan.clone(), plan.start(), Share::WHOLE).map_err(JobError::from)?;
    let mut reader = peer.map(|peer| peer.reader(file)).transpose()?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..=RUNS {
        ours.push(epoch(&mut batches, plan.steps())?);
        theirs.extend(reader.as_mut().map(PyarrowReader::run).transpose()?);
    }
    // Skip the first round, which warms the page cache and the batch buffers.
    let (ours, theirs) = (&ours[1..], theirs.get(1..).unwrap_or_default());
    let gigabytes = plan.indices() as f64 * (plan.layout().width * bytes) as f64 / 1e9;
    let speed =
        |runs: &[TimedRun], of: fn(&TimedRun) -> f64| median(runs.iter().map(of)).map(|seconds| gigabytes / seconds);
    let gb_per_s = speed(ours, |run| run.seconds).context("no run was timed")?;
    let gb_per_core_s = speed(ours, |run| run.core_seconds).context("no run was timed")?;
    let pyarrow_gb_per_s = speed(theirs, |run| run.seconds);
    let pyarrow_gb_per_core_s = speed(theirs, |run| run.core_seconds);
    let ratio = pyarrow_gb_per_s.map(|theirs| gb_per_s / theirs);
    let case = case.to_owned();
    Ok(ReadingSpeed { case, gb_per_s, pyarrow_gb_per_s, ratio, gb_per_core_s, pyarrow_gb_per_core_s })
}

/// Opens the data with the same plan as training.
fn open(location: &Path) -> Result<(Dataset, Plan), JobError> {
    let config = ShardsConfig { shuffle_row_groups: WINDOW_BLOCKS, ..ShardsConfig::default() };
    let mut dataset = Dataset::open(&location.to_string_lossy(), &config)?;
    if dataset.manifest().is_none() {
        // As in training, every chunk that is read is compared with the checksums of a first scan.
        dataset.expect_contents(Some(dataset.read_contents()?))?;
    }
    let plan = Plan::new(DataLayout::of(&dataset), Mask::none(), PlanOptions::new(&config, 0, BATCH_ROWS as u32))?;
    Ok((dataset, plan))
}

/// Wall-clock and CPU time of one run.
#[derive(Debug, Clone, Copy, Deserialize)]
struct TimedRun {
    seconds: f64,
    core_seconds: f64,
}

/// Reads the batches of one epoch.
fn epoch(batches: &mut InlineBatches<'_>, steps: u64) -> anyhow::Result<TimedRun> {
    let (start, on_core) = (Instant::now(), core_seconds()?);
    for _ in 0..steps {
        std::hint::black_box(batches.next().map_err(JobError::from)?);
    }
    Ok(TimedRun { seconds: start.elapsed().as_secs_f64(), core_seconds: core_seconds()? - on_core })
}

/// CPU time of this thread.
fn core_seconds() -> anyhow::Result<f64> {
    let text =
        std::fs::read_to_string("/proc/thread-self/schedstat").context("cannot read /proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split_whitespace().next().context("/proc/thread-self/schedstat is empty")?.parse()?;
    Ok(nanoseconds / 1e9)
}

fn median(seconds: impl Iterator<Item = f64>) -> Option<f64> {
    let mut seconds: Vec<f64> = seconds.collect();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}

/// Writes rows of pseudo-random numbers to one file in our own format.
fn write_own(out: &Path, rows: usize) -> Result<(), JobError> {
    let mut options = WriterOptions::new(WIDTH as u32, 1, "bench shards", ImageHead::None);
    options.rows_per_file = rows as u64;
    let mut writer = ShardWriter::create(out, options)?;
    let mut state = 7_u64;
    // xorshift: random enough for a benchmark.
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for first in (0..rows).step_by(BATCH_ROWS) {
        let count = BATCH_ROWS.min(rows - first);
        let ids: Vec<String> = (first..first + count).map(|row| row.to_string()).collect();
        let latitudes: Vec<f64> = (0..count).map(|_| (random() % 180) as f64 - 90.0).collect();
        let longitudes: Vec<f64> = (0..count).map(|_| (random() % 360) as f64 - 180.0).collect();
        // The mask clears the highest bit of the exponent, so that every value is finite.
        let values: Vec<f16> = (0..count * WIDTH).map(|_| f16::from_bits(random() as u16 & 0xbbff)).collect();
        writer.push(&WriterRows { ids, latitudes, longitudes, views: vec![values] })?;
    }
    writer.finish()?;
    Ok(())
}

/// A Python interpreter with pyarrow.
struct Peer {
    python: PathBuf,
    script: PathBuf,
    version: String,
}

impl Peer {
    /// Finds a Python interpreter with pyarrow. If the user named an interpreter (`named`), fails if this interpreter
    /// does not have pyarrow. Otherwise tries `python3`, and returns `None` if `python3` does not have pyarrow.
    fn find(named: Option<&Path>, scratch: &Path) -> anyhow::Result<Option<Self>> {
        let python = named.unwrap_or(Path::new("python3")).to_owned();
        let probe = Command::new(&python).args(["-c", "import numpy, pyarrow; print(pyarrow.__version__)"]).output();
        let version = match probe {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            _ if named.is_none() => return Ok(None),
            failed => {
                let reason = match failed {
                    Ok(output) => format!(" has no pyarrow: {}", String::from_utf8_lossy(&output.stderr).trim()),
                    Err(error) => format!(": {error}"),
                };
                let text = format!("{}{reason}", python.display());
                return Err(JobError::from(ShardsError::Argument(text)).into());
            }
        };
        let script = scratch.join("bench_shards.py");
        std::fs::write(&script, SCRIPT)?;
        Ok(Some(Self { python, script, version: format!("pyarrow {version}") }))
    }

    fn command(&self, verb: &str, path: &Path) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(&self.script).arg(verb).arg(path).envs([("OMP_NUM_THREADS", "1"), ("ARROW_IO_THREADS", "1")]);
        command
    }

    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut command = self.command("write", path);
        command.args([FOREIGN_ROWS.to_string(), WIDTH.to_string()]);
        let output = command.output().with_context(|| self.python.display().to_string())?;
        anyhow::ensure!(output.status.success(), "pyarrow failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Starts a pyarrow process that reads the file once per request.
    fn reader(&self, path: &Path) -> anyhow::Result<PyarrowReader> {
        let mut command = self.command("read", path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| self.python.display().to_string())?;
        let (input, output) = (
            child.stdin.take().context("the stdin of pyarrow is not piped")?,
            child.stdout.take().context("the stdout of pyarrow is not piped")?,
        );
        Ok(PyarrowReader { child, input: Some(input), output: BufReader::new(output) })
    }
}

/// A pyarrow process that waits for requests.
struct PyarrowReader {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl PyarrowReader {
    fn run(&mut self) -> anyhow::Result<TimedRun> {
        let mut line = String::new();
        // If the process has ended, the write fails, and the stderr of the process says why.
        let is_requested = self.input.as_mut().is_some_and(|input| input.write_all(b"\n").is_ok());
        if !is_requested || self.output.read_line(&mut line)? == 0 {
            let mut message = String::new();
            if let Some(stderr) = &mut self.child.stderr {
                stderr.read_to_string(&mut message)?;
            }
            anyhow::bail!("pyarrow failed: {}", message.trim());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for PyarrowReader {
    /// Closes the stdin of the process, so that the process ends, and waits for its end.
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Writes a file in a layout that other programs use, with the `parquet` crate. Used only if pyarrow is missing;
/// otherwise pyarrow writes the file.
mod foreign {
    use std::sync::Arc;

    use arrow_array::builder::{Float32Builder, ListBuilder};
    use arrow_array::{ArrayRef, Float64Array, RecordBatch};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    pub(super) fn write(path: &std::path::Path, rows: usize, width: usize) -> anyhow::Result<()> {
        let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
        let mut lists = ListBuilder::new(Float32Builder::new());
        for row in 0..1024 {
            (0..width).for_each(|index| lists.values().append_value((row * index % 97) as f32 / 97.0));
            lists.append(true);
        }
        let zeros = Arc::new(Float64Array::from(vec![0.0; 1024])) as ArrayRef;
        let columns =
            [("lat", Arc::clone(&zeros)), ("lon", zeros), ("embedding", Arc::new(lists.finish()) as ArrayRef)];
        let batch = RecordBatch::try_from_iter(columns)?;
        let mut writer = ArrowWriter::try_new(std::fs::File::create_new(path)?, batch.schema(), Some(properties))?;
        for _ in (0..rows).step_by(1024) {
            writer.write(&batch)?;
            writer.flush()?;
        }
        writer.close()?;
        Ok(())
    }
}
