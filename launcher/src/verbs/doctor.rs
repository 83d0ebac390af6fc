//! `doctor`: checks the machine, the worker and the configuration, and reports problems that would keep training from
//! starting. It also looks for data and runs (`data`), and ends with the next command to type.

mod data;
mod finding;

use std::path::Path;

use anyhow::Context as _;
use locdiff_core::cgroup::memory_available_bytes;
use locdiff_core::config::{self, DeviceKind, Layer, PRESETS, RunConfig};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::paths::{existing, require_writable};
use crate::cli::Global;
use crate::cluster::Cluster;
use crate::error::refuse;
use crate::gpus::{self, Inventory};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::supervisor::Supervisor;
use crate::terminal::{width, wrapped};
use data::DataReport;
use finding::{Finding, Level};

/// Width of the marks and of the spaces around the names of checks.
const MARK_WIDTH: usize = 9;

/// Least width of the column with the names of checks.
const NAME_WIDTH: usize = 17;

const GIB: f64 = (1_u64 << 30) as f64;

/// Free shared memory that NCCL needs for its buffers, in bytes. With less, NCCL may fail.
const SHARED_MEMORY_WANTED_BYTES: u64 = 1 << 30;

/// Number of open files that a worker needs for shards, checkpoints, and sockets to other ranks.
const OPEN_FILES_WANTED: u64 = 1024;

/// Width of CLIP ViT-L/14 embeddings. The estimates assume this width and do not read the shards.
const EMBEDDING_WIDTH: u64 = 768;

/// The largest difference between the clocks of two nodes that `doctor` does not warn about, seconds. Logs of nodes whose
/// clocks differ by more are hard to compare.
const CLOCKS_DIFFER_S: f64 = 1.0;

#[derive(Debug, Serialize, Deserialize)]
struct Check {
    /// The name of the check, after the number of the node if there are several.
    name: String,
    level: Level,
    detail: String,
}

impl Check {
    fn new((name, (level, detail)): (&str, Finding)) -> Self {
        Self { name: name.to_owned(), level, detail }
    }
}

/// The checks of this machine as JSON, for node 0.
pub(super) fn report(config: &RunConfig, inventory: &Inventory) -> Value {
    json!(machine_checks(config, inventory))
}

fn machine_checks(config: &RunConfig, inventory: &Inventory) -> Vec<Check> {
    let found = [
        ("machine", machine()),
        ("GPUs", gpu_list(inventory)),
        ("layout", layout(config, inventory)),
        ("worker", worker(config, inventory)),
        ("shared memory", shared_memory()),
        ("open files", open_files()),
        ("disk", disk(config)),
    ];
    found.into_iter().map(Check::new).collect()
}

/// The checks of all nodes, which node 0 has received.
fn checks_of_nodes(cluster: &Cluster) -> anyhow::Result<Vec<Check>> {
    let (mut all, mut present) = (Vec::new(), Vec::new());
    for facts in Supervisor::new()?.facts_of_nodes(cluster)? {
        let mut checks: Vec<Check> = serde_json::from_value(facts.report).context("a node sent no checks")?;
        let interface = if facts.interface.is_empty() { "loopback".to_owned() } else { facts.interface };
        checks.push(Check::new(("network", (Level::Ok, format!("{} through {interface}", facts.host)))));
        if facts.node > 0 {
            let level = if facts.ahead_s.abs() < CLOCKS_DIFFER_S { Level::Ok } else { Level::Warning };
            let order = if facts.ahead_s < 0.0 { "behind" } else { "ahead of" };
            let detail = format!("{:.2} s {order} node 0", facts.ahead_s.abs());
            checks.push(Check::new(("clock", (level, detail))));
            let detail = format!("reads and writes {} as node 0 does", facts.config.checkpoint.dir);
            checks.push(Check::new(("shared folder", (Level::Ok, detail))));
        }
        present.push(facts.node);
        all.extend(
            checks.into_iter().map(|check| Check { name: format!("node {} {}", facts.node, check.name), ..check }),
        );
    }
    let refusals = cluster.refusals();
    let missing = (cluster.nodes() as usize).saturating_sub(present.len() + refusals.len());
    all.extend(refusals.into_iter().map(|reason| Check::new(("another node", (Level::Error, reason)))));
    if missing > 0 {
        let numbers = (0..cluster.nodes()).filter(|node| !present.contains(node)).map(|node| node.to_string());
        let detail = format!("{missing} did not join; no answer from {}", numbers.collect::<Vec<_>>().join(", "));
        all.push(Check::new(("missing nodes", (Level::Error, detail))));
    }
    Ok(all)
}

