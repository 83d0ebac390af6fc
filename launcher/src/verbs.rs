//! Runs the verb of the command line. Each verb has one function, and most verbs have a module.

mod bench;
mod checkpoint;
mod demo;
mod doctor;
mod eval;
mod geoclip;
mod locations;
mod nodes;
mod paths;
mod predict;
mod report;
mod restarts;
mod runs;
mod serve;
mod shards;
mod status;
mod train;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::CommandFactory;
use locdiff_core::config::{self, AutoOr, CheckpointConfig, DeviceKind, Layer, Resolved, RunConfig, SuperviseConfig};
use locdiff_core::protocol::{CollectiveRow, Hello, Job, Probed, SelfCheck, TypedResult};
use serde_json::{Value, json};

use crate::cli::{BenchVerb, Cli, ConfigVerb, Global, Verb};
use crate::cluster::new_token;
use crate::error::{LaunchError, refuse};
use crate::gpus::{self, Inventory};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{CONFIG, is_run};
use crate::supervisor::{Echo, GangResult, Silence, Supervisor};
use restarts::try_again;

/// The longest time that [`run_repeatable`] waits for an outage to end, in seconds, even if
/// `supervise.outage_patience_s` is longer.
const OUTAGE_PATIENCE_S_MAX: f64 = 60.0;

/// Runs the verb. The returned value is the JSON result that `--json` prints.
pub fn run(cli: &Cli, output: Output) -> anyhow::Result<Value> {
    if cli.version {
        return version(output);
    }
    let verb = cli.verb.as_ref().context("no verb, though `Cli::validate` checks for one: this is a bug")?;
    match nodes::run(verb, cli, output)? {
        Some(result) => Ok(result),
        None => run_verb(verb, &cli.global, output),
    }
}

/// Runs the verb on this node, and on the nodes that `global` is connected to.
fn run_verb(verb: &Verb, global: &Global, output: Output) -> anyhow::Result<Value> {
    match verb {
        Verb::Config(verb) => show_config(verb, global, output),
        Verb::Completions { shell } => completions(*shell, output),
        Verb::Demo => demo::run(global, output),
        Verb::SelfCheck => self_check(global, output),
        Verb::Bench(BenchVerb::Collectives { max_bytes }) => bench_collectives(global, *max_bytes, output),
        Verb::Bench(BenchVerb::Shards { python }) => shards::bench(python.clone(), global, output),
        Verb::Bench(BenchVerb::Shdd) => bench::shdd::run(global, output),
        Verb::Bench(BenchVerb::Train(request)) => bench::speed::train(request, global, output),
        Verb::Bench(BenchVerb::Sample { images, profile }) => bench::speed::sample(*images, *profile, global, output),
        Verb::Eval(request) => eval::run(request, global, output),
        Verb::Train { new, inject } => train::run(inject, *new, global, output),
        Verb::Shards(verb) => shards::run(verb, global, output),
        Verb::Checkpoint(verb) => checkpoint::run(verb, global, output),
        Verb::Geoclip(verb) => geoclip::run(verb, global, output),
        Verb::Doctor => doctor::run(global, output),
        Verb::Predict(request) => predict::run(request, global, output),
        Verb::Report(request) => report::run(request, global, output),
        Verb::Serve(request) => serve::run(request, global, output),
        Verb::Status => status::run(global, output),
        Verb::Runs => runs::run(global, output),
        Verb::Token => token(output),
    }
}

/// Resolves the configuration from presets, files and flags.
pub(crate) fn resolve(global: &Global) -> Result<Resolved, LaunchError> {
    Ok(config::load(&global.layers(default_preset(global, &gpus::inventory())))?)
}

/// Like [`resolve`], but if the flags name an existing run and `--config` is not given, the run's own configuration is
/// the base. The run then stays in the folder where it was found, even if its configuration still names an older folder
/// because the run was moved.
pub(crate) fn resolve_with_run(global: &Global) -> Result<Resolved, LaunchError> {
    let named = named_run_folder(global).filter(|(_, folder)| global.config.is_empty() && is_run(folder));
    let Some((checkpoint, folder)) = named else { return resolve(global) };
    let mut layers = global.layers_over(Layer::File(folder.join(CONFIG)));
    for (key, value) in [("checkpoint.dir", checkpoint.dir), ("checkpoint.run", checkpoint.run)] {
        layers.insert(1, Layer::Flag { flag: "--run", key, value: value.into() });
    }
    Ok(config::load(&layers)?)
}

