//! `bench shards`: how fast one core reads embeddings, beside pyarrow on the same files.
//!
//! Ours reads shuffled, as training does: windows of row groups, rows gathered in a random order into contiguous batches, every
//! checksum compared. pyarrow reads in file order. Both read from the page cache, with one thread; medians of several runs, by
//! the clock and, for machines that are busy with other things, by the time on a core.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use half::f16;
use locdiff_launch::config::ShardsConfig;
use serde::{Deserialize, Serialize};

use crate::native::host::HostRows;
use crate::shards::{BlockRows, Blocks, Dataset, ELEMENT_BYTES, ImageHead, ShardWriter, WriterOptions, WriterRows};

const WIDTH: usize = 768;
const ROWS: usize = 196_608;
const FOREIGN_ROWS: usize = 65_536;
const RUNS: usize = 5;
const WINDOW_BLOCKS: usize = 16;
const BATCH_ROWS: usize = 4096;

const SCRIPT: &str = include_str!("bench_shards.py");

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    ok: bool,
    /// pyarrow's version; none where no Python has it.
    peer: Option<String>,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    case: String,
    /// Bytes of embeddings as the file stores them, over the median time.
    gb_per_s: f64,
    pyarrow_gb_per_s: Option<f64>,
    ratio: Option<f64>,
    /// The same bytes over the median time on a core, which other work on the machine stretches less.
    gb_per_core_s: f64,
    pyarrow_gb_per_core_s: Option<f64>,
}

/// A folder that goes away with the benchmark.
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

/// Measures every case.
pub(super) fn run(python: Option<&Path>) -> anyhow::Result<Report> {
    let scratch = Scratch::new()?;
    let peer = Peer::find(python, &scratch.0)?;
    let own = scratch.0.join("own");
    write_own(&own, ROWS)?;
    let own_case = "ours, float16, shuffled";
    let mut rows = vec![measure(own_case, &own, &own.join("part-00000.parquet"), ELEMENT_BYTES, peer.as_ref())?];
    if let Some(peer) = &peer {
        let foreign = scratch.0.join("foreign.parquet");
        peer.write(&foreign)?;
        let case = "list<float32>, plain, shuffled";
        rows.push(measure(case, &foreign, &foreign, 4, Some(peer))?);
        let foreign = scratch.0.join("foreign.parquet.default");
        let case = "list<float32>, pyarrow's defaults, shuffled";
        rows.push(measure(case, &foreign, &foreign, 4, Some(peer))?);
    } else {
        let foreign = scratch.0.join("foreign.parquet");
        foreign::write(&foreign, FOREIGN_ROWS, WIDTH)?;
        rows.push(measure("list<float32>, plain, shuffled", &foreign, &foreign, 4, None)?);
    }
    Ok(Report { ok: true, peer: peer.map(|peer| peer.version), rows })
}

fn measure(case: &str, ours: &Path, file: &Path, bytes: usize, peer: Option<&Peer>) -> anyhow::Result<Row> {
    let dataset = Dataset::open(&ours.to_string_lossy(), &ShardsConfig::default())?;
    let gigabytes = dataset.rows() as f64 * (dataset.width() * bytes) as f64 / 1e9;
    let (mut ours, mut memory) = (Runs::default(), Memory::new(&dataset)?);
    // The first run warms the page cache, and the memory that runs share as the batches of a training do.
    for run in 0..=RUNS {
        let (start, on_core) = (Instant::now(), core_seconds()?);
        stream(&dataset, run as u64, &mut memory)?;
        ours.seconds.push(start.elapsed().as_secs_f64());
        ours.core_seconds.push(core_seconds()? - on_core);
    }
    let gb_per_s = gigabytes / median(&mut ours.seconds[1..]);
    let gb_per_core_s = gigabytes / median(&mut ours.core_seconds[1..]);
    let mut theirs = peer.map(|peer| peer.read(file)).transpose()?;
    let pyarrow_gb_per_s = theirs.as_mut().map(|theirs| gigabytes / median(&mut theirs.seconds));
    let pyarrow_gb_per_core_s = theirs.as_mut().map(|theirs| gigabytes / median(&mut theirs.core_seconds));
    let ratio = pyarrow_gb_per_s.map(|theirs| gb_per_s / theirs);
    let case = case.to_owned();
    Ok(Row { case, gb_per_s, pyarrow_gb_per_s, ratio, gb_per_core_s, pyarrow_gb_per_core_s })
}

