//! `demo`: runs everything from data to evaluation, with a model that is small enough for two CPU cores.
//!
//! Imports GeoCLIP's weights, divides the places of its gallery into training, validation and test places, simulates
//! photos there in world 2, trains GeoCLIP's image head and LocDiff on them, and evaluates (`eval.after_train`). LocDiff-H
//! is tuned on the validation photos and evaluated on the test photos.

use std::path::Path;

use locdiff_core::config::{self, Layer, Resolved, RetrievalHead, RunConfig};
use locdiff_core::protocol::{CellPart, SimulatedWorld};
use locdiff_core::tables::PartShare;
use serde_json::{Value, json};

use super::{geoclip, shards, train};
use crate::cli::{GeoclipVerb, Global, ShardsVerb};
use crate::error::{LaunchError, refuse};
use crate::gpus::{self, Inventory};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::newest_whole;

/// Folder of the tables that list the training, validation and test places. Demos of earlier versions, which simulated
/// photos at other places or in world 1, had another folder, so their photos are refused.
const PLACES: &str = "shards/demo/places-thinned";
/// Places in the same cell are in the same part. Cells are about 11 km wide and high.
const CELL_DEGREES: f64 = 0.1;
/// The parts of the places, with their shares.
const PARTS: [(&str, f64); 3] = [("train", 0.9), ("validation", 0.05), ("test", 0.05)];
/// Validation and test photos are at one place of each occupied cell of this height. Otherwise, a few city centres with
/// hundreds of places would decide the accuracy within 1 km.
const THINNING_DEGREES: f64 = 0.02;
/// Number of training photos. With this many photos, the model does not overfit during the short training of the demo.
const TRAIN_ROWS: u64 = 60_000;
/// Number of validation photos, for the evaluations during training and for tuning LocDiff-H. Tuning takes 40 ms for
/// each photo.
const VALIDATION_ROWS: u64 = 1500;
/// Number of test photos, for the evaluation after training. With fewer photos, chance decides small differences.
const TEST_ROWS: u64 = 2000;
/// Number of views of each validation and test photo. It equals the default of `eval.samples`, so each sample uses a
/// different view.
const VIEWS: u32 = 16;

/// The places of the demo's photos are points of the gallery. Retrieval must not find a photo's own place there.
const OWN_PLACE: &str = "eval.exclude_km=0.01";

/// Factor of the similarities in the second round of LocDiff-H, which matters mostly at 1 and 25 km. It was chosen on
/// 4,000 other photos at the validation places: too few of the demo's own validation photos are located within 1 km.
const FINE_SCALE: &str = "retrieval.fine_scale=16";

/// Name of the run that trains GeoCLIP's image head.
const HEAD_RUN: &str = "demo-head";
/// Steps of the training of the head. They take about 25 seconds on two CPU cores.
const HEAD_STEPS: u64 = 750;
/// The largest batch of the training of the head, and the number of wrong answers in a step.
const HEAD_BATCH: u32 = 512;

