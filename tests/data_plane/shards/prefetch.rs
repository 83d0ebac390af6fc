//! Batches hold the bits that the plan says, for any threads, cache and fault; and they end when they should.

use std::sync::Arc;
use std::time::{Duration, Instant};

use locdiff::shards::{
    Batch, BatchOptions, Batches, Cache, Layout, Mask, Plan, PlanOptions, Position, Sample, ShardsError, Share,
};
use locdiff_core::config::{ShardsConfig, Tail};
use locdiff_core::exit_code::HasExitCode;
use proptest::prelude::*;
use tch::{Device, Kind};

use crate::shards::memory::{Fault, Memory};

fn options(reader_threads: u32, cache: Cache) -> BatchOptions {
    BatchOptions { reader_threads, prefetch_batches: 2, cache, device: Device::Cpu }
}

fn plan(memory: &Memory, config: &ShardsConfig, global_batch: u32) -> Plan {
    let mask = Mask::scan(memory, 1).expect("a scan");
    Plan::new(memory.layout.clone(), mask, PlanOptions::new(config, 11, global_batch)).expect("a plan")
}

/// Four blocks to a window.
fn config(tail: Tail) -> ShardsConfig {
    ShardsConfig { shuffle_row_groups: 4, tail, ..ShardsConfig::default() }
}

fn start(memory: &Arc<Memory>, plan: &Plan, position: Position, share: Share, options: &BatchOptions) -> Batches {
    Batches::new(memory.clone(), plan.clone(), position, share, options).expect("batches")
}

/// The rows that a worker's batch must hold.
fn wanted(plan: &Plan, position: Position, share: Share) -> Vec<Sample> {
    let slice = plan.slice(share).expect("fewer workers than rows");
    plan.epoch(position.epoch).expect("in range").step(position.step, &slice).map(|row| row.expect("there")).collect()
}

fn bytes(batch: &Batch) -> Vec<u8> {
    let numbers = Vec::<i16>::try_from(batch.embeddings.to_device(Device::Cpu).view_dtype(Kind::Int16).view(-1));
    numbers.expect("float16").into_iter().flat_map(i16::to_le_bytes).collect()
}

/// That `batch` is the one that the plan has at `position`.
fn check(memory: &Memory, plan: &Plan, position: Position, share: Share, batch: &Batch) {
    let rows = wanted(plan, position, share);
    assert_eq!(batch.position, position);
    assert_eq!(batch.slice, plan.slice(share).expect("fewer workers than rows"));
    assert_eq!(batch.embeddings.size(), [rows.len() as i64, memory.layout.width as i64]);
    assert_eq!(bytes(batch), rows.iter().flat_map(|row| memory.embedding(*row)).collect::<Vec<u8>>());
    assert_eq!(batch.latitudes, rows.iter().map(|row| Memory::latitude(row.block, row.row)).collect::<Vec<_>>());
    assert_eq!(batch.longitudes, rows.iter().map(|row| Memory::longitude(row.block, row.row)).collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// From a random step on, over the end of the epoch, for every worker.
    #[test]
    fn batches_are_the_plans_rows(
        block_rows in prop::collection::vec(0_u32..30, 1..20),
        (width, views, windows) in (1_usize..6, 1_u32..4, 1_u32..6),
        (batch, workers, pad) in (1_u32..50, 1_u32..5, any::<bool>()),
        (threads, cache, bad) in (1_u32..5, 0_u64..4, any::<bool>()),
        at in (0_u64..3, any::<u64>()),
    ) {
        let mut memory = Memory::new(&block_rows, width, views);
        memory.slow = threads > 2;
        if bad {
            memory.bad = (0..).zip(&block_rows).filter(|(_, rows)| **rows > 2).map(|(block, rows)| (block, rows / 2)).collect();
        }
        let tail = if pad { Tail::Pad } else { Tail::Drop };
        let config = ShardsConfig { shuffle_row_groups: windows, tail, ..ShardsConfig::default() };
        let mask = Mask::scan(&memory, 1).expect("a scan");
        let Ok(plan) = Plan::new(memory.layout.clone(), mask, PlanOptions::new(&config, 11, batch)) else { return Ok(()) };
        let memory = memory.shared();
        let first = Position { epoch: at.0, step: at.1 % plan.steps(), ..plan.start() };
        let cache = [Cache::None, Cache::Host { bytes_max: 400 }, Cache::Host { bytes_max: 1 << 30 }, Cache::Device][cache as usize];
        for worker in 0..workers.min(batch) {
            let share = Share { worker, workers: workers.min(batch) };
            let mut batches = start(&memory, &plan, first, share, &options(threads, cache));
            let mut position = first;
            for _ in 0..plan.steps().min(4) + 2 {
                assert_eq!(batches.position(), position);
                check(&memory, &plan, position, share, &batches.next().expect("a batch"));
                position = plan.after(position);
            }
        }
    }
}

#[test]
fn a_fault_arrives_in_its_place_and_is_named() {
    for (fault, code, text) in [
        (Fault::Corrupt, 22, "memory.parquet: row group 13: column `embedding`: its xxh3 is 1, wanted 2"),
        (Fault::Panic, 1, "the reader of block 13 panicked: the reader has a bug in block 13; this is a bug"),
        (
            Fault::Short,
            1,
            "block 13: latitudes, longitudes and bytes of embeddings are (9, 9, 36), wanted (10, 10, 40)",
        ),
    ] {
        for threads in 1..=4 {
            let mut memory = Memory::new(&[10; 20], 2, 1);
            let plan = plan(&memory, &config(Tail::Drop), 8);
            (memory.fault, memory.slow) = (Some((13, fault)), true);
            let memory = memory.shared();
            let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(threads, Cache::None));
            let mut position = plan.start();
            while wanted(&plan, position, Share::WHOLE).iter().all(|row| row.block != 13) {
                check(&memory, &plan, position, Share::WHOLE, &batches.next().expect("before the fault"));
                position = plan.after(position);
            }
            assert!(position.step > 2 && position.epoch == 0, "the fault is met too early to show anything");
            let error = batches.next().expect_err("the fault");
            assert_eq!((error.exit_code().code(), error.to_string().starts_with(text)), (code, true), "{error}");
            assert_eq!(batches.position(), position, "the batch that failed is still to come");
            let error = batches.next().expect_err("it is over").to_string();
            assert!(error.contains("after the error: ") && error.contains(text), "{error}");
        }
    }
    // The device cache reads everything first.
    let mut memory = Memory::new(&[10; 20], 2, 1);
    let plan = plan(&memory, &config(Tail::Drop), 8);
    memory.fault = Some((13, Fault::Corrupt));
    let made = Batches::new(memory.shared(), plan.clone(), plan.start(), Share::WHOLE, &options(2, Cache::Device));
    assert_eq!(made.expect_err("the fault").exit_code().code(), 22);
}