/// The folder of the run that the flags name. The folder may not exist. `None` if the flags name no run or are invalid.
fn named_run_folder(global: &Global) -> Option<(CheckpointConfig, PathBuf)> {
    let checkpoint = resolve_for(global, &["checkpoint"]).ok()?.config.checkpoint;
    let folder = Path::new(&checkpoint.dir).join(&checkpoint.run);
    (!checkpoint.run.is_empty()).then_some((checkpoint, folder))
}

/// Like [`resolve`], but checks only the values in `sections`.
pub(crate) fn resolve_for(global: &Global, sections: &[&str]) -> Result<Resolved, LaunchError> {
    Ok(config::load_for(&global.layers(default_preset(global, &gpus::inventory())), sections)?)
}

/// Resolves the configuration and assigns its workers to devices. Replaces "auto" in `train.threads` with a number.
pub(crate) fn plan(global: &Global) -> anyhow::Result<(Resolved, NodeWorkers)> {
    let mut resolved = resolve(global)?;
    let world = workers(global, &resolved)?;
    resolved.config.train.threads = AutoOr::Value(world.threads());
    Ok((resolved, world))
}

/// The workers of all nodes for a resolved configuration.
pub(crate) fn workers(global: &Global, resolved: &Resolved) -> anyhow::Result<NodeWorkers> {
    let own = NodeWorkers::plan(&resolved.config, &gpus::inventory())?;
    match &global.cluster {
        Some(cluster) => Supervisor::new()?.gather(&NodeWorkers { cluster: Some(Arc::clone(cluster)), ..own }),
        None => Ok(own),
    }
}

/// The preset that is used without `--config`: `l47` on CUDA, `demo` on the CPU. If no device is chosen, the
/// device is CUDA when `inventory` has a GPU, and otherwise the CPU.
fn default_preset(global: &Global, inventory: &Inventory) -> &'static str {
    let named =
        config::load_for(&global.layers("demo"), &[]).map_or(DeviceKind::Auto, |found| found.config.parallel.device);
    if named.on_cuda(!inventory.gpus.is_empty()) { "l47" } else { "demo" }
}

/// Starts the workers of `world`, gives each of them `job`, and waits for all results. Logs the output of the workers.
/// Restarts nothing, because a restart would hide the failures that `self-check` and `bench` look for.
pub(crate) fn run_gang<T: TypedResult>(
    resolved: &Resolved,
    world: &NodeWorkers,
    job: Job,
) -> anyhow::Result<GangResult<T>> {
    Supervisor::new()?.run(&resolved.config, world, job, 0, &mut Echo)
}

/// Like [`run_gang`], but restarts the workers after a failure, by the same rules as in an evaluation. The job must be
/// repeatable: it only reads, or it writes under a temporary name that it renames at the end.
pub(crate) fn run_repeatable<T: TypedResult>(
    resolved: &Resolved,
    world: &NodeWorkers,
    job: &Job,
) -> anyhow::Result<GangResult<T>> {
    let config = &resolved.config;
    // Somebody is waiting for the answer, so give up on an outage much earlier than training does.
    let supervise = SuperviseConfig {
        outage_patience_s: config.supervise.outage_patience_s.min(OUTAGE_PATIENCE_S_MAX),
        ..config.supervise.clone()
    };
    try_again(&mut Supervisor::new()?, &supervise, |supervisor| {
        supervisor.run(config, world, job.clone(), 0, &mut Echo)
    })
}

/// Starts one CPU worker and returns its hello, which contains the versions of its libraries.
pub(crate) fn probe() -> anyhow::Result<Hello> {
    let (config, world) = (RunConfig::default(), NodeWorkers::one_cpu_worker(1));
    let found = Supervisor::new()?.run::<Probed>(&config, &world, Job::Probe, 0, &mut Silence)?;
    found.hellos.into_iter().next().context("the worker sent no hello: this is a bug")
}