/// Time that this thread has been on a core.
fn core_seconds() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").context("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split_whitespace().next().context("an empty schedstat")?.parse()?;
    Ok(nanoseconds / 1e9)
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// What a stream of batches fills again and again.
struct Memory {
    window: Vec<BlockRows>,
    order: Vec<(usize, usize)>,
    batch: HostRows,
    coordinates: Vec<(f64, f64)>,
}

impl Memory {
    fn new(dataset: &Dataset) -> anyhow::Result<Self> {
        let batch = HostRows::new(BATCH_ROWS, dataset.width(), false)?;
        Ok(Self {
            window: vec![BlockRows::default(); WINDOW_BLOCKS],
            order: Vec::new(),
            batch,
            coordinates: Vec::new(),
        })
    }

    /// Hands a full batch over, and takes its memory back as the trainer gives it.
    fn deliver(&mut self, width: usize) -> anyhow::Result<()> {
        let empty = HostRows::new(0, width, false)?;
        let batch = std::mem::replace(&mut self.batch, empty).into_tensor();
        std::hint::black_box((&batch, &self.coordinates));
        self.coordinates.clear();
        self.batch = HostRows::reuse(batch, BATCH_ROWS, width).context("somebody kept the batch")?;
        Ok(())
    }
}

/// One epoch: row groups in a random order, rows in a random order within windows, batches contiguous.
fn stream(dataset: &Dataset, seed: u64, memory: &mut Memory) -> anyhow::Result<()> {
    let row_bytes = dataset.width() * ELEMENT_BYTES;
    let mut random = Random(seed.wrapping_mul(2).wrapping_add(1));
    let mut blocks: Vec<u32> = (0..dataset.block_rows().len() as u32).collect();
    random.shuffle(&mut blocks);
    for part in blocks.chunks(WINDOW_BLOCKS) {
        memory.order.clear();
        for (slot, &block) in part.iter().enumerate() {
            dataset.read(block, 0, &mut memory.window[slot])?;
            memory.order.extend((0..memory.window[slot].latitudes.len()).map(|row| (slot, row)));
        }
        random.shuffle(&mut memory.order);
        for index in 0..memory.order.len() {
            let (slot, row) = memory.order[index];
            let rows = &memory.window[slot];
            memory.batch.push(&rows.embeddings[row * row_bytes..][..row_bytes]);
            memory.coordinates.push((rows.latitudes[row], rows.longitudes[row]));
            if memory.batch.missing() == 0 {
                memory.deliver(dataset.width())?;
            }
        }
    }
    Ok(())
}

/// xorshift: shuffles well enough for a benchmark.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, (self.next() % (index as u64 + 1)) as usize);
        }
    }
}

/// Rows of pseudo-random numbers in our own format, in one file.
fn write_own(out: &Path, rows: usize) -> anyhow::Result<()> {
    let mut options = WriterOptions::new(WIDTH as u32, 1, "bench shards", ImageHead::None);
    options.rows_per_file = rows as u64;
    let mut writer = ShardWriter::create(out, options)?;
    let mut random = Random(7);
    for first in (0..rows).step_by(BATCH_ROWS) {
        let count = BATCH_ROWS.min(rows - first);
        let ids: Vec<String> = (first..first + count).map(|row| row.to_string()).collect();
        let latitudes: Vec<f64> = (0..count).map(|_| (random.next() % 180) as f64 - 90.0).collect();
        let longitudes: Vec<f64> = (0..count).map(|_| (random.next() % 360) as f64 - 180.0).collect();
        // Any exponent but the highest is finite.
        let values: Vec<f16> = (0..count * WIDTH).map(|_| f16::from_bits(random.next() as u16 & 0xbbff)).collect();
        let rows = WriterRows { ids: &ids, latitudes: &latitudes, longitudes: &longitudes, views: &[&values] };
        writer.push(&rows)?;
    }
    writer.finish()?;
    Ok(())
}

