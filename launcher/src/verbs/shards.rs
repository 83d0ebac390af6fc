//! The verbs of `shards`, and `bench shards`. `split` and `grid` need no worker. `simulate` may use all workers. For
//! every other verb, one worker does the work, and this module prints the result.

mod grid;
mod simulate;
mod split;

use std::path::PathBuf;

use locdiff_core::config::{Resolved, RunConfig};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::{
    CellSplit, ImageHead, Inspection, Job, ReplayReport, ShardsBenched, ShardsJob, ShardsMade, TypedResult, Verified,
};
use locdiff_core::tables::{PlacesPresent, TableCut};
use serde_json::Value;

use super::locations::require_shards;
use super::paths::{require_file, require_new};
use crate::cli::{Global, ShardsVerb};
use crate::error::LaunchError;
use crate::output::{Output, ok};
use crate::rendezvous::{NodeWorkers, cores};
use crate::terminal::{width, wrapped};

/// Runs `shards VERB`.
pub(super) fn run(verb: &ShardsVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    match verb.clone() {
        ShardsVerb::Simulate {
            world,
            rows,
            seed,
            out,
            views,
            coordinates,
            cells,
            held_out,
            part,
            rows_per_file,
            overwrite,
        } => {
            coordinates.iter().try_for_each(|file| require_file("--coordinates", file))?;
            require_new("--out", &out, overwrite)?;
            let cells = cells.zip(part).map(|(degrees, part)| CellSplit { degrees, held_out, part });
            let made = simulate::run(global, &out, |config, step| ShardsJob::Simulate {
                world,
                rows,
                seed,
                out: out.clone(),
                views,
                coordinates: coordinates.clone(),
                cells,
                geoclip: config.retrieval.geoclip.clone().into(),
                overwrite,
                rows_per_file,
                step,
            })?;
            print_made(&made, output)
        }
        ShardsVerb::Grid { spacing_km, coordinates, out, overwrite } => {
            grid::run(spacing_km, coordinates, &out, overwrite, global, output)
        }
        ShardsVerb::Build { table, places, embeddings, out, overwrite } => {
            table.iter().try_for_each(|file| require_file("--table", file))?;
            let default = if table.is_some() { PlacesPresent::All } else { PlacesPresent::None };
            let places = places.unwrap_or(default);
            embeddings.iter().try_for_each(|file| require_file("--embeddings", file))?;
            require_new("--out", &out, overwrite)?;
            let made = run_one(global, |config| ShardsJob::Build {
                table,
                places,
                embeddings,
                out,
                overwrite,
                config: config.shards.clone(),
            })?;
            print_made(&made, output)
        }
        ShardsVerb::Split { table, out, parts, cell_degrees, seed, author_column, overwrite } => {
            let cut = TableCut { parts, cell_degrees, seed, author_column };
            split::split(&table, &out, &cut, overwrite, output)
        }
        ShardsVerb::Embed { .. } => Err(LaunchError::not_yet("shards embed").into()),
        ShardsVerb::Verify { dir, epochs, world_sizes } => {
            verify(&dir.to_string_lossy(), epochs.unwrap_or(0), world_sizes, global, output)
        }
        ShardsVerb::Inspect { path } => inspect(&path.to_string_lossy(), global, output),
    }
}

/// `shards verify`: checks shards and prints a summary. If there are problems, returns an error that has one line for
/// each problem and the exit code of the first problem.
fn verify(
    location: &str,
    epochs: u32,
    world_sizes: Vec<u32>,
    global: &Global,
    output: Output,
) -> anyhow::Result<Value> {
    require_shards("DIR of `shards verify`", location)?;
    if epochs > 0 {
        super::resolve_for(global, &["train"])?;
    }
    let found: Verified = run_one(global, |config| ShardsJob::Verify {
        location: location.to_owned(),
        epochs,
        world_sizes: if world_sizes.is_empty() { vec![1] } else { world_sizes },
        global_batch: config.train.global_batch,
        seed: config.train.seed,
        config: config.shards.clone(),
    })?;
    if let Some(first) = found.problems.first() {
        let lines: Vec<&str> = found.problems.iter().map(|problem| problem.message.as_str()).collect();
        let code = ExitCode::from_code(first.exit_code.into()).unwrap_or(ExitCode::Internal);
        let text = format!("{location}: {} problems:\n  {}", lines.len(), lines.join("\n  "));
        return Err(LaunchError::new(code, text).into());
    }
    let checksums = if found.manifest { "all checksums match" } else { "no manifest, so there are no checksums" };
    let usable = match &found.skipped {
        None => "all values are valid".to_owned(),
        Some(skipped) => format!("all other values are valid; {skipped}"),
    };
    let without = coordinates_note(found.rows, found.rows_with_coordinates);
    output.print(&format!(
        "{location}: {} rows{without} in {} files with {} row groups, width {}, {} views: {checksums}, {usable}",
        found.rows, found.files, found.row_groups, found.width, found.views,
    ));
    if let Some(plan) = &found.plan {
        let coverage = epoch_coverage(plan);
        for size in &plan.world_sizes {
            output.print(&format!(
                "{} workers, {} epochs, {} steps per epoch, {} rows per step: {coverage}; order {}",
                size.workers, plan.epochs, plan.steps_per_epoch, plan.global_batch, size.order,
            ));
        }
    }
    Ok(serde_json::to_value(found)?)
}

/// Says how many rows have coordinates. Empty if all of them have some.
fn coordinates_note(rows: u64, with_coordinates: u64) -> String {
    match with_coordinates {
        0 => " without coordinates".to_owned(),
        some if some < rows => format!(" ({some} with coordinates)"),
        _ => String::new(),
    }
}

