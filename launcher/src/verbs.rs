//! One function per verb: what the command line asks for, done.

mod bench_shdd;
mod checkpoint;
mod demo;
mod eval;
mod geoclip;
mod perturbation;
mod shards;
mod train;

use std::time::Duration;

use clap::CommandFactory;
use locdiff_core::config::{self, DeviceKind, Layer, Resolved};
use locdiff_core::protocol::{CollectiveRow, Hello, Job, Meeting, Place, SelfCheck};
use serde_json::{Value, json};

use crate::cli::{BenchVerb, Cli, ConfigVerb, Global, Verb};
use crate::coordinator::Limits;
use crate::doctor;
use crate::error::LaunchError;
use crate::gpus::{self, Inventory};
use crate::output::Output;
use crate::rendezvous::World;
use crate::supervisor::{self, Echo, Gang, GangResult, Observer, Supervisor};

/// Does what the command line asks for; the value is what `--json` prints.
pub fn run(cli: &Cli, output: Output) -> anyhow::Result<Value> {
    if cli.version {
        return version(output);
    }
    let global = &cli.global;
    match cli.verb.as_ref() {
        Some(Verb::Config(verb)) => show_config(verb, global, output),
        Some(Verb::Completions { shell }) => completions(*shell, output),
        Some(Verb::Demo) => demo::run(global, output),
        Some(Verb::SelfCheck) => self_check(global, output),
        Some(Verb::Bench(BenchVerb::Collectives { max_bytes })) => bench_collectives(global, *max_bytes, output),
        Some(Verb::Bench(BenchVerb::Shards { python })) => shards::bench(python.as_deref(), global, output),
        Some(Verb::Bench(BenchVerb::Shdd)) => bench_shdd::run(global, output),
        Some(Verb::Eval { hybrid, suite, predictions, tune }) => {
            let request =
                eval::Request { hybrid: *hybrid, suite: suite.clone(), predictions: predictions.clone(), tune: *tune };
            eval::run(&request, global, output)
        }
        Some(Verb::Train { inject }) => train::run(inject, global, output),
        Some(Verb::Shards(verb)) => shards::run(verb, global, output),
        Some(Verb::Checkpoint(verb)) => checkpoint::run(verb, global, output),
        Some(Verb::Geoclip(verb)) => geoclip::run(verb, global, output),
        Some(Verb::Doctor) => doctor::run(global, output),
        Some(verb) => not_yet(verb, global),
        None => unreachable!("clap asks for a verb"),
    }
}

/// Resolves the configuration of a command on this machine.
pub(crate) fn resolve(global: &Global, inventory: &Inventory) -> Result<Resolved, LaunchError> {
    Ok(config::load(&global.layers(default_preset(global, inventory)))?)
}

/// Which preset is the default depends on the device, which the flags may name.
fn default_preset(global: &Global, inventory: &Inventory) -> &'static str {
    let named = config::load(&global.layers("demo")).map_or(DeviceKind::Auto, |found| found.config.parallel.device);
    if named.on_cuda(!inventory.gpus.is_empty()) { "l47" } else { "demo" }
}

/// Starts workers, gives them a job and waits for their results.
pub(crate) fn run_gang(resolved: &Resolved, world: &World, job: Job, echo: bool) -> anyhow::Result<GangResult> {
    run_attempt(&mut Supervisor::new()?, resolved, world, job, 0, &mut Echo(echo))
}

/// The same for one attempt of a run, with who hears its reports.
pub(crate) fn run_attempt(
    supervisor: &mut Supervisor,
    resolved: &Resolved,
    world: &World,
    job: Job,
    attempt: u32,
    observer: &mut dyn Observer,
) -> anyhow::Result<GangResult> {
    let worker = supervisor::worker_path()?;
    let supervise = &resolved.config.supervise;
    let limits = Limits {
        start: Duration::from_secs_f64(supervise.start_timeout_s),
        stop: Duration::from_secs_f64(supervise.stop_timeout_s),
    };
    let meeting = Meeting {
        interface: resolved.config.network.interface.clone(),
        attempt,
        tensor_parallel: resolved.config.parallel.tensor,
        rendezvous_timeout_s: supervise.rendezvous_timeout_s,
        collective_timeout_s: supervise.collective_timeout_s,
    };
    supervisor.run(&Gang { worker: &worker, world, meeting, job, limits }, observer)
}

/// Asks one worker who it is.
pub(crate) fn probe() -> anyhow::Result<Hello> {
    let resolved = config::load(&[] as &[Layer]).map_err(LaunchError::from)?;
    let place = Place { rank: 0, world: 1, local_rank: 0, gpu: None, threads: 1 };
    let world = World { places: vec![place], share_gpu: false };
    let mut found = run_gang(&resolved, &world, Job::Probe, false)?;
    anyhow::ensure!(found.hellos.len() == 1, "one worker was asked, {} answered", found.hellos.len());
    Ok(found.hellos.remove(0))
}