fn version(output: Output) -> anyhow::Result<Value> {
    let (version, revision) = (locdiff_core::VERSION, locdiff_core::REVISION);
    output.print(&format!("locdiff-launch {version} ({revision})"));
    let hello = probe()?;
    let or_none = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".to_owned());
    output.print(&format!(
        "libtorch {}, CUDA {}, NCCL {}",
        hello.libtorch_loaded,
        or_none(&hello.cuda),
        or_none(&hello.nccl)
    ));
    Ok(json!({
        "version": version, "revision": revision,
        "libtorch": hello.libtorch_loaded, "cuda": hello.cuda, "nccl": hello.nccl,
    }))
}

fn show_config(verb: &ConfigVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    if let ConfigVerb::Schema { markdown } = verb {
        let schema = config::schema();
        output.print(&if *markdown { config::markdown() } else { serde_json::to_string_pretty(&schema)? });
        return Ok(schema);
    }
    let resolved = resolve_with_run(global)?;
    match verb {
        ConfigVerb::Check => output.print("the configuration is valid"),
        _ => output.print(&config::show(&resolved)),
    }
    Ok(serde_json::to_value(&resolved.config)?)
}

fn completions(shell: clap_complete::Shell, output: Output) -> anyhow::Result<Value> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "locdiff-launch", &mut script);
    let script = String::from_utf8(script)?;
    output.print(&script);
    Ok(json!({ "script": script }))
}

/// Prints a new token.
fn token(output: Output) -> anyhow::Result<Value> {
    let token = new_token()?;
    output.print(&token);
    Ok(json!({ "token": token }))
}

/// Starts all workers without connecting them to each other, and checks that libtorch computes correctly in each
/// worker.
fn self_check(global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let found = run_gang::<SelfCheck>(&resolved, &world, Job::SelfCheck)?;
    let mut rows = Vec::new();
    for (hello, check) in found.hellos.iter().zip(found.results) {
        output.print(&format!(
            "worker rank {} (pid {}): libtorch {} on {}, a {size} x {size} matrix product is off by at most {:.1e}",
            hello.rank,
            hello.pid,
            hello.libtorch_loaded,
            check.device,
            check.error_max,
            size = check.size,
        ));
        rows.push(json!({ "rank": hello.rank, "pid": hello.pid, "check": check }));
    }
    output.print("all workers started, computed and exited normally");
    Ok(json!({ "ok": true, "rows": rows }))
}

/// Runs every collective operation between the workers, checks the values, and measures time and bandwidth.
fn bench_collectives(global: &Global, bytes_max: u64, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let found = run_gang(&resolved, &world, Job::BenchCollectives { bytes_max })?;
    let pids: Vec<u32> = found.hellos.iter().map(|hello| hello.pid).collect();
    let rows: Vec<CollectiveRow> = found.first()?;
    let ok = rows.iter().all(|row| row.ok);
    let device = if world.slots.iter().any(|slot| slot.gpu.is_some()) { "NCCL" } else { "Gloo" };
    output.print(&format!("{} workers over {device}, pids {pids:?}", pids.len()));
    output.print(&format!("{:<16} {:>9} {:>10} {:>8}  values", "operation", "KiB", "us", "GB/s"));
    for row in &rows {
        let verdict = if row.ok { "right" } else { "WRONG" };
        let kib = row.bytes as f64 / 1024.0;
        output.print(&format!("{:<16} {kib:>9.1} {:>10.1} {:>8.3}  {verdict}", row.op, row.us, row.gb_per_s));
    }
    if !ok {
        let wrong: Vec<&str> = rows.iter().filter(|row| !row.ok).map(|row| row.op.as_str()).collect();
        refuse!(WorkerFailed, "wrong values from collective operations {}; this is a bug", wrong.join(", "));
    }
    Ok(json!({ "ok": ok, "pids": pids, "rows": rows }))
}
