//! With weights, each row comes as often as its quota, for any number of workers and after resuming at any step.

use std::collections::HashMap;

use locdiff::shards::{
    DataLayout, Mask, Plan, PlanOptions, Position, Replay, RowWeights, Sample, ShardsError, Share, WeightsMark,
};
use locdiff_core::config::{ShardsConfig, Tail};
use locdiff_core::exit_code::HasExitCode;
use proptest::prelude::*;

use crate::shards::memory::Memory;

fn config(density_alpha: f64, tail: Tail) -> ShardsConfig {
    ShardsConfig { density_alpha, tail, shuffle_row_groups: 3, ..ShardsConfig::default() }
}

fn layout(block_rows: &[u32], views: u32) -> DataLayout {
    DataLayout { block_rows: block_rows.to_vec(), width: 4, views, fingerprint: 1 }
}

/// Cells of `rows` rows. Cell c has about 2c + 1 of every 1009 rows, spread over the data.
fn cells(rows: u64) -> Vec<u64> {
    (0..rows).map(|row| ((row * 7919 % 1009) as f64).sqrt() as u64).collect()
}

fn plan(block_rows: &[u32], views: u32, config: &ShardsConfig, (seed, batch): (u64, u32)) -> Plan {
    let rows = block_rows.iter().map(|rows| u64::from(*rows)).sum();
    let weights = RowWeights::new(&cells(rows), config).expect("there are fewer than 2^32 rows");
    let options = PlanOptions::new(config, seed, batch);
    Plan::weighted(layout(block_rows, views), Mask::none(), options, Some(weights)).expect("the plan is valid")
}

fn epoch(plan: &Plan, number: u64) -> Vec<Sample> {
    let epoch = plan.epoch(number).expect("the epoch is in range");
    epoch.samples(0..plan.indices()).map(|row| row.expect("the epoch is in range")).collect()
}

#[test]
fn rows_come_in_proportion_to_the_density_to_the_power_of_minus_alpha() {
    const EPOCHS: u64 = 60;
    let block_rows = [300, 7, 0, 200, 93];
    for alpha in [0.3, 0.5, 1.0] {
        let plan = plan(&block_rows, 1, &config(alpha, Tail::Drop), (3, 1));
        let cells = cells(600);
        let raw = cells.iter().map(|cell| (cells.iter().filter(|other| *other == cell).count() as f64).powf(-alpha));
        let raw: Vec<f64> = raw.collect();
        let mean = raw.iter().sum::<f64>() / 600.0;
        let mut counts = vec![0.0; 600];
        let first = [0, 300, 307, 307, 507];
        for number in 0..EPOCHS {
            let mut quotas = vec![0.0; 600];
            let samples = epoch(&plan, number);
            assert_eq!(samples.len(), 600, "an epoch has as many indices as rows");
            samples.iter().for_each(|sample| quotas[first[sample.block as usize] + sample.row as usize] += 1.0);
            for ((quota, raw), count) in quotas.iter().zip(&raw).zip(&mut counts) {
                let weight = raw / mean;
                assert!((quota - weight).abs() < 1.0 + 1e-6, "a row of weight {weight} comes {quota} times");
                *count += quota;
            }
        }
        // The shifts of consecutive epochs are spread so evenly that the sum of the quotas is within 2 of its mean.
        for (count, raw) in counts.iter().zip(&raw) {
            let wanted = raw / mean * EPOCHS as f64;
            assert!((count - wanted).abs() < 2.0, "a row comes {count} times in {EPOCHS} epochs, wanted {wanted:.2}");
        }
    }
}

#[test]
fn equal_weights_keep_the_order_of_rows() {
    let block_rows = [40, 0, 33, 17, 60];
    let config = config(0.7, Tail::Pad);
    let options = PlanOptions::new(&config, 9, 32);
    let uniform = Plan::new(layout(&block_rows, 2), Mask::none(), options.clone()).expect("the plan is valid");
    // Every cell has two rows.
    let cells: Vec<u64> = (0..150).map(|row| row % 75).collect();
    let weights = RowWeights::new(&cells, &config).expect("there are fewer than 2^32 rows");
    let weighted =
        Plan::weighted(layout(&block_rows, 2), Mask::none(), options, Some(weights)).expect("the plan is valid");
    (0..5).for_each(|number| assert_eq!(epoch(&weighted, number), epoch(&uniform, number)));
}

/// If the order of rows changed between versions of this program, a resumed run would repeat some rows and miss others.
#[test]
fn order_of_weighted_rows_never_changes() {
    let plan = plan(&[50, 30, 0, 70, 40], 3, &config(0.5, Tail::Pad), (42, 64));
    let replay = Replay { epochs: 4, world_sizes: vec![2], global_batch: 64, seed: 42 };
    let report = replay.run_plan(&plan).expect("the plan has each row as often as its quota");
    assert_eq!((report.world_sizes[0].order.as_str(), report.quota_max), ("a94f4b6b127eaa18", Some(3)));
}