/// Runs all checks. If training cannot start because checks have failed, the error names these checks.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = super::resolve_with_run(global)?;
    let config = &resolved.config;
    let data = DataReport::new(config, global.config.is_empty() && global.set.is_empty());
    let mut checks = match &global.cluster {
        Some(cluster) => checks_of_nodes(cluster)?,
        None => machine_checks(config, &inventory),
    };
    checks.extend(data.findings.iter().cloned().map(Check::new));
    let presets = presets(config, &inventory);
    let name_width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0).max(NAME_WIDTH);
    for check in &checks {
        let mark = match check.level {
            Level::Ok => "ok     ",
            Level::Warning => "warning",
            Level::Error => "ERROR  ",
        };
        let line = format!("{mark} {:<name_width$} {}", check.name, check.detail);
        output.print(&wrapped(&line, name_width + MARK_WIDTH, width()));
    }
    for preset in &presets {
        let verdict = if preset.fits { "fits" } else { "does not fit" };
        output.print(&format!(
            "        {:<name_width$} {verdict}: about {:.1} GiB of memory, {:.1} M parameters",
            preset.name,
            preset.bytes as f64 / GIB,
            preset.parameters as f64 / 1e6
        ));
    }
    let failed: Vec<&str> =
        checks.iter().filter(|check| check.level == Level::Error).map(|check| check.name.as_str()).collect();
    let next = failed.is_empty().then(|| data.next_command(std::env::args())).filter(|_| global.cluster.is_none());
    let result = json!({
        "ok": failed.is_empty(), "checks": checks, "gpus": inventory.gpus, "presets": presets, "next": next,
    });
    if let Some(next) = next {
        let verdict = if data.has_training { "training can start here" } else { "training needs shards" };
        output.print(&format!("{verdict}\nnext: {next}"));
        return Ok(result);
    }
    if failed.is_empty() {
        output.print("training can start on these nodes");
        return Ok(result);
    }
    output.result(&result);
    refuse!(NotReady, "training cannot start here: {}", failed.join(", "))
}

fn machine() -> Finding {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = memory_bytes("MemTotal:").unwrap_or(0) as f64 / GIB;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    (Level::Ok, format!("{cores} cores, {memory:.1} GiB memory, Linux {}", kernel.trim()))
}

/// The value in the line of `/proc/meminfo` that begins with `name`, in bytes.
fn memory_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

fn gpu_list(inventory: &Inventory) -> Finding {
    if let Some(reason) = &inventory.absent_because {
        return (Level::Ok, format!("none: {reason}"));
    }
    let gpu = |gpu: &gpus::Gpu| {
        let (free, total) = (gpu.memory_free_bytes as f64 / GIB, gpu.memory_total_bytes as f64 / GIB);
        format!("{} {} ({free:.1} of {total:.1} GiB free)", gpu.index, gpu.name)
    };
    let list: Vec<String> = inventory.gpus.iter().map(gpu).collect();
    let driver = inventory.driver.as_deref().unwrap_or("unknown");
    (Level::Ok, format!("{}; driver {driver}", list.join(", ")))
}

fn layout(config: &RunConfig, inventory: &Inventory) -> Finding {
    match NodeWorkers::plan(config, inventory) {
        Ok(world) => {
            let device = if world.slots.iter().any(|slot| slot.gpu.is_some()) { "GPU" } else { "CPU" };
            (Level::Ok, format!("{} {device} worker(s)", world.slots.len()))
        }
        Err(error) => (Level::Error, error.to_string()),
    }
}

fn worker(config: &RunConfig, inventory: &Inventory) -> Finding {
    let hello = match super::probe() {
        Ok(hello) => hello,
        Err(error) => return (Level::Error, format!("{error:#}")),
    };
    let wants_cuda = config.parallel.device.on_cuda(!inventory.gpus.is_empty());
    match (&hello.cuda, &hello.nccl) {
        (Some(cuda), Some(nccl)) => {
            (Level::Ok, format!("libtorch {}, CUDA {cuda}, NCCL {nccl}", hello.libtorch_loaded))
        }
        _ if wants_cuda => {
            let detail = "the configuration uses GPUs, but the worker is the CPU variant; build the CUDA variant \
                          with `LOCDIFF_CUDA=1 make build`";
            (Level::Error, detail.to_owned())
        }
        _ => (Level::Ok, format!("libtorch {}, CPU variant", hello.libtorch_loaded)),
    }
}

fn free_bytes(path: &Path) -> nix::Result<u64> {
    let stat = statvfs(path)?;
    Ok(stat.blocks_available() as u64 * stat.fragment_size() as u64)
}

fn shared_memory() -> Finding {
    match free_bytes(Path::new("/dev/shm")) {
        Ok(free) if free >= SHARED_MEMORY_WANTED_BYTES => {
            (Level::Ok, format!("{:.1} GiB free in /dev/shm", free as f64 / GIB))
        }
        Ok(free) => {
            let detail = format!("{:.2} GiB free in /dev/shm, wanted 1 GiB for NCCL", free as f64 / GIB);
            (Level::Warning, detail)
        }
        Err(error) => (Level::Warning, format!("/dev/shm: {error}")),
    }
}