/// Waits for what happens soon.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn readers_stay_within_two_windows_and_resume_reads_nothing_again() {
    // Windows of 4 blocks of 10 rows; batches of 10.
    let memory = Memory::new(&[10; 40], 3, 2).shared();
    let plan = plan(&memory, &config(Tail::Drop), 10);
    let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(3, Cache::None));
    eventually("reading two windows", || memory.read_count() == 8);
    // Time enough for a reader that knows no bound.
    std::thread::sleep(Duration::from_millis(30));
    for taken in 0..30_usize {
        // The gatherer has begun batch `taken + 3` at most: two are ahead, one waits to be.
        let bound = 4 * (taken.div_ceil(4) + 2);
        assert!(memory.read_count() <= bound, "{} reads after {taken} batches, wanted {bound}", memory.read_count());
        batches.next().expect("a batch");
    }
    drop(batches);
    // From the last window on: its blocks, and those of the next epoch.
    memory.reads.lock().expect("not poisoned").clear();
    let last = Position { step: 37, ..plan.start() };
    let mut batches = start(&memory, &plan, last, Share::WHOLE, &options(1, Cache::None));
    (0..3).for_each(|_| drop(batches.next().expect("a batch")));
    eventually("reading ahead", || memory.read_count() >= 8);
    let epoch = plan.epoch(0).expect("in range");
    let rest: Vec<(u32, u32)> =
        epoch.samples(370..400).map(|row| row.expect("there")).map(|row| (row.block, row.view)).collect();
    let reads = memory.reads.lock().expect("not poisoned").clone();
    assert!(reads[..4].iter().all(|read| rest.contains(read)), "{reads:?} of {rest:?}");
    assert!(rest.iter().all(|read| reads[..4].contains(read)), "{reads:?} of {rest:?}");
}

#[test]
fn caches_change_no_bit_and_save_reads() {
    let memory = Memory::new(&[10; 12], 5, 2).shared();
    let plan = plan(&memory, &config(Tail::Pad), 16);
    let epochs = 4;
    let mut reads = Vec::new();
    let room = 6 * 10 * (5 * 2 + 16);
    let caches = [Cache::None, Cache::Host { bytes_max: 1 << 20 }, Cache::Host { bytes_max: room }, Cache::Device];
    for cache in caches {
        memory.reads.lock().expect("not poisoned").clear();
        let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(2, cache));
        let mut position = plan.start();
        let mut waited = Duration::ZERO;
        while position.epoch < epochs {
            let batch = batches.next().expect("a batch");
            waited += batch.waited;
            check(&memory, &plan, position, Share::WHOLE, &batch);
            position = plan.after(position);
        }
        assert!(waited > Duration::ZERO);
        drop(batches);
        reads.push(memory.read_count());
    }
    // Every view of every block once; a window that is read ahead twice before it is kept may add to it.
    assert!((24..=32).contains(&reads[1]), "{reads:?}");
    assert_eq!(reads[3], 24, "{reads:?}");
    assert!(reads[0] >= 48 && reads[2] < reads[0] && reads[2] > reads[1], "{reads:?}");
}

