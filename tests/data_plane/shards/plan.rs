//! The plan contains each usable row once per epoch, for any number of workers and after resuming at any step.

mod weights;

use std::collections::{BTreeMap, HashMap, HashSet};

use locdiff::shards::{
    Blocks, DataLayout, Mask, Plan, PlanOptions, Position, Replay, Sample, ShardsError, Share, WINDOW_BYTES_MAX,
};
use locdiff_core::config::{ShardsConfig, Tail};
use locdiff_core::exit_code::HasExitCode;
use proptest::prelude::*;

use crate::shards::memory::{Fault, Memory};

/// A data set, a configuration, a number of workers and an epoch.
#[derive(Debug, Clone)]
struct Case {
    layout: DataLayout,
    mask: Mask,
    options: PlanOptions,
    workers: u32,
    epoch: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let data = (prop::collection::vec(0_u32..40, 1..25), 1_u32..5, any::<u64>());
    let order = (any::<u64>(), 1_u32..60, prop_oneof![Just(Tail::Drop), Just(Tail::Pad)], 1_u32..7, 0_u64..4);
    let place = (1_u32..10, prop_oneof![0_u64..5, Just((1 << 40) - 1)]);
    (data, order, place).prop_map(|((block_rows, views, marks), order, (workers, epoch))| {
        let (seed, global_batch, tail, shuffle_row_groups, bound) = order;
        let skipped = (0..).zip(&block_rows).map(|(block, rows)| {
            let skips = |row: &u32| (marks >> ((block + row) % 64)) & (marks >> (row % 61)) & 1 == 1;
            (block, (0..*rows).filter(skips).collect())
        });
        let mask = Mask::new(skipped.collect(), &block_rows).expect("the rows are ascending");
        // A row takes 24 bytes, so a limit of 600 to 1800 bytes makes windows shorter. The limit `WINDOW_BYTES_MAX` is
        // too large to have an effect.
        let window_bytes_max = if bound == 0 { WINDOW_BYTES_MAX } else { bound * 600 };
        let options = PlanOptions { seed, global_batch, tail, shuffle_row_groups, window_bytes_max };
        Case { layout: DataLayout { block_rows, width: 4, views, fingerprint: 1 }, mask, options, workers, epoch }
    })
}

/// The rows of all workers in one step, in the order of the workers.
fn step(plan: &Plan, position: Position, workers: u32) -> Vec<Sample> {
    let epoch = plan.epoch(position.epoch).expect("the epoch is in range");
    let slices = (0..workers)
        .map(|worker| plan.slice(Share { worker, workers }).expect("there are at most as many workers as rows"));
    slices
        .flat_map(|slice| epoch.step(position.step, &slice).collect::<Vec<_>>())
        .map(|row| row.expect("the epoch is in range"))
        .collect()
}

/// The rows of a whole epoch, in order.
fn epoch(plan: &Plan, number: u64) -> Vec<Sample> {
    let epoch = plan.epoch(number).expect("the epoch is in range");
    epoch.samples(0..plan.indices()).map(|row| row.expect("the epoch is in range")).collect()
}

fn usable(case: &Case) -> HashSet<(u32, u32)> {
    let rows = (0..).zip(&case.layout.block_rows).flat_map(|(block, rows)| (0..*rows).map(move |row| (block, row)));
    rows.filter(|(block, row)| !case.mask.skipped(*block).contains(row)).collect()
}

