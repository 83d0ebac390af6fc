//! Batches hold exactly the rows of the plan, for any number of threads and any cache. If the read of a block fails,
//! the first batch with rows of that block gives the error. Dropping a `Batches` stops its threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use locdiff::shards::{
    Batch, BatchOptions, Batches, Cache, DataLayout, Mask, Plan, PlanOptions, Position, RowWeights, Sample,
    ShardsError, Share,
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
    let mask = Mask::scan(memory, 1).expect("the blocks can be read");
    Plan::new(memory.layout.clone(), mask, PlanOptions::new(config, 11, global_batch)).expect("the plan is valid")
}

/// A configuration with windows of four blocks.
fn config(tail: Tail) -> ShardsConfig {
    ShardsConfig { shuffle_row_groups: 4, tail, ..ShardsConfig::default() }
}

fn start(memory: &Arc<Memory>, plan: &Plan, position: Position, share: Share, options: &BatchOptions) -> Batches {
    Batches::new(memory.clone(), plan.clone(), position, share, options).expect("the options are valid")
}

/// The rows that the batch of a worker at `position` must hold.
fn planned(plan: &Plan, position: Position, share: Share) -> Vec<Sample> {
    let slice = plan.slice(share).expect("there are at most as many workers as rows");
    let epoch = plan.epoch(position.epoch).expect("the epoch is in range");
    epoch.step(position.step, &slice).map(|row| row.expect("the epoch is in range")).collect()
}

fn bytes(batch: &Batch) -> Vec<u8> {
    let numbers = Vec::<i16>::try_from(batch.embeddings.to_device(Device::Cpu).view_dtype(Kind::Int16).view(-1));
    numbers.expect("the tensor holds 16-bit numbers").into_iter().flat_map(i16::to_le_bytes).collect()
}

/// Asserts that `batch` holds the rows that the plan has at `position` for `share`.
fn assert_batch(memory: &Memory, plan: &Plan, position: Position, share: Share, batch: &Batch) {
    let rows = planned(plan, position, share);
    assert_eq!(batch.position, position);
    assert_eq!(batch.slice, plan.slice(share).expect("there are at most as many workers as rows"));
    assert_eq!(batch.embeddings.size(), [rows.len() as i64, memory.layout.width as i64]);
    assert_eq!(bytes(batch), rows.iter().flat_map(|row| memory.embedding(*row)).collect::<Vec<u8>>());
    assert_eq!(batch.latitudes, rows.iter().map(|row| Memory::latitude(row.block, row.row)).collect::<Vec<_>>());
    assert_eq!(batch.longitudes, rows.iter().map(|row| Memory::longitude(row.block, row.row)).collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Reads some batches for every worker, from a random step on and possibly into the next epoch.
    #[test]
    fn batches_hold_the_rows_of_the_plan(
        block_rows in prop::collection::vec(0_u32..30, 1..20),
        (width, views, windows) in (1_usize..6, 1_u32..4, 1_u32..6),
        (batch, workers, pad) in (1_u32..50, 1_u32..5, any::<bool>()),
        (threads, cache, bad) in (1_u32..5, 0_u64..4, any::<bool>()),
        (at, density_alpha) in ((0_u64..3, any::<u64>()), prop_oneof![Just(0.0), Just(0.5), Just(1.0)]),
    ) {
        let mut memory = Memory::new(&block_rows, width, views);
        memory.slow = threads > 2;
        if bad {
            memory.bad = (0..).zip(&block_rows).filter(|(_, rows)| **rows > 2).map(|(block, rows)| (block, rows / 2)).collect();
        }
        let tail = if pad { Tail::Pad } else { Tail::Drop };
        let config = ShardsConfig { shuffle_row_groups: windows, tail, density_alpha, ..ShardsConfig::default() };
        let mask = Mask::scan(&memory, 1).expect("the blocks can be read");
        // The rows of small blocks have few neighbours in their cells, so they come several times.
        let weights = RowWeights::for_config(&memory, &mask, &config).expect("the blocks can be read");
        let options_of_plan = PlanOptions::new(&config, 11, batch);
        let Ok(plan) = Plan::weighted(memory.layout.clone(), mask, options_of_plan, weights) else { return Ok(()) };
        let memory = memory.shared();
        let first = Position { epoch: at.0, step: at.1 % plan.steps(), ..plan.start() };
        let cache = [Cache::None, Cache::Host { bytes_max: 400 }, Cache::Host { bytes_max: 1 << 30 }, Cache::Device][cache as usize];
        for worker in 0..workers.min(batch) {
            let share = Share { worker, workers: workers.min(batch) };
            let mut batches = start(&memory, &plan, first, share, &options(threads, cache));
            let mut position = first;
            for _ in 0..plan.steps().min(4) + 2 {
                assert_eq!(batches.position(), position);
                assert_batch(&memory, &plan, position, share, &batches.next().expect("the blocks are valid"));
                position = plan.after(position);
            }
        }
    }
}

#[test]
fn read_fault_is_reported_at_its_batch() {
    for (fault, code, text) in [
        (Fault::Corrupt, 22, "memory.parquet: row group 13: column `embedding`: its xxh3 is 1, wanted 2"),
        (Fault::Panic, 1, "the reader of block 13 panicked: the reader has a bug in block 13; this is a bug"),
        (
            Fault::Short,
            1,
            "block 13: the numbers of latitudes, longitudes and embedding bytes are (9, 9, 36), wanted (10, 10, 40)",
        ),
    ] {
        for threads in 1..=4 {
            let mut memory = Memory::new(&[10; 20], 2, 1);
            let plan = plan(&memory, &config(Tail::Drop), 8);
            (memory.fault, memory.slow) = (Some((13, fault)), true);
            let memory = memory.shared();
            let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(threads, Cache::None));
            let mut position = plan.start();
            while planned(&plan, position, Share::WHOLE).iter().all(|row| row.block != 13) {
                assert_batch(
                    &memory,
                    &plan,
                    position,
                    Share::WHOLE,
                    &batches.next().expect("the batch has no row of block 13"),
                );
                position = plan.after(position);
            }
            assert!(position.step > 2 && position.epoch == 0, "the plan uses block 13 too early for this test");
            let error = batches.next().expect_err("block 13 has a fault");
            assert_eq!(
                (error.exit_code().code(), error.to_string().starts_with(text)),
                (code, true),
                "wrong error or exit code: {error}"
            );
            assert_eq!(batches.position(), position, "the position moved past the failed batch");
            let error = batches.next().expect_err("an error ends the batches").to_string();
            assert!(error.contains("after the error: ") && error.contains(text), "wrong error: {error}");
        }
    }
    // With the device cache, `Batches::new` reads all blocks, so it returns the error.
    let mut memory = Memory::new(&[10; 20], 2, 1);
    let plan = plan(&memory, &config(Tail::Drop), 8);
    memory.fault = Some((13, Fault::Corrupt));
    let made = Batches::new(memory.shared(), plan.clone(), plan.start(), Share::WHOLE, &options(2, Cache::Device));
    assert_eq!(made.expect_err("block 13 has a fault").exit_code().code(), 22);
}

