//! `demo`: runs everything from data to evaluation, with a model that is small enough for two CPU cores.
//!
//! Imports GeoCLIP's weights, divides the places of its gallery into training, validation and test places, simulates
//! photos there, trains an image head for retrieval, trains LocDiff, and evaluates (`eval.after_train`). LocDiff-H is
//! tuned on the validation photos and evaluated on the test photos.

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, Layer, Resolved};
use locdiff_core::protocol::SimulatedWorld;
use locdiff_core::tables::PartShare;
use serde_json::{Value, json};

use super::{geoclip, shards, train};
use crate::cli::{GeoclipVerb, Global, ShardsVerb};
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;

/// Folder of the tables with the training, validation and test places.
const PLACES: &str = "shards/demo/places";
/// Places in the same cell are in the same part. Cells are about 11 km wide and high.
const CELL_DEGREES: f64 = 0.1;
/// The settings of the training of the image head, over those of the preset `geoclip`.
const HEAD_SETTINGS: [&str; 6] = [
    "train.steps=350",
    "train.global_batch=512",
    "loss.negatives=1536",
    "train.histogram_every=0",
    "checkpoint.every=350",
    "eval.every=0",
];
/// Number of training photos. With this many photos, the model does not overfit during the short training of the demo.
const TRAIN_ROWS: u64 = 60_000;
/// Number of validation photos, for the evaluations during training and for tuning LocDiff-H.
const VALIDATION_ROWS: u64 = 1000;
/// Number of test photos, for the evaluation after training.
const TEST_ROWS: u64 = 1000;
/// Number of views of each validation and test photo. It equals the default of `eval.samples`, so each sample uses a
/// different view.
const VIEWS: u32 = 16;

/// Imports GeoCLIP and simulates photos if their folders are missing, then trains a run and evaluates it. Resumes the
/// run that `--run` names, if it exists. Without `--run`, resumes an unfinished run with the same configuration, such
/// as an interrupted demo.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = config::load(&global.layers("demo")).map_err(LaunchError::from)?;
    let world = NodeWorkers::plan(&resolved.config, &inventory)?;
    let config = &resolved.config;
    if !Path::new(&config.retrieval.geoclip).exists() {
        output.print("importing GeoCLIP's weights and gallery ...");
        geoclip::run(&GeoclipVerb::Import { wheel: None, out: None, overwrite: false }, global, output)?;
    }
    if !Path::new(PLACES).exists() {
        output.print("dividing the places of GeoCLIP's gallery into training, validation and test places ...");
        let part = |(name, share): (&str, f64)| PartShare { name: name.to_owned(), share };
        let verb = ShardsVerb::Split {
            table: Path::new(&config.retrieval.geoclip).join("gallery.csv"),
            out: PLACES.into(),
            parts: [("train", 0.92), ("validation", 0.04), ("test", 0.04)].map(part).to_vec(),
            cell_degrees: CELL_DEGREES,
            seed: 0,
            author_column: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    let sets = [
        (&config.shards.train, "train", TRAIN_ROWS, 1, 1),
        (&config.shards.validation, "validation", VALIDATION_ROWS, 2, VIEWS),
        (&config.shards.test, "test", TEST_ROWS, 3, VIEWS),
    ];
    for (out, part, rows, seed, views) in sets {
        if Path::new(out).exists() {
            output.print(&format!("{out} already exists"));
            continue;
        }
        output.print(&format!("simulating {rows} photos in {out} ..."));
        let verb = ShardsVerb::Simulate {
            world: SimulatedWorld::Two,
            rows: Some(rows),
            seed,
            out: out.into(),
            views,
            coordinates: Some(PathBuf::from(PLACES).join(part).with_extension("csv")),
            cells: None,
            held_out: 0.0,
            part: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    let (head, head_name) = head_settings(global, &resolved)?;
    output.print(&format!("training an image head for retrieval (run {head_name}) ..."));
    let new_run = |prefix: &str| train::RunChoice { prefix: prefix.to_owned(), is_new: false };
    train::run_resolved(&head, &world, Vec::new(), &new_run(&head_name), output)?;
    output.print(&format!("training with {} workers ...", world.slots.len()));
    let mut layers = global.layers("demo");
    layers.push(Layer::Set(format!("retrieval.run={head_name}")));
    let with_head = config::load(&layers).map_err(LaunchError::from)?;
    let trained = train::run_resolved(&with_head, &world, Vec::new(), &new_run("demo"), output)?;
    Ok(json!({ "ok": true, "train": trained }))
}

/// The configuration of the image head's training, and the name of its run. The head is trained on the photos of the
/// demo, and flags such as `--set train.steps` apply to it too.
fn head_settings(global: &Global, demo: &Resolved) -> Result<(Resolved, String), LaunchError> {
    let (shards, run) = (&demo.config.shards, &demo.config.checkpoint.run);
    let name = format!("{}-head", if run.is_empty() { "demo" } else { run });
    let mut layers = global.layers_over(Layer::Preset("geoclip".to_owned()));
    let own = HEAD_SETTINGS.map(str::to_owned).into_iter().chain([format!("shards.train={}", shards.train)]);
    layers.splice(1..1, own.map(Layer::Set));
    layers.push(Layer::Set(format!("checkpoint.run={name}")));
    Ok((config::load(&layers)?, name))
}
