//! `shards ...`, `bench shards` and `geoclip import`: one worker does the work, this module says what came of it.

use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::{Job, ShardsJob};
use serde_json::{Value, json};

use crate::cli::{Global, ShardsVerb};
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::World;

/// `shards VERB`.
pub(super) fn run(verb: &ShardsVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    let name = match verb {
        ShardsVerb::Verify { dir, epochs, world_sizes } => {
            return verify(&dir.to_string_lossy(), epochs.unwrap_or(0), world_sizes, global, output);
        }
        ShardsVerb::Inspect { path } => return inspect(&path.to_string_lossy(), global, output),
        ShardsVerb::Simulate { .. } | ShardsVerb::Build { .. } => return make(verb, global, output),
        ShardsVerb::Embed { .. } => "shards embed",
    };
    Err(LaunchError::NotYet(name.to_owned()).into())
}

/// `shards verify`: every problem on a line of its own, and the exit code of the first.
fn verify(location: &str, epochs: u32, world_sizes: &[u32], global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = super::resolve(global, &gpus::inventory())?;
    let job = ShardsJob::Verify {
        location: location.to_owned(),
        epochs,
        world_sizes: if world_sizes.is_empty() { vec![1] } else { world_sizes.to_vec() },
        global_batch: resolved.config.train.global_batch,
        seed: resolved.config.train.seed,
        config: resolved.config.shards,
    };
    let found = run_one(global, job)?;
    let problems = found["problems"].as_array().cloned().unwrap_or_default();
    if let Some(first) = problems.first() {
        let lines: Vec<&str> = problems.iter().filter_map(|problem| problem["message"].as_str()).collect();
        let code = first["exit_code"].as_i64().and_then(|code| ExitCode::from_code(code as i32));
        let text = format!("{location}: {} problems:\n  {}", lines.len(), lines.join("\n  "));
        return Err(LaunchError::Reported { text, code: code.unwrap_or(ExitCode::Internal) }.into());
    }
    let checksums = if found["manifest"] == true { "every checksum is right" } else { "no manifest, so no checksums" };
    let usable = match found["skipped"].as_str() {
        None => "every value can be used".to_owned(),
        Some(skipped) => format!("every other value can be used; {skipped}"),
    };
    output.people(&format!(
        "{location}: {} rows in {} files of {} row groups, width {}, {} views: {checksums}, {usable}",
        found["rows"], found["files"], found["row_groups"], found["width"], found["views"],
    ));
    let plan = &found["plan"];
    let proved = proved(plan);
    for size in plan["world_sizes"].as_array().into_iter().flatten() {
        output.people(&format!(
            "{} workers: {} epochs of {} steps of {} rows: {proved}; order {}",
            size["workers"],
            plan["epochs"],
            plan["steps_per_epoch"],
            plan["global_batch"],
            size["order"].as_str().unwrap_or_default(),
        ));
    }
    Ok(found)
}

/// What a replay has proved of every epoch, in words.
fn proved(plan: &Value) -> String {
    let rows = &plan["rows"];
    match (plan["dropped_rows"].as_u64().unwrap_or(0), plan["padded_rows"].as_u64().unwrap_or(0)) {
        (0, 0) => "each row once per epoch".to_owned(),
        (0, padded) => format!("each row once per epoch, and {padded} of {rows} again to fill the last batch"),
        (dropped, _) => format!("no row twice in an epoch, and {dropped} of {rows} in none: they fill no batch"),
    }
}