/// Imports GeoCLIP, simulates photos and trains the head if their folders are missing, then trains a run and evaluates
/// it. Resumes the run that `--run` names, if it exists. Without `--run`, resumes an unfinished run with the same
/// configuration, such as an interrupted demo.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    // If the training of the head is interrupted, it tells the user to resume with `--run demo-head demo`.
    let is_resumed_head = global.run.as_deref() == Some(HEAD_RUN);
    let run = global.run.clone().filter(|_| !is_resumed_head);
    let set = [OWN_PLACE, FINE_SCALE].map(str::to_owned).into_iter().chain(global.set.iter().cloned()).collect();
    let global = &Global { run, set, ..global.clone() };
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
        let head = Path::new(&config.checkpoint.dir).join(HEAD_RUN);
        let mut made = all.into_iter().map(Path::new).chain([head.as_path()]);
        if let Some(old) = made.find(|path| path.exists()) {
            refuse!(
                Exists,
                "{} exists, but lists of the demo's places are missing in {PLACES}, so another version may have made \
                 it; delete shards/demo and {}",
                old.display(),
                head.display()
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
        (&config.shards.train, TRAIN_ROWS, 1, 1, None),
        (&config.shards.validation, VALIDATION_ROWS, 2, VIEWS, Some(THINNING_DEGREES)),
        (&config.shards.test, TEST_ROWS, 3, VIEWS, Some(THINNING_DEGREES)),
    ];
    for ((out, rows, seed, views, cells), table) in sets.into_iter().zip(tables) {
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
            cells,
            held_out: 0.0,
            part: cells.map(|_| CellPart::Thinned),
            rows_per_file: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    // Other training photos than the demo's own may need another head.
    let own = config::load(&[Layer::Preset("demo".into())]).map_err(LaunchError::from)?.config;
    if config.retrieval.wanted_head() == RetrievalHead::Auto && config.shards.train == own.shards.train {
        train_head(config, world.slots.len() as u32, &inventory, output)?;
        resolved.config.retrieval.run = HEAD_RUN.to_owned();
    }
    output.print(&format!("training LocDiff with {} workers ...", world.slots.len()));
    let choice = train::RunChoice { prefix: "demo".to_owned(), is_new: false };
    let trained = train::run_resolved(&resolved, &world, Vec::new(), &choice, output)?;
    Ok(json!({ "ok": true, "train": trained }))
}

/// Trains GeoCLIP's image head on the training photos, unless an earlier demo has trained it.
fn train_head(demo: &RunConfig, workers: u32, inventory: &Inventory, output: Output) -> anyhow::Result<()> {
    let folder = Path::new(&demo.checkpoint.dir).join(HEAD_RUN);
    if newest_whole(&folder).is_ok_and(|(checkpoint, _)| checkpoint.manifest.step >= HEAD_STEPS) {
        output.print(&format!("{} already exists", folder.display()));
        return Ok(());
    }
    output.print("training GeoCLIP's image head ...");
    let head = head_configuration(demo, workers)?;
    let world = NodeWorkers::plan(&head.config, inventory)?;
    let choice = train::RunChoice { prefix: HEAD_RUN.to_owned(), is_new: false };
    train::run_resolved(&head, &world, Vec::new(), &choice, output).map(drop)
}

/// The configuration of the training of the head. The data and the workers are those of the demo. Other settings of the
/// demo, such as `train.steps`, do not apply, so all demos in a folder share one head.
fn head_configuration(demo: &RunConfig, workers: u32) -> Result<Resolved, LaunchError> {
    let mut resolved = config::load(&[Layer::Preset("geoclip".into())])?;
    let head = &mut resolved.config;
    (head.shards, head.parallel, head.supervise) = (demo.shards.clone(), demo.parallel.clone(), demo.supervise.clone());
    (head.network, head.retrieval.geoclip) = (demo.network.clone(), demo.retrieval.geoclip.clone());
    (head.checkpoint.dir, head.checkpoint.run) = (demo.checkpoint.dir.clone(), HEAD_RUN.to_owned());
    head.parallel.tensor = 1;
    (head.train.steps, head.eval.every, head.loss.negatives) = (HEAD_STEPS, 0, HEAD_BATCH);
    head.train.global_batch = (HEAD_BATCH - HEAD_BATCH % workers).max(workers);
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::TrainMethod;

    use super::*;

    /// The head is trained on the data of the demo and with its workers, whatever else the demo's settings say.
    #[test]
    fn head_is_trained_on_the_data_and_with_the_workers_of_the_demo() {
        let set = ["train.steps=7", "train.global_batch=510", "shards.embedding_column=clip", "parallel.tensor=2"];
        let layers = [Layer::Preset("demo".into())].into_iter().chain(set.map(|text| Layer::Set(text.into())));
        let demo = config::load(&layers.collect::<Vec<_>>()).expect("the configuration is valid").config;
        for (workers, batch) in [(1, 512), (2, 512), (3, 510), (600, 600)] {
            let head = head_configuration(&demo, workers).expect("the preset is valid").config;
            assert_eq!((head.train.global_batch, head.train.steps), (batch, HEAD_STEPS), "{workers} workers");
            assert_eq!((head.train.method, head.parallel.tensor), (TrainMethod::Geoclip, 1));
            assert_eq!((head.shards, head.checkpoint.run.as_str()), (demo.shards.clone(), HEAD_RUN));
        }
    }
}