/// Checks that an epoch has every usable row once, for any number of workers. With `Tail::Pad`, the first rows of the
/// epoch are repeated at its end to fill the last batch. With `Tail::Drop`, the rows that do not fill a batch are
/// missing.
fn whole_epochs(case: &Case) -> Result<(), TestCaseError> {
    let usable = usable(case);
    let (batch, rows) = (u64::from(case.options.global_batch), usable.len() as u64);
    let steps = if case.options.tail == Tail::Drop { rows / batch } else { rows.div_ceil(batch) };
    let plan = match Plan::new(case.layout.clone(), case.mask.clone(), case.options.clone()) {
        Ok(plan) => plan,
        Err(error) => {
            prop_assert!(steps == 0 && error.to_string().contains("do not fill one batch"), "wrong error: {}", error);
            return Ok(());
        }
    };
    prop_assert_eq!((plan.rows(), plan.steps()), (rows, steps));
    let all = epoch(&plan, case.epoch);
    prop_assert_eq!(all.len() as u64, steps * batch);
    let first = &all[..all.len().min(usable.len())];
    let different: HashSet<(u32, u32)> = first.iter().map(|sample| (sample.block, sample.row)).collect();
    prop_assert_eq!(different.len(), first.len(), "a row is in the epoch twice");
    prop_assert!(different.is_subset(&usable), "a skipped row is in the epoch");
    prop_assert_eq!(usable.len() as u64 - different.len() as u64, plan.dropped_rows());
    for (index, sample) in all[first.len()..].iter().enumerate() {
        prop_assert_eq!(*sample, all[index % usable.len()], "the padding differs from the start of the epoch");
    }
    let order = plan.epoch(case.epoch).expect("the epoch is in range");
    for index in (0..all.len()).step_by(7) {
        let alone = order.samples(index as u64..index as u64 + 1).next().expect("the range has one index");
        prop_assert_eq!(alone.expect("the epoch is in range"), all[index]);
    }
    several_workers(case, &plan, &all)?;
    views(case, &plan)
}

fn several_workers(case: &Case, plan: &Plan, all: &[Sample]) -> Result<(), TestCaseError> {
    let workers = case.workers.min(case.options.global_batch);
    let lengths: Vec<u64> = (0..workers)
        .map(|worker| plan.slice(Share { worker, workers }).expect("there are at most as many workers as rows"))
        .map(|slice| slice.end - slice.start)
        .collect();
    prop_assert!(
        lengths.iter().max().expect("there is at least one worker")
            - lengths.iter().min().expect("there is at least one worker")
            <= 1
    );
    // Starts in the middle of the epoch and reads four steps with varying numbers of workers. Steps beyond the end of
    // the epoch are not compared.
    let mut position = Position { epoch: case.epoch, step: plan.steps() / 2, ..plan.start() };
    let batch = case.options.global_batch as usize;
    for turn in 0..4 {
        if position.epoch == case.epoch {
            let wanted = &all[position.step as usize * batch..(position.step as usize + 1) * batch];
            prop_assert_eq!(step(plan, position, 1 + (workers + turn) % case.options.global_batch), wanted);
        }
        position = plan.after(position);
    }
    Ok(())
}