#[test]
fn memory_of_a_batch_is_used_again_unless_somebody_has_it() {
    let memory = Memory::new(&[10; 12], 5, 1).shared();
    let plan = plan(&memory, &config(Tail::Drop), 10);
    let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(1, Cache::None));
    let kept = batches.next().expect("a batch");
    let (tensor, bits) = (kept.embeddings.shallow_clone(), bytes(&kept));
    drop(kept);
    let mut places = std::collections::HashSet::new();
    for _ in 0..60 {
        places.insert(batches.next().expect("a batch").embeddings.data_ptr() as usize);
    }
    // Two windows of four batches that are being filled, two ahead, one on its way there, one that is looked at here.
    assert!(places.len() <= 12, "60 batches lay in {} places", places.len());
    assert!(!places.contains(&(tensor.data_ptr() as usize)), "memory that somebody has is used again");
    let now = Vec::<i16>::try_from(tensor.view_dtype(Kind::Int16).view(-1)).expect("float16");
    assert_eq!(now.into_iter().flat_map(i16::to_le_bytes).collect::<Vec<u8>>(), bits);
}

#[test]
fn dropping_batches_ends_their_threads_at_once() {
    // Nobody takes batches; then a read that hangs; then one that hangs while the trainer waits in another thread.
    for fault in [None, Some((3, Fault::Stall))] {
        let mut memory = Memory::new(&[10; 8], 2, 1);
        let plan = plan(&memory, &config(Tail::Drop), 10);
        memory.fault = fault;
        let memory = memory.shared();
        let batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(2, Cache::None));
        eventually("reading", || {
            let reads = memory.reads.lock().expect("not poisoned");
            if fault.is_some() { reads.iter().any(|(block, _)| *block == 3) } else { reads.len() == 8 }
        });
        let begun = Instant::now();
        drop(batches);
        assert!(begun.elapsed() < Duration::from_secs(1), "the end took {:?}", begun.elapsed());
        memory.open();
        eventually("the end of the threads", || Arc::strong_count(&memory) == 1);
    }
}

#[test]
fn what_cannot_be_started_is_refused() {
    let memory = Memory::new(&[10; 8], 2, 1).shared();
    let plan = plan(&memory, &config(Tail::Drop), 4);
    let refused = |position, share| -> ShardsError {
        let made = Batches::new(memory.clone(), plan.clone(), position, share, &options(1, Cache::None));
        made.expect_err("it cannot work")
    };
    let error = refused(plan.start(), Share { worker: 0, workers: 5 }).to_string();
    assert!(
        error.contains("5 workers cannot share a global batch of 4 rows; raise train.global_batch to 5"),
        "{error}"
    );
    let error = refused(Position { step: 20, ..plan.start() }, Share::WHOLE).to_string();
    assert!(error.contains("step 20 of an epoch that has 20"), "{error}");
    let error = refused(Position { seed: 12, ..plan.start() }, Share::WHOLE).to_string();
    assert!(error.contains("train.seed is 11, but the run that is resumed began with 12"), "{error}");
    let wrong = Layout { width: 0, ..memory.layout.clone() };
    let error = Plan::new(wrong, Mask::none(), plan.options().clone()).expect_err("no numbers").to_string();
    assert!(error.contains("the width of the embeddings is 0"), "{error}");
}

/// Pinned memory, the host cache and the device cache give the bits that the CPU has.
#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn batches_for_a_gpu_hold_the_same_bits() {
    let memory = Memory::new(&[300; 40], 768, 3).shared();
    let plan = plan(&memory, &config(Tail::Pad), 1024);
    for cache in [Cache::None, Cache::Host { bytes_max: 1 << 30 }, Cache::Device] {
        let options = BatchOptions { device: Device::Cuda(0), ..options(2, cache) };
        let mut batches = start(&memory, &plan, plan.start(), Share { worker: 1, workers: 3 }, &options);
        let mut position = plan.start();
        while position.epoch < 2 {
            let batch = batches.next().expect("a batch");
            let device = if cache == Cache::Device { Device::Cuda(0) } else { Device::Cpu };
            assert_eq!(batch.embeddings.device(), device);
            assert!(cache == Cache::Device || batch.embeddings.is_pinned(Device::Cuda(0)), "{cache:?} is not pinned");
            check(&memory, &plan, position, Share { worker: 1, workers: 3 }, &batch);
            position = plan.after(position);
        }
    }
    let room = locdiff::shards::Room::measure(Device::Cuda(0), 1).expect("a GPU");
    assert!(room.device_bytes.is_some_and(|bytes| bytes > 1 << 30), "{room:?}");
}