fn open_files() -> Finding {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) if soft >= OPEN_FILES_WANTED => (Level::Ok, format!("limit {soft}")),
        Ok((soft, hard)) => {
            let detail =
                format!("limit {soft}, wanted {OPEN_FILES_WANTED}; raise it with `ulimit -n {}`", hard.min(65_536));
            (Level::Warning, detail)
        }
        Err(error) => (Level::Warning, error.to_string()),
    }
}

/// Checks that `checkpoint.dir` is writable and has space for `checkpoint.keep` checkpoints, the best checkpoint, and
/// the checkpoint that is being written.
fn disk(config: &RunConfig) -> Finding {
    let wanted = checkpoint_bytes(config) * (u64::from(config.checkpoint.keep) + 2);
    let folder = existing(Path::new(&config.checkpoint.dir));
    let shown = folder.display();
    if let Err(error) = require_writable(&folder) {
        return (Level::Error, error.about("checkpoint.dir").to_string());
    }
    match free_bytes(&folder) {
        Ok(free) if free >= wanted => {
            let detail = format!("{:.1} GiB free at {shown}, wanted {:.1} GiB", free as f64 / GIB, wanted as f64 / GIB);
            (Level::Ok, detail)
        }
        Ok(free) => {
            let detail = format!(
                "{:.1} GiB free at {shown}, wanted {:.1} GiB for the last {} checkpoints, the best one and the one \
                 being written; lower checkpoint.keep, or set checkpoint.dir to a larger disk",
                free as f64 / GIB,
                wanted as f64 / GIB,
                config.checkpoint.keep
            );
            (Level::Error, detail)
        }
        Err(error) => (Level::Error, format!("checkpoint.dir: {shown}: {error}")),
    }
}

/// Estimated size of a checkpoint: 16 bytes per parameter. The weight, its average and its two moments take 4 bytes
/// each.
fn checkpoint_bytes(config: &RunConfig) -> u64 {
    16 * config.model.parameters(EMBEDDING_WIDTH)
}

#[derive(Debug, Serialize)]
struct Fit {
    name: &'static str,
    parameters: u64,
    bytes: u64,
    fits: bool,
}

/// For each preset, estimates whether training fits into the memory that one worker can use.
fn presets(config: &RunConfig, inventory: &Inventory) -> Vec<Fit> {
    let workers = NodeWorkers::plan(config, inventory).map_or(1, |world| world.slots.len() as u64);
    let on_gpu = config.parallel.device != DeviceKind::Cpu;
    let room = match inventory.gpus.iter().map(|gpu| gpu.memory_free_bytes).min().filter(|_| on_gpu) {
        Some(free) => free,
        None => memory_available_bytes(Path::new("/")) / workers,
    };
    let fit = |preset: &config::Preset| {
        let found = config::load(&[Layer::Preset(preset.name.into())]).ok()?;
        let bytes = training_bytes(&found.config, workers);
        let parameters = found.config.model.parameters(EMBEDDING_WIDTH);
        Some(Fit { name: preset.name, parameters, bytes, fits: bytes < room / 10 * 9 })
    };
    PRESETS.iter().filter_map(fit).collect()
}

/// Estimates the memory that one worker needs for training:
///
/// - for the worker's piece of the model: weights, gradients, two moments, the average of the weights, a 16-bit copy of
///   the weights, and the copies from which checkpoints are written;
/// - for the quick evaluation: a whole model;
/// - for each row of the worker's batch: the activations that the backward pass needs, two copies of the prediction's
///   logits, and two copies of the truth's logits;
/// - for the KL loss: the harmonics of the worker's anchors.
fn training_bytes(config: &RunConfig, workers: u64) -> u64 {
    let tensor = u64::from(config.parallel.tensor).clamp(1, workers);
    let parameters = config.model.parameters(EMBEDDING_WIDTH);
    let rows = u64::from(config.train.global_batch).div_ceil((workers / tensor).max(1));
    let per_row = 4 * (16 * config.model.kept_dims() + 4 * u64::from(config.loss.anchors) / tensor);
    let anchors = 4 * u64::from(config.loss.anchors) * config.model.dims() / tensor;
    (22 + 16) * parameters / tensor + 4 * parameters + rows * per_row + anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_grows_with_the_model_and_shrinks_with_more_workers() {
        let config = |name: &str| config::load(&[Layer::Preset(name.into())]).expect("the preset is valid").config;
        assert!(training_bytes(&config("l47"), 1) > training_bytes(&config("l23"), 1));
        assert!(training_bytes(&config("l47"), 4) < training_bytes(&config("l47"), 1));
        assert!(checkpoint_bytes(&config("l47")) > 1 << 30);
    }
}