fn version(output: Output) -> anyhow::Result<Value> {
    let (version, revision) = (locdiff_core::VERSION, locdiff_core::REVISION);
    output.people(&format!("locdiff-launch {version} ({revision})"));
    let hello = probe()?;
    let or_none = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".to_owned());
    output.people(&format!(
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
        output.people(&if *markdown { config::markdown() } else { serde_json::to_string_pretty(&schema)? });
        return Ok(schema);
    }
    let resolved = resolve(global, &gpus::inventory())?;
    match verb {
        ConfigVerb::Check => output.people("the configuration is valid"),
        _ => output.people(&config::show(&resolved)),
    }
    Ok(serde_json::to_value(&resolved.config)?)
}

fn completions(shell: clap_complete::Shell, output: Output) -> anyhow::Result<Value> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "locdiff-launch", &mut script);
    let script = String::from_utf8(script)?;
    output.people(&script);
    Ok(json!({ "script": script }))
}

/// Every worker starts, meets nobody, and checks that libtorch computes right in its process.
fn self_check(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = resolve(global, &inventory)?;
    let world = World::plan(&resolved.config, &inventory)?;
    let found = run_gang(&resolved, &world, Job::SelfCheck, true)?;
    let mut rows = Vec::new();
    for (hello, result) in found.hellos.iter().zip(found.results) {
        let check: SelfCheck = serde_json::from_value(result)?;
        output.people(&format!(
            "worker rank {} (pid {}): libtorch {} on {}, a {size} x {size} product within {:.1e} of the exact one",
            hello.rank,
            hello.pid,
            hello.libtorch_loaded,
            check.device,
            check.error_max,
            size = check.size,
        ));
        rows.push(json!({ "rank": hello.rank, "pid": hello.pid, "check": check }));
    }
    output.people("all workers started, computed and ended in order");
    Ok(json!({ "ok": true, "rows": rows }))
}

/// Every collective operation between real processes: values, time, bandwidth.
fn bench_collectives(global: &Global, bytes_max: u64, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = resolve(global, &inventory)?;
    let world = World::plan(&resolved.config, &inventory)?;
    let found = run_gang(&resolved, &world, Job::BenchCollectives { bytes_max }, true)?;
    let pids: Vec<u32> = found.hellos.iter().map(|hello| hello.pid).collect();
    let first = found.results.into_iter().next().unwrap_or_default();
    let rows: Vec<CollectiveRow> = serde_json::from_value(first)?;
    let ok = rows.iter().all(|row| row.ok);
    let device = if world.places.iter().any(|place| place.gpu.is_some()) { "NCCL" } else { "Gloo" };
    output.people(&format!("{} workers over {device}, pids {pids:?}", pids.len()));
    output.people(&format!("{:<16} {:>9} {:>10} {:>8}  values", "operation", "KiB", "us", "GB/s"));
    for row in &rows {
        let verdict = if row.ok { "right" } else { "WRONG" };
        let kib = row.bytes as f64 / 1024.0;
        output.people(&format!("{:<16} {kib:>9.1} {:>10.1} {:>8.3}  {verdict}", row.op, row.us, row.gb_per_s));
    }
    if !ok {
        let wrong: Vec<&str> = rows.iter().filter(|row| !row.ok).map(|row| row.op.as_str()).collect();
        return Err(LaunchError::WorkerFailed(format!("wrong values from {}", wrong.join(", "))).into());
    }
    Ok(json!({ "ok": ok, "pids": pids, "rows": rows }))
}

/// A verb that has its place but not its work yet: its configuration is checked all the same.
fn not_yet(verb: &Verb, global: &Global) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = resolve(global, &inventory)?;
    World::plan(&resolved.config, &inventory)?;
    let name = match verb {
        Verb::Predict { .. } => "predict",
        Verb::Bench(verb) => match verb {
            BenchVerb::Train => "bench train",
            BenchVerb::Sample { .. } => "bench sample",
            BenchVerb::Shards { .. } | BenchVerb::Collectives { .. } | BenchVerb::Shdd => {
                unreachable!("handled in run")
            }
        },
        Verb::Status => "status",
        Verb::Demo
        | Verb::Eval { .. }
        | Verb::SelfCheck
        | Verb::Doctor
        | Verb::Train { .. }
        | Verb::Shards(_)
        | Verb::Checkpoint(_)
        | Verb::Geoclip(_)
        | Verb::Config(_)
        | Verb::Completions { .. } => unreachable!("handled in run"),
    };
    Err(LaunchError::NotYet(name.to_owned()).into())
}