/// Describes how often each row occurs in an epoch.
fn epoch_coverage(plan: &ReplayReport) -> String {
    let rows = plan.rows;
    if let Some(quota_max) = plan.quota_max {
        let tail = match (plan.dropped_rows, plan.padded_rows) {
            (0, 0) => String::new(),
            (0, padded) => format!("; {padded} rows are repeated to fill the last batch"),
            (dropped, _) => format!("; {dropped} of {rows} occurrences are left out, because they do not fill a batch"),
        };
        return format!("each row as often as its quota, at most {quota_max} times per epoch{tail}");
    }
    match (plan.dropped_rows, plan.padded_rows) {
        (0, 0) => "each row once per epoch".to_owned(),
        (0, padded) => format!("each row once per epoch, but {padded} of {rows} rows twice, to fill the last batch"),
        (dropped, _) => {
            format!("no row twice in an epoch; {dropped} of {rows} rows are left out, because they do not fill a batch")
        }
    }
}

/// `shards inspect`: prints statistics and a map.
fn inspect(location: &str, global: &Global, output: Output) -> anyhow::Result<Value> {
    require_shards("PATH of `shards inspect`", location)?;
    let found: Inspection =
        run_one(global, |config| ShardsJob::Inspect { location: location.to_owned(), config: config.shards.clone() })?;
    let range = |(low, high): (f64, f64)| format!("{low:.4} to {high:.4}");
    let has_places = found.rows_with_coordinates > 0;
    let degrees = |found: (f64, f64)| if has_places { range(found) } else { "none".to_owned() };
    let skipped = found.skipped.as_ref().map(|skipped| format!("; {skipped}")).unwrap_or_default();
    let (fewest, most) = found.row_group_rows;
    let image_head = match found.image_head {
        Some(ImageHead::Geoclip) => "geoclip",
        Some(ImageHead::Linear) => "linear",
        Some(ImageHead::Trained) => "trained",
        Some(ImageHead::None) | None => "unknown",
    };
    let columns: Vec<String> = found.columns.iter().map(|(what, name)| format!("{what} = {name}")).collect();
    let lines = [
        ("rows", format!("{}{}{skipped}", found.rows, coordinates_note(found.rows, found.rows_with_coordinates))),
        ("files", found.files.to_string()),
        ("row groups", format!("{}, with {fewest} to {most} rows each", found.row_groups)),
        ("columns", columns.join(", ")),
        ("width, views", format!("{}, {}", found.width, found.views)),
        ("latitude", degrees(found.latitudes)),
        ("longitude", degrees(found.longitudes)),
        ("mean", format!("{} over the dimensions", range(found.means))),
        ("deviation", format!("{} over the dimensions", range(found.standard_deviations))),
        ("fingerprint", found.fingerprint.clone()),
        ("source", found.source.clone().unwrap_or_else(|| "unknown".to_owned())),
        ("image head", image_head.to_owned()),
    ];
    lines.iter().for_each(|(name, value)| output.print(&wrapped(&format!("{name:<14}{value}"), 14, width())));
    if has_places {
        output.print("map (a denser character stands for more rows):");
        found.map.iter().for_each(|line| output.print(&format!("|{line}|")));
    }
    ok(&found)
}

/// `bench shards`: compares the reading speeds of LocDiff and pyarrow on one core.
pub(super) fn bench(python: Option<PathBuf>, global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = super::plan(global)?;
    let job = Job::Shards(Box::new(ShardsJob::Bench { python }));
    let found: ShardsBenched = super::run_gang(&resolved, &world.first_worker_only(cores()), job)?.first()?;
    output.print(&format!("pyarrow: {}", found.peer.as_deref().unwrap_or("not found, so there is no comparison")));
    output.print(&format!("{:<44} {:>8} {:>8} {:>6}", "case", "GB/s", "pyarrow", "ratio"));
    for row in &found.rows {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let (theirs, ratio) = (number(row.pyarrow_gb_per_s), number(row.ratio));
        output.print(&format!("{:<44} {:>8.2} {theirs:>8} {ratio:>6}", row.case, row.gb_per_s));
    }
    ok(&found)
}

/// Prints the result of `shards simulate` or `shards build`.
fn print_made(made: &ShardsMade, output: Output) -> anyhow::Result<Value> {
    let left_out = match made.skipped {
        0 => String::new(),
        skipped => format!("; left out {skipped} invalid rows"),
    };
    output.print(&format!(
        "{} rows of {} x {} numbers in {}, {:.1} s{left_out}",
        made.rows,
        made.views,
        made.width,
        made.out.display(),
        made.seconds
    ));
    ok(made)
}

/// Runs a job on one worker. The worker uses the first GPU if the machine has one and the configuration allows it, else
/// the CPU. The worker also uses all cores, because it is the only worker. The results do not depend on the number of
/// cores.
pub(super) fn run_one<T: TypedResult>(global: &Global, job: impl FnOnce(&RunConfig) -> ShardsJob) -> anyhow::Result<T> {
    let (resolved, world) = resolved_workers(global)?;
    let job = Job::Shards(Box::new(job(&resolved.config)));
    super::run_repeatable(&resolved, &world.first_worker_only(cores()), &job)?.first()
}

fn resolved_workers(global: &Global) -> anyhow::Result<(Resolved, NodeWorkers)> {
    let resolved = super::resolve_for(global, &["shards", "retrieval", "parallel", "supervise", "network"])?;
    let world = super::workers(global, &resolved)?;
    Ok((resolved, world))
}