/// `shards inspect`: numbers and a map.
fn inspect(location: &str, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = super::resolve(global, &gpus::inventory())?;
    let job = ShardsJob::Inspect { location: location.to_owned(), config: resolved.config.shards };
    let found = run_one(global, job)?;
    let range = |key: &str| {
        let bound = |index: usize| found[key][index].as_f64().unwrap_or(f64::NAN);
        format!("{:.4} to {:.4}", bound(0), bound(1))
    };
    let text = |key: &str| found[key].as_str().unwrap_or("none").to_owned();
    let skipped = found["skipped"].as_str().map(|skipped| format!("; {skipped}")).unwrap_or_default();
    let lines = [
        ("rows", format!("{}{skipped}", found["rows"])),
        ("files", found["files"].to_string()),
        (
            "row groups",
            format!("{} of {} to {} rows", found["row_groups"], found["row_group_rows"][0], found["row_group_rows"][1]),
        ),
        ("width, views", format!("{}, {}", found["width"], found["views"])),
        ("latitude", range("latitudes")),
        ("longitude", range("longitudes")),
        ("mean", format!("{} over the dimensions", range("means"))),
        ("deviation", format!("{} over the dimensions", range("standard_deviations"))),
        ("fingerprint", text("fingerprint")),
        ("source", text("source")),
        ("image head", text("image_head")),
    ];
    lines.iter().for_each(|(name, value)| output.people(&format!("{name:<14}{value}")));
    let map = found["map"].as_array().into_iter().flatten().filter_map(Value::as_str);
    map.for_each(|line| output.people(&format!("|{line}|")));
    let mut found = found;
    found["ok"] = json!(true);
    Ok(found)
}

/// `bench shards`: our reader on one core beside pyarrow's.
pub(super) fn bench(python: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<Value> {
    let found = run_one(global, ShardsJob::Bench { python: python.map(Path::to_owned) })?;
    output.people(&format!("pyarrow: {}", found["peer"].as_str().unwrap_or("none was found, so ours stands alone")));
    output.people(&format!("{:<44} {:>8} {:>8} {:>6}", "case", "GB/s", "pyarrow", "ratio"));
    for row in found["rows"].as_array().into_iter().flatten() {
        let number = |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let case = row["case"].as_str().unwrap_or_default();
        let (ours, theirs) = (number("gb_per_s"), number("pyarrow_gb_per_s"));
        output.people(&format!("{case:<44} {ours:>8} {theirs:>8} {:>6}", number("ratio")));
    }
    Ok(found)
}

/// `shards simulate` and `shards build`: a new folder.
fn make(verb: &ShardsVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    let result = run_one_with(global, |config| match verb.clone() {
        ShardsVerb::Simulate { rows, seed, out, views, coordinates, overwrite } => {
            let geoclip = config.retrieval.geoclip.clone().into();
            ShardsJob::Simulate { rows, seed, out, views, coordinates, geoclip, overwrite }
        }
        ShardsVerb::Build { table, embeddings, out, overwrite } => {
            ShardsJob::Build { table, embeddings, out, overwrite, config: config.shards.clone() }
        }
        ShardsVerb::Embed { .. } | ShardsVerb::Verify { .. } | ShardsVerb::Inspect { .. } => {
            unreachable!("these make no folder from rows")
        }
    })?;
    let number = |name: &str| result[name].as_u64().unwrap_or_default();
    let seconds = result["seconds"].as_f64().unwrap_or_default();
    let left_out = match number("skipped") {
        0 => String::new(),
        skipped => format!("; {skipped} rows that cannot be used are left out"),
    };
    output.people(&format!(
        "{} rows of {} x {} numbers in {}, {seconds:.1} s{left_out}",
        number("rows"),
        number("views"),
        number("width"),
        result["out"].as_str().unwrap_or_default()
    ));
    Ok(result)
}

/// Gives the job to one worker, on the first GPU where there is one.
pub(super) fn run_one(global: &Global, job: ShardsJob) -> anyhow::Result<Value> {
    run_one_with(global, |_| job)
}

/// The same for a job that takes something from the configuration.
pub(super) fn run_one_with(global: &Global, job: impl FnOnce(&RunConfig) -> ShardsJob) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = super::resolve(global, &inventory)?;
    let mut world = World::plan(&resolved.config, &inventory)?;
    // It is alone on this machine and takes all cores; no bit of what it makes depends on how many there are.
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = u32::try_from(cores).unwrap_or(u32::MAX);
    world.places.truncate(1);
    world.places.iter_mut().for_each(|place| (place.world, place.threads) = (1, threads));
    let found = super::run_gang(&resolved, &world, Job::Shards(Box::new(job(&resolved.config))), true)?;
    Ok(found.results.into_iter().next().unwrap_or_default())
}