/// A Python that has pyarrow.
struct Peer {
    python: PathBuf,
    script: PathBuf,
    version: String,
}

/// Times of every run.
#[derive(Default, Deserialize)]
struct Runs {
    seconds: Vec<f64>,
    core_seconds: Vec<f64>,
}

impl Peer {
    /// The Python that was named must have pyarrow; the one on the PATH may.
    fn find(named: Option<&Path>, scratch: &Path) -> anyhow::Result<Option<Self>> {
        let python = named.unwrap_or(Path::new("python3")).to_owned();
        let asked = Command::new(&python).args(["-c", "import numpy, pyarrow; print(pyarrow.__version__)"]).output();
        let version = match asked {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            _ if named.is_none() => return Ok(None),
            Ok(output) => {
                let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                let text = format!("{} has no pyarrow: {words}", python.display());
                return Err(crate::shards::ShardsError::Argument(text).into());
            }
            Err(error) => {
                let text = format!("{}: {error}", python.display());
                return Err(crate::shards::ShardsError::Argument(text).into());
            }
        };
        let script = scratch.join("bench_shards.py");
        std::fs::write(&script, SCRIPT)?;
        Ok(Some(Self { python, script, version: format!("pyarrow {version}") }))
    }

    fn call(&self, words: &[String]) -> anyhow::Result<Vec<u8>> {
        let output = Command::new(&self.python)
            .arg(&self.script)
            .args(words)
            .envs([("OMP_NUM_THREADS", "1"), ("ARROW_IO_THREADS", "1")])
            .output()
            .with_context(|| self.python.display().to_string())?;
        anyhow::ensure!(output.status.success(), "pyarrow failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(output.stdout)
    }

    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let words = ["write".into(), path.to_string_lossy().into(), FOREIGN_ROWS.to_string(), WIDTH.to_string()];
        self.call(&words).map(|_| ())
    }

    fn read(&self, path: &Path) -> anyhow::Result<Runs> {
        let stdout = self.call(&["read".into(), path.to_string_lossy().into(), RUNS.to_string()])?;
        let runs: Runs = serde_json::from_slice(&stdout)?;
        anyhow::ensure!(
            runs.seconds.len() == RUNS && runs.core_seconds.len() == RUNS,
            "pyarrow made {} runs, expected {RUNS}",
            runs.seconds.len()
        );
        Ok(runs)
    }
}

/// A file such as others write, where no pyarrow is there to write one.
mod foreign {
    use std::sync::Arc;

    use arrow_array::builder::{Float32Builder, ListBuilder};
    use arrow_array::{ArrayRef, Float64Array, RecordBatch};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    pub(super) fn write(path: &std::path::Path, rows: usize, width: usize) -> anyhow::Result<()> {
        let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
        let mut writer: Option<ArrowWriter<std::fs::File>> = None;
        for _ in (0..rows).step_by(1024) {
            let mut lists = ListBuilder::new(Float32Builder::new());
            for row in 0..1024 {
                (0..width).for_each(|index| lists.values().append_value((row * index % 97) as f32 / 97.0));
                lists.append(true);
            }
            let zeros = Arc::new(Float64Array::from(vec![0.0; 1024])) as ArrayRef;
            let columns =
                [("lat", Arc::clone(&zeros)), ("lon", zeros), ("embedding", Arc::new(lists.finish()) as ArrayRef)];
            let batch = RecordBatch::try_from_iter(columns)?;
            if writer.is_none() {
                let file = std::fs::File::create_new(path)?;
                writer = Some(ArrowWriter::try_new(file, batch.schema(), Some(properties.clone()))?);
            }
            if let Some(writer) = &mut writer {
                writer.write(&batch)?;
                writer.flush()?;
            }
        }
        if let Some(writer) = writer {
            writer.close()?;
        }
        Ok(())
    }
}