/// The rows of all workers in one step, in the order of the workers.
fn step(plan: &Plan, position: Position, workers: u32) -> Vec<Sample> {
    let epoch = plan.epoch(position.epoch).expect("the epoch is in range");
    let slice = |worker| plan.slice(Share { worker, workers }).expect("there are at most as many workers as rows");
    let rows = (0..workers).flat_map(|worker| epoch.step(position.step, &slice(worker)).collect::<Vec<_>>());
    rows.map(|row| row.expect("the epoch is in range")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// The replay checks the quotas and the views. This test also checks that any step can be computed by itself, and
    /// that the copies of a row use successive views.
    #[test]
    fn each_row_comes_as_often_as_its_quota_for_any_number_of_workers(
        block_rows in prop::collection::vec(0_u32..40, 1..20),
        (views, alpha, seed) in (1_u32..4, 0.01_f64..=1.0, any::<u64>()),
        (batch, pad, number) in (4_u32..60, any::<bool>(), 0_u64..3),
    ) {
        let tail = if pad { Tail::Pad } else { Tail::Drop };
        let config = config(alpha, tail);
        let memory = Memory::new(&block_rows, 4, views);
        let bad = (0..).zip(&block_rows).filter(|(_, rows)| **rows > 5).map(|(block, rows)| (block, vec![0, rows / 2]));
        let mask = Mask::new(bad.collect(), &block_rows).expect("the skipped rows exist");
        let weights = RowWeights::for_config(&memory, &mask, &config).expect("the blocks can be read");
        let options = PlanOptions::new(&config, seed, batch);
        let Ok(plan) = Plan::weighted(memory.layout.clone(), mask, options, weights) else { return Ok(()) };
        prop_assert!(plan.weights().is_some());
        let replay = Replay { epochs: 3, world_sizes: vec![1, 3, 4], global_batch: batch, seed };
        replay.run_plan(&plan).expect("the plan has each row as often as its quota");
        let all = epoch(&plan, number);
        for (at, rows) in all.chunks(batch as usize).enumerate() {
            let position = Position { epoch: number, step: at as u64, ..plan.start() };
            prop_assert_eq!(step(&plan, position, 1 + at as u32 % 4), rows);
        }
        if plan.dropped_rows() == 0 {
            let mut used: HashMap<(u32, u32), Vec<u32>> = HashMap::new();
            let rows = &all[..plan.rows() as usize];
            rows.iter().for_each(|sample| used.entry((sample.block, sample.row)).or_default().push(sample.view));
            for used in used.values() {
                let times = |view| used.iter().filter(|other| **other == view).count();
                let counts: Vec<usize> = (0..views).map(times).collect();
                let spread = counts.iter().max().zip(counts.iter().min()).map(|(high, low)| high - low);
                prop_assert!(spread <= Some(1), "the copies of a row use its views {:?} times", counts);
            }
        }
    }
}

#[test]
fn bookmark_resumes_only_with_its_weights() {
    let start = config(0.5, Tail::Drop);
    let mark = |config: &ShardsConfig| {
        let plan = plan(&[100; 10], 2, config, (1, 64));
        let text = serde_json::to_string(&plan.bookmark(Position { epoch: 3, step: 7, ..plan.start() }));
        (plan, text.expect("the value can be written as JSON"))
    };
    let (plan, text) = mark(&start);
    let bookmark = serde_json::from_str(&text).expect("the JSON was just written");
    assert_eq!(plan.resume(&bookmark, "shards/x").expect("nothing has changed").step, 7);
    for (other, wanted) in [
        (config(0.0, Tail::Drop), "shards.density_alpha is 0, but the resumed run began with 0.5"),
        (config(0.6, Tail::Drop), "shards.density_alpha is 0.6, but the resumed run began with 0.5"),
        (
            ShardsConfig { density_cell_degrees: 2.0, ..start.clone() },
            "shards.density_cell_degrees is 2, but the resumed run began with 1",
        ),
    ] {
        let other = match other.density_alpha {
            0.0 => Plan::new(layout(&[100; 10], 2), Mask::none(), PlanOptions::new(&other, 1, 64)),
            _ => Ok(mark(&other).0),
        };
        let error = other.expect("the plan is valid").resume(&bookmark, "shards/x").expect_err("a setting differs");
        assert!(error.to_string().starts_with(wanted) && error.exit_code().code() == 10, "{error}");
    }
    let mut changed = bookmark.clone();
    changed.weights = changed.weights.map(|weights| WeightsMark { digest: "0".repeat(16), ..weights });
    let error = plan.resume(&changed, "shards/x").expect_err("the weights differ");
    assert!(matches!(error, ShardsError::Changed { .. }) && error.to_string().contains("the weights of its rows"));
    // A checkpoint of a version without weights has no such field.
    let uniform = Plan::new(layout(&[100; 10], 2), Mask::none(), PlanOptions::new(&start, 1, 64)).expect("valid");
    let text = serde_json::to_string(&uniform.bookmark(uniform.start())).expect("the value can be written as JSON");
    let old = serde_json::from_str(&text.replace("\"weights\":null,", "")).expect("the field may be missing");
    uniform.resume(&old, "shards/x").expect("nothing has changed");
}

#[test]
fn without_alpha_no_coordinates_are_read() {
    let memory = Memory::new(&[0, 20, 30], 2, 1);
    let config = |density_alpha| ShardsConfig { density_alpha, density_cell_degrees: 0.9, ..ShardsConfig::default() };
    let weights = |alpha| RowWeights::for_config(&memory, &Mask::none(), &config(alpha));
    assert_eq!(weights(0.0).expect("nothing is read"), None);
    assert_eq!(memory.read_count(), 0);
    let found = weights(1.0).expect("the blocks can be read").expect("the weights differ");
    // Each block is one cell, and both cells come equally often: 25 times.
    let (low, high) = found.range();
    assert!((low - 25.0 / 30.0).abs() < 1e-6 && (high - 25.0 / 20.0).abs() < 1e-6, "weights from {low} to {high}");
    assert_eq!(RowWeights::from_bytes(&found.to_bytes(), &config(1.0)), found);
}