/// Waits until `done` returns true. Panics with the description `what` after 20 s.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen within 20 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn readers_stay_within_two_windows_and_resume_reads_only_the_rest() {
    // A window has four blocks of 10 rows, and a batch has 10 rows.
    let memory = Memory::new(&[10; 40], 3, 2).shared();
    let plan = plan(&memory, &config(Tail::Drop), 10);
    let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(3, Cache::None));
    wait_until("reading two windows", || memory.read_count() == 8);
    // Without a bound, the readers would read more blocks in this time.
    std::thread::sleep(Duration::from_millis(30));
    for taken in 0..30_usize {
        // At most `taken + 3` batches are begun: the batches taken, two that are prefetched, and one that waits for a
        // free slot. These batches are in at most `taken.div_ceil(4) + 1` windows. The next window is read too.
        let bound = 4 * (taken.div_ceil(4) + 2);
        assert!(
            memory.read_count() <= bound,
            "{} blocks were read after {taken} batches, wanted at most {bound}",
            memory.read_count()
        );
        batches.next().expect("the blocks are valid");
    }
    drop(batches);
    // Resuming in the last window of an epoch first reads the blocks of this window and then blocks of the next epoch.
    memory.reads.lock().expect("no thread panicked while it held the lock").clear();
    let last = Position { step: 37, ..plan.start() };
    let mut batches = start(&memory, &plan, last, Share::WHOLE, &options(1, Cache::None));
    (0..3).for_each(|_| drop(batches.next().expect("the blocks are valid")));
    wait_until("reading ahead", || memory.read_count() >= 8);
    let epoch = plan.epoch(0).expect("the epoch is in range");
    let rest: Vec<(u32, u32)> = epoch
        .samples(370..400)
        .map(|row| row.expect("the epoch is in range"))
        .map(|row| (row.block, row.view))
        .collect();
    let reads = memory.reads.lock().expect("no thread panicked while it held the lock").clone();
    assert!(
        reads[..4].iter().all(|read| rest.contains(read)),
        "blocks outside the window {rest:?} were read first: {reads:?}"
    );
    assert!(
        rest.iter().all(|read| reads[..4].contains(read)),
        "not all blocks of the window {rest:?} were read first: {reads:?}"
    );
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
        memory.reads.lock().expect("no thread panicked while it held the lock").clear();
        let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(2, cache));
        let mut position = plan.start();
        let mut waited = Duration::ZERO;
        while position.epoch < epochs {
            let batch = batches.next().expect("the blocks are valid");
            waited += batch.waited;
            assert_batch(&memory, &plan, position, Share::WHOLE, &batch);
            position = plan.after(position);
        }
        assert!(waited > Duration::ZERO);
        drop(batches);
        reads.push(memory.read_count());
    }
    // With a device cache for the whole data set, each of the 2 views of each of the 12 blocks is read exactly once.
    // With a host cache for the whole data set, the blocks of up to two windows may be read twice: they may be
    // prefetched again before they are cached.
    assert!((24..=32).contains(&reads[1]), "the host cache read {} blocks, wanted 24 to 32", reads[1]);
    assert_eq!(reads[3], 24, "the device cache did not read each view of each block once");
    assert!(
        reads[0] >= 48 && reads[2] < reads[0] && reads[2] > reads[1],
        "wrong numbers of reads per cache: {reads:?}"
    );
}