/// Checks as many consecutive epochs as there are views. No block may show the same view in two of these epochs.
fn views(case: &Case, plan: &Plan) -> Result<(), TestCaseError> {
    if case.epoch > 1000 {
        return Ok(());
    }
    let mut shown: HashMap<u32, HashSet<u32>> = HashMap::new();
    let mut seen: HashMap<u32, u32> = HashMap::new();
    for number in case.epoch..case.epoch + u64::from(case.layout.views) {
        let in_epoch: HashSet<(u32, u32)> = epoch(plan, number).iter().map(|row| (row.block, row.view)).collect();
        for (block, view) in in_epoch {
            prop_assert!(view < case.layout.views);
            shown.entry(block).or_default().insert(view);
            *seen.entry(block).or_default() += 1;
        }
    }
    for (block, views) in shown {
        // A block need not occur in every epoch, because an epoch may drop all rows of the block.
        prop_assert_eq!(views.len() as u32, seen[&block], "block {} shows a view twice", block);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_comes_once_per_epoch_for_any_number_of_workers(case in cases()) {
        whole_epochs(&case)?;
    }
}

fn plan(block_rows: &[u32], config: &ShardsConfig, seed: u64, global_batch: u32) -> Plan {
    let layout = DataLayout { block_rows: block_rows.to_vec(), ..LAYOUT };
    Plan::new(layout, Mask::none(), PlanOptions::new(config, seed, global_batch)).expect("the plan is valid")
}

#[test]
fn epochs_differ_and_look_random() {
    let plan = plan(&[512; 160], &ShardsConfig::default(), 3, 512);
    let (one, other) = (epoch(&plan, 0), epoch(&plan, 1));
    let row = |sample: &Sample| (sample.block, sample.row);
    let neighbours =
        |rows: &[Sample]| -> HashSet<_> { rows.windows(2).map(|pair| (row(&pair[0]), row(&pair[1]))).collect() };
    let kept = neighbours(&one).intersection(&neighbours(&other)).count();
    // An epoch has 81,919 pairs of neighbours. In the next epoch, about a tenth of these pairs are in the same window
    // again. Of those, one pair in 8192 are neighbours again, so about one such pair is expected.
    assert!(kept < 12, "{kept} pairs of neighbours are the same in both epochs");
    // A batch of 512 rows has rows of all 16 blocks of its window, and 32 rows of each block on average. A count of 8
    // is 4.4 standard deviations below the average.
    for batch in one.chunks(512) {
        let mut counts = BTreeMap::new();
        batch.iter().for_each(|sample| *counts.entry(sample.block).or_insert(0) += 1);
        assert_eq!(counts.len(), 16);
        assert!(
            counts.values().all(|count| (8..64).contains(count)),
            "the blocks of a batch have {counts:?} rows, wanted 8 to 63"
        );
    }
    // The first windows of the two epochs have few blocks in common.
    let window = |rows: &[Sample]| -> HashSet<u32> { rows[..16 * 512].iter().map(|sample| sample.block).collect() };
    assert!(window(&one).intersection(&window(&other)).count() < 9);
    // The blocks of one epoch show different views: 53 blocks per view are expected, with a standard deviation of 6.
    for view in 0..3 {
        let blocks: HashSet<u32> = one.iter().filter(|row| row.view == view).map(|row| row.block).collect();
        assert!((25..80).contains(&blocks.len()), "{} of 160 blocks show view {view}, wanted 25 to 79", blocks.len());
    }
    // The same seed gives the same order of rows, and another seed gives another order.
    let again = self::plan(&[512; 160], &ShardsConfig::default(), 3, 512);
    assert_eq!(epoch(&again, 1), other);
    assert_ne!(epoch(&self::plan(&[512; 160], &ShardsConfig::default(), 4, 512), 0)[..512], one[..512]);
}

/// If the order of rows changed between versions of this program, a resumed run would repeat some rows and miss others.
#[test]
fn order_of_rows_never_changes() {
    let plan = plan(&[5, 3, 0, 7, 4], &ShardsConfig { shuffle_row_groups: 2, ..ShardsConfig::default() }, 42, 4);
    let rows: Vec<_> = epoch(&plan, 1).iter().map(|sample| (sample.block, sample.row, sample.view)).collect();
    assert_eq!(rows[..9], GOLDEN, "the order of rows has changed to {rows:?}");
}

/// Like `order_of_rows_never_changes`, for a larger plan with skipped rows, padding, three views and several windows. A
/// hash of four epochs is compared.
#[test]
fn order_of_many_rows_never_changes() {
    let layout = DataLayout { block_rows: (0..90).map(|block| block * 37 % 61).collect(), ..LAYOUT };
    let skipped = (0..90).filter(|block| block % 5 == 0 && block * 37 % 61 > 3).map(|block| (block, vec![1, 2]));
    let mask = Mask::new(skipped.collect(), &layout.block_rows).expect("the skipped rows exist");
    let config = ShardsConfig { tail: Tail::Pad, ..ShardsConfig::default() };
    let plan = Plan::new(layout, mask, PlanOptions::new(&config, 2024, 100)).expect("the plan is valid");
    let replay = Replay { epochs: 4, world_sizes: vec![3], global_batch: 100, seed: 2024 };
    let report = replay.run_plan(&plan).expect("the plan has each row once");
    assert_eq!(report.world_sizes[0].order, "0fec41b609f327a3");
}

const LAYOUT: DataLayout = DataLayout { block_rows: Vec::new(), width: 768, views: 3, fingerprint: 9 };

const GOLDEN: [(u32, u32, u32); 9] =
    [(4, 1, 1), (1, 2, 1), (4, 0, 1), (1, 0, 1), (4, 3, 1), (1, 1, 1), (4, 2, 1), (0, 3, 1), (3, 4, 1)];

#[test]
fn bookmark_resumes_only_its_own_data() {
    let config = ShardsConfig::default();
    let plan = plan(&[100; 10], &config, 1, 64);
    let position = Position { epoch: 3, step: 7, ..plan.start() };
    let text = serde_json::to_string(&plan.bookmark(position)).expect("the value can be written as JSON");
    let bookmark = serde_json::from_str(&text).expect("the JSON was just written");
    assert_eq!(plan.resume(&bookmark, "shards/x").expect("the data has not changed"), position);
    let refused = |layout: DataLayout, mask: Mask, options: PlanOptions| -> ShardsError {
        let other = Plan::new(layout, mask, options).expect("the plan is valid");
        other.resume(&bookmark, "shards/x").expect_err("the data or the options differ")
    };
    let (layout, options) = (plan.layout().clone(), plan.options().clone());
    let error = refused(DataLayout { fingerprint: 10, ..layout.clone() }, Mask::none(), options.clone());
    assert_eq!(error.exit_code().code(), 23);
    let wanted = "shards/x: the data has changed since it was first opened: its fingerprint is 000000000000000a, \
        but the run began with data of fingerprint 0000000000000009; restore that data";
    assert!(error.to_string().starts_with(wanted), "{error}");
    let mask = Mask::new([(3, vec![5, 6])].into(), &layout.block_rows).expect("the skipped rows exist");
    let error = refused(layout.clone(), mask, options.clone());
    assert_eq!(error.exit_code().code(), 23);
    assert!(error.to_string().contains("2 rows are left out (digest "), "wrong error: {error}");
    assert!(error.to_string().ends_with("wanted 0 rows left out (digest 0000000000000000)"), "wrong error: {error}");
    for (other, field) in [
        (PlanOptions { seed: 2, ..options.clone() }, "train.seed is 2"),
        (PlanOptions { global_batch: 32, ..options.clone() }, "train.global_batch is 32"),
        (PlanOptions { tail: Tail::Pad, ..options.clone() }, "shards.tail is pad"),
        (PlanOptions { shuffle_row_groups: 8, ..options.clone() }, "shards.shuffle_row_groups is 8"),
    ] {
        let error = refused(layout.clone(), Mask::none(), other);
        assert!(
            error.to_string().contains(field) && error.exit_code().code() == 10,
            "wrong error or exit code: {error}"
        );
    }
    let beyond = plan.bookmark(Position { step: 15, ..position });
    let error = plan.resume(&beyond, "shards/x").expect_err("the epoch has no step 15").to_string();
    assert_eq!(error, "the position is step 15, but an epoch has only the steps 0 to 14");
    let error = plan.slice(Share { worker: 0, workers: 65 }).expect_err("there are more workers than rows").to_string();
    assert!(error.contains("65 workers cannot share a global batch of 64 rows"), "wrong error: {error}");
    assert!(plan.slice(Share { worker: 2, workers: 2 }).is_err());
}

#[test]
fn scan_names_the_bad_rows() {
    let mut memory = Memory::new(&[5, 0, 6, 4, 9, 9], 3, 2);
    memory.bad = [(0, 4), (2, 0), (2, 5), (4, 1), (5, 0)].into();
    let masks: Vec<Mask> =
        (1..5).map(|threads| Mask::scan(&memory, threads).expect("the blocks can be read")).collect();
    assert!(masks.windows(2).all(|pair| pair[0] == pair[1]), "the number of threads changes the mask");
    let mask = &masks[0];
    assert_eq!((mask.count(), mask.skipped(2), mask.skipped(3)), (5, &[0, 5][..], &[][..]));
    let text = mask.describe(&memory).expect("the mask skips rows");
    assert!(
        text.starts_with("5 of 33 rows are left out: memory.parquet: row group 0: column `embedding`: row 4: got NaN"),
        "wrong description: {text}"
    );
    assert!(
        text.contains("row group 2: column `embedding`: row 0: got NaN, wanted finite numbers (and 1 more in"),
        "wrong description: {text}"
    );
    assert!(text.ends_with("; ...") && !text.contains("row group 5"), "wrong description: {text}");
    memory.bad.remove(&(5, 0));
    assert_ne!(Mask::scan(&memory, 2).expect("the blocks can be read").digest(), mask.digest());
    memory.bad.clear();
    let clean = Mask::scan(&memory, 2).expect("the blocks can be read");
    assert_eq!((clean.digest(), clean.describe(&memory)), (0, None));
    memory.fault = Some((3, Fault::Corrupt));
    let error = Mask::scan(&memory, 3).expect_err("a damaged block is not skipped");
    assert_eq!((error.exit_code().code(), error.to_string().contains("row group 3")), (22, true));
    memory.fault = Some((3, Fault::Panic));
    let error = Mask::scan(&memory, 3).expect_err("the reader panics").to_string();
    assert!(error.contains("the reader of block 3 panicked: the reader has a bug"), "wrong error: {error}");
}

#[test]
fn replay_proves_each_row_once_for_every_world_size() {
    let mut memory = Memory::new(&[50, 0, 33, 47, 64, 1, 25], 2, 3);
    memory.bad = [(0, 4), (3, 0)].into();
    let mask = Mask::scan(&memory, 1).expect("the blocks can be read");
    let replay = Replay { epochs: 4, world_sizes: vec![1, 2, 3, 4, 7, 64], global_batch: 64, seed: 5 };
    let report = |tail| {
        let config = ShardsConfig { tail, shuffle_row_groups: 2, ..ShardsConfig::default() };
        replay.run(&memory, mask.clone(), &config).expect("the plan has each row once")
    };
    let dropped = report(Tail::Drop);
    assert_eq!((dropped.rows, dropped.skipped_rows, dropped.blocks, dropped.steps_per_epoch), (218, 2, 6, 3));
    assert_eq!((dropped.dropped_rows, dropped.padded_rows, dropped.views_proved), (26, 0, false));
    let padded = report(Tail::Pad);
    assert_eq!((padded.steps_per_epoch, padded.dropped_rows, padded.padded_rows), (4, 0, 38));
    assert!(padded.views_proved);
    let seven = &padded.world_sizes[4];
    assert_eq!((seven.workers, seven.slice_rows_min, seven.slice_rows_max), (7, 9, 10));
    assert!(padded.world_sizes.iter().all(|size| size.order == padded.world_sizes[0].order));
    assert_ne!(padded.world_sizes[0].order, dropped.world_sizes[0].order);
    let json = serde_json::to_value(&padded).expect("the value can be written as JSON");
    assert_eq!((&json["tail"], &json["world_sizes"][5]["workers"]), (&"pad".into(), &64.into()));
    assert_eq!(memory.read_count(), 0, "the replay must not read data");
    let error =
        Replay { world_sizes: vec![1, 0], ..replay.clone() }.run(&memory, mask.clone(), &ShardsConfig::default());
    let error = error.expect_err("a world size is 0");
    assert_eq!(
        (error.exit_code().code(), error.to_string().contains("--world-sizes contains 0")),
        (10, true),
        "wrong error or exit code: {error}"
    );
    // If a data set has fewer rows than a batch, it is replayed as a single batch of all its rows.
    let few = Memory::new(&[3, 2], 2, 1);
    let replay = Replay { epochs: 2, world_sizes: vec![1, 3], global_batch: 4096, seed: 5 };
    let report = replay.run(&few, Mask::none(), &ShardsConfig::default()).expect("the plan has each row once");
    assert_eq!((report.global_batch, report.steps_per_epoch), (5, 1));
    let none = Memory::new(&[0, 0], 2, 1);
    let error = replay.run(&none, Mask::none(), &ShardsConfig::default()).expect_err("there are no rows").to_string();
    assert!(error.contains("0 usable rows"), "wrong error: {error}");
    assert_eq!(none.block_rows().len(), 2);
}
