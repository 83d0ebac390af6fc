//! `demo`: runs everything from data to evaluation, with a model that is small enough for two CPU cores.
//!
//! Imports GeoCLIP's weights, divides the places of its gallery into training, validation and test places, simulates
//! photos there in world 2, trains GeoCLIP's image head and LocDiff on them, and evaluates (`eval.after_train`). LocDiff-H
//! is tuned on the validation photos and evaluated on the test photos.

use std::path::Path;

use locdiff_core::config::{self, RetrievalHead, RunConfig};
use locdiff_core::protocol::SimulatedWorld;
use locdiff_core::tables::PartShare;
use serde_json::{Value, json};

use super::{geoclip, shards, train};
use crate::cli::{GeoclipVerb, Global, ShardsVerb};
use crate::error::{LaunchError, refuse};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;

/// Folder of the tables that list the training, validation and test places.
const PLACES: &str = "shards/demo/places";
/// Places in the same cell are in the same part. Cells are about 11 km wide and high.
const CELL_DEGREES: f64 = 0.1;
/// The parts of the places, with their shares.
const PARTS: [(&str, f64); 3] = [("train", 0.92), ("validation", 0.04), ("test", 0.04)];
/// Number of training photos. With this many photos, the model does not overfit during the short training of the demo.
const TRAIN_ROWS: u64 = 60_000;
/// Number of validation photos, for the evaluations during training and for tuning LocDiff-H.
const VALIDATION_ROWS: u64 = 1000;
/// Number of test photos, for the evaluation after training.
const TEST_ROWS: u64 = 1000;
/// Number of views of each validation and test photo. It equals the default of `eval.samples`, so each sample uses a
/// different view.
const VIEWS: u32 = 16;

/// Name of the run that trains GeoCLIP's image head.
const HEAD_RUN: &str = "demo-head";
/// The training of the head. It takes seconds on two CPU cores.
const HEAD_SETTINGS: [&str; 3] = ["train.steps=300", "train.global_batch=512", "loss.negatives=512"];

/// Imports GeoCLIP and simulates photos if their folders are missing, then trains a run and evaluates it. Resumes the
/// run that `--run` names, if it exists. Without `--run`, resumes an unfinished run with the same configuration, such
/// as an interrupted demo.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let mut resolved = config::load(&global.layers("demo")).map_err(LaunchError::from)?;
    let world = NodeWorkers::plan(&resolved.config, &inventory)?;
    let config = &resolved.config;
    if !Path::new(&config.retrieval.geoclip).exists() {
        output.print("importing GeoCLIP's weights and gallery ...");
        geoclip::run(&GeoclipVerb::Import { wheel: None, out: None, overwrite: false }, global, output)?;
    }
    let tables = PARTS.map(|(part, _)| Path::new(PLACES).join(part).with_extension("csv"));
    let all = [&config.shards.train, &config.shards.validation, &config.shards.test];
    if !tables.iter().all(|table| table.exists()) {
        if let Some(old) = all.into_iter().find(|shards| Path::new(shards).exists()) {
            refuse!(
                Exists,
                "{old} exists, but lists of the demo's places are missing in {PLACES}, so the photos may show other \
                 places; delete shards/demo"
            );
        }
        output.print("dividing the places of GeoCLIP's gallery into training, validation and test places ...");
        let verb = ShardsVerb::Split {
            table: Path::new(&config.retrieval.geoclip).join("gallery.csv"),
            out: PLACES.into(),
            parts: PARTS.map(|(name, share)| PartShare { name: name.to_owned(), share }).to_vec(),
            cell_degrees: CELL_DEGREES,
            seed: 0,
            author_column: None,
            overwrite: true,
        };
        shards::run(&verb, global, output)?;
    }
    let sets = [
        (&config.shards.train, TRAIN_ROWS, 1, 1),
        (&config.shards.validation, VALIDATION_ROWS, 2, VIEWS),
        (&config.shards.test, TEST_ROWS, 3, VIEWS),
    ];
    for ((out, rows, seed, views), table) in sets.into_iter().zip(tables) {
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
            coordinates: Some(table),
            cells: None,
            held_out: 0.0,
            part: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    if config.retrieval.wanted_head() == RetrievalHead::Auto {
        train_head(global, config, &world, output)?;
        resolved.config.retrieval.run = HEAD_RUN.to_owned();
    }
    output.print(&format!("training LocDiff with {} workers ...", world.slots.len()));
    let choice = train::RunChoice { prefix: "demo".to_owned(), is_new: false };
    let trained = train::run_resolved(&resolved, &world, Vec::new(), &choice, output)?;
    Ok(json!({ "ok": true, "train": trained }))
}

/// Trains GeoCLIP's image head on the training photos. The settings of the demo, such as `--set`, do not apply to it, so
/// all demos in a folder share one head.
fn train_head(global: &Global, demo: &RunConfig, world: &NodeWorkers, output: Output) -> anyhow::Result<()> {
    let mut settings = HEAD_SETTINGS.map(str::to_owned).to_vec();
    settings.push(format!("shards.train={}", demo.shards.train));
    settings.push(format!("checkpoint.dir={}", demo.checkpoint.dir));
    settings.push(format!("retrieval.geoclip={}", demo.retrieval.geoclip));
    let global = Global { config: Vec::new(), set: settings, run: Some(HEAD_RUN.to_owned()), ..global.clone() };
    let head = config::load(&global.layers("geoclip")).map_err(LaunchError::from)?;
    output.print("training GeoCLIP's image head ...");
    let choice = train::RunChoice { prefix: HEAD_RUN.to_owned(), is_new: false };
    train::run_resolved(&head, world, Vec::new(), &choice, output).map(drop)
}