#[test]
fn batch_memory_is_reused_unless_a_tensor_still_holds_it() {
    let memory = Memory::new(&[10; 12], 5, 1).shared();
    let plan = plan(&memory, &config(Tail::Drop), 10);
    let mut batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(1, Cache::None));
    let kept = batches.next().expect("the blocks are valid");
    let (tensor, bits) = (kept.embeddings.shallow_clone(), bytes(&kept));
    drop(kept);
    let mut buffers = std::collections::HashSet::new();
    for _ in 0..60 {
        buffers.insert(batches.next().expect("the blocks are valid").embeddings.data_ptr() as usize);
    }
    // Twelve buffers are enough: eight for the batches of the two windows that are being filled, two for prefetched
    // batches, one for the batch that is being handed over, and one for the batch that this test holds.
    assert!(buffers.len() <= 12, "60 batches used {} buffers, wanted at most 12", buffers.len());
    assert!(!buffers.contains(&(tensor.data_ptr() as usize)), "memory that is still in use was reused");
    let now = Vec::<i16>::try_from(tensor.view_dtype(Kind::Int16).view(-1)).expect("the tensor holds 16-bit numbers");
    assert_eq!(now.into_iter().flat_map(i16::to_le_bytes).collect::<Vec<u8>>(), bits);
}

#[test]
fn dropping_batches_stops_their_threads_at_once() {
    // Without a fault, all threads wait, because no batch is taken. With the fault, a read hangs.
    for fault in [None, Some((3, Fault::Stall))] {
        let mut memory = Memory::new(&[10; 8], 2, 1);
        let plan = plan(&memory, &config(Tail::Drop), 10);
        memory.fault = fault;
        let memory = memory.shared();
        let batches = start(&memory, &plan, plan.start(), Share::WHOLE, &options(2, Cache::None));
        wait_until("reading", || {
            let reads = memory.reads.lock().expect("no thread panicked while it held the lock");
            if fault.is_some() { reads.iter().any(|(block, _)| *block == 3) } else { reads.len() == 8 }
        });
        let begun = Instant::now();
        drop(batches);
        assert!(begun.elapsed() < Duration::from_secs(1), "drop took {:?}, wanted less than 1 s", begun.elapsed());
        memory.release_stalled();
        wait_until("the end of all threads", || Arc::strong_count(&memory) == 1);
    }
}

#[test]
fn impossible_starts_are_refused() {
    let memory = Memory::new(&[10; 8], 2, 1).shared();
    let plan = plan(&memory, &config(Tail::Drop), 4);
    let refused = |position, share| -> ShardsError {
        let made = Batches::new(memory.clone(), plan.clone(), position, share, &options(1, Cache::None));
        made.expect_err("the start is impossible")
    };
    let error = refused(plan.start(), Share { worker: 0, workers: 5 }).to_string();
    assert!(
        error.contains("5 workers cannot share a global batch of 4 rows; raise train.global_batch to 5"),
        "wrong error: {error}"
    );
    let error = refused(Position { step: 20, ..plan.start() }, Share::WHOLE).to_string();
    assert!(error.contains("step 20, but an epoch has only the steps 0 to 19"), "wrong error: {error}");
    let error = refused(Position { seed: 12, ..plan.start() }, Share::WHOLE).to_string();
    assert!(error.contains("train.seed is 11, but the resumed run began with 12"), "wrong error: {error}");
    let wrong = DataLayout { width: 0, ..memory.layout.clone() };
    let error = Plan::new(wrong, Mask::none(), plan.options().clone()).expect_err("the width is 0").to_string();
    assert!(error.contains("the width of the embeddings is 0"), "wrong error: {error}");
}

/// Batches for a GPU hold the right bits with every cache. With the device cache they are on the GPU, otherwise in
/// pinned memory.
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
            let batch = batches.next().expect("the blocks are valid");
            let device = if cache == Cache::Device { Device::Cuda(0) } else { Device::Cpu };
            assert_eq!(batch.embeddings.device(), device);
            assert!(
                cache == Cache::Device || batch.embeddings.is_pinned(Device::Cuda(0)),
                "a batch with {cache:?} is not pinned"
            );
            assert_batch(&memory, &plan, position, Share { worker: 1, workers: 3 }, &batch);
            position = plan.after(position);
        }
    }
    let room = locdiff::shards::Room::measure(Device::Cuda(0), 1).expect("this machine has a GPU");
    assert!(room.device_bytes.is_some_and(|bytes| bytes > 1 << 30), "the GPU has too little free memory: {room:?}");
}
