//! Rows that are copied straight from files into batches have the same bits as rows that are read as parts of whole
//! blocks. A batch is returned only after all of its rows have been checked.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use half::f16;
use locdiff::native::host::HostRows;
use locdiff::native::row_pool::RowPlaces;
use locdiff::shards::{
    Batch, BatchOptions, Batches, BlockRows, Blocks, Cache, DataLayout, Dataset, ImageHead, InlineBatches,
    MANIFEST_NAME, Mask, Plan, PlanOptions, Position, ShardWriter, ShardsError, Share, WriterOptions, WriterRows,
};
use locdiff_core::config::{ShardsConfig, Tail};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use tch::{Device, Kind};

use crate::shards::support::read_all;

/// Writes shards with two views. All embeddings of all rows and views differ.
fn write(out: &Path, rows: usize, width: usize, rows_per_group: u32) {
    let options = WriterOptions::new(width as u32, 2, "placed", ImageHead::None);
    let options = WriterOptions { rows_per_group, rows_per_file: 3 * u64::from(rows_per_group), ..options };
    let ids: Vec<String> = (0..rows).map(|row| row.to_string()).collect();
    let degrees: Vec<f64> = (0..rows).map(|row| row as f64 / rows as f64 * 90.0).collect();
    let view = |view: usize| -> Vec<f16> {
        let bits = |at: usize| match at % width {
            0 => at / width % 1024,
            1 => at / width / 1024,
            2 => view,
            _ => (at * 40_503) & 0xbbff,
        };
        (0..rows * width).map(|at| f16::from_bits(bits(at) as u16)).collect()
    };
    let mut writer = ShardWriter::create(out, options).expect("the output folder does not exist");
    let views = vec![view(0), view(1)];
    writer
        .push(&WriterRows { ids, latitudes: degrees.clone(), longitudes: degrees, views })
        .expect("the rows are valid");
    writer.finish().expect("the shards can be written");
}

fn open(path: &Path) -> Arc<Dataset> {
    Arc::new(Dataset::open(&path.display().to_string(), &ShardsConfig::default()).expect("the shards are valid"))
}

fn plan(dataset: &Dataset, mask: Mask, batch: u32) -> Plan {
    let config = ShardsConfig { shuffle_row_groups: 3, tail: Tail::Pad, ..ShardsConfig::default() };
    Plan::new(DataLayout::of(dataset), mask, PlanOptions::new(&config, 5, batch)).expect("the plan is valid")
}

fn threaded(dataset: &Arc<Dataset>, plan: &Plan, share: Share, cache: Cache) -> Batches {
    let options = BatchOptions { reader_threads: 2, prefetch_batches: 2, cache, device: Device::Cpu };
    Batches::new(dataset.clone(), plan.clone(), plan.start(), share, &options).expect("the options are valid")
}

/// Reads whole blocks. Returns the embeddings of each block in each view as bytes, indexed by `[view][block]`.
fn read_blocks(dataset: &Dataset) -> Vec<Vec<Vec<u8>>> {
    let read = |view: u32| {
        let whole = read_all(dataset, view).expect("the blocks are valid").embeddings;
        let mut rest = whole.as_slice();
        let of_block = |rows: &u32| {
            let (block, after) = rest.split_at(*rows as usize * dataset.width() * 2);
            rest = after;
            block.to_vec()
        };
        dataset.block_rows().iter().map(of_block).collect()
    };
    (0..dataset.views()).map(read).collect()
}

/// Asserts that `batch` holds the embeddings and coordinates of the rows that the plan has at `position`.
fn assert_batch(batch: &Batch, plan: &Plan, blocks: &[Vec<Vec<u8>>], position: Position) {
    let row_bytes = plan.layout().width * 2;
    let (mut bytes, mut degrees) = (Vec::new(), Vec::new());
    let rows: u32 = plan.layout().block_rows.iter().sum();
    for sample in plan.epoch(position.epoch).expect("the epoch is in range").step(position.step, &batch.slice) {
        let sample = sample.expect("the epoch is in range");
        let (view, block, row) = (sample.view as usize, sample.block as usize, sample.row as usize);
        bytes.extend_from_slice(&blocks[view][block][row * row_bytes..][..row_bytes]);
        let before: u32 = plan.layout().block_rows[..block].iter().sum();
        degrees.push(f64::from(before + sample.row) / f64::from(rows) * 90.0);
    }
    let numbers = Vec::<i16>::try_from(batch.embeddings.view_dtype(Kind::Int16).view(-1))
        .expect("the tensor holds 16-bit numbers");
    assert!(numbers.into_iter().flat_map(i16::to_le_bytes).eq(bytes), "wrong embeddings at {position:?}");
    assert_eq!((batch.position, &batch.latitudes, &batch.longitudes), (position, &degrees, &degrees));
}

#[test]
fn batches_equal_rows_of_whole_blocks_for_every_share_and_cache() {
    // Blocks are read in pieces of 256 KiB. In the first data set, a block has several pieces. In the second, blocks
    // have many short rows. In the third, rows are so wide that each row is a piece of its own.
    for (rows, width, rows_per_group, batch) in [(2500, 300, 900, 700), (7000, 3, 3000, 700), (9, 200_000, 4, 5)] {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let out = folder.path().join("out");
        write(&out, rows, width, rows_per_group);
        for with_manifest in [true, false] {
            if !with_manifest {
                fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
            }
            let dataset = open(&out);
            let (plan, blocks) = (plan(&dataset, Mask::none(), batch), read_blocks(&dataset));
            for (worker, workers) in [(0, 1), (2, 3)] {
                let share = Share { worker, workers };
                let mut inline = InlineBatches::new(dataset.as_ref(), plan.clone(), plan.start(), share)
                    .expect("the options are valid");
                let caches = [Cache::None, Cache::Host { bytes_max: 1 << 30 }];
                let mut threaded = caches.map(|cache| threaded(&dataset, &plan, share, cache));
                let mut position = plan.start();
                while position.epoch < 3 {
                    assert_batch(&inline.next().expect("the blocks are valid"), &plan, &blocks, position);
                    threaded.iter_mut().for_each(|made| {
                        assert_batch(&made.next().expect("the blocks are valid"), &plan, &blocks, position)
                    });
                    position = plan.after(position);
                }
            }
        }
    }
}

#[test]
fn rows_of_own_shards_are_copied_straight_into_batches() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out, 50, 8, 50);
    let dataset = open(&out);
    let want = read_all(dataset.as_ref(), 1).expect("the blocks are valid");
    let (mut memory, mut places) =
        (HostRows::new(2, 8, false).expect("the memory can be allocated"), RowPlaces::new(50, 16));
    memory.assign(&mut places, 41);
    memory.assign(&mut places, 7);
    let mut rows = BlockRows::default();
    dataset.read_placed((0, 1), &[], &mut rows, &mut places).expect("the blocks are valid");
    places.finish();
    assert_eq!(
        (&rows.latitudes, rows.embeddings.capacity()),
        (&want.latitudes, 0),
        "wrong latitudes, or the block holds embeddings"
    );
    let numbers = Vec::<i16>::try_from(memory.into_tensor().view_dtype(Kind::Int16).view(-1))
        .expect("the tensor holds 16-bit numbers");
    let bytes: Vec<u8> = numbers.into_iter().flat_map(i16::to_le_bytes).collect();
    assert_eq!(bytes, [&want.embeddings[41 * 16..][..16], &want.embeddings[7 * 16..][..16]].concat());
}

/// Finds the embedding `row` in a file and overwrites two bytes in the middle of the embedding with `bytes`.
fn damage(path: &Path, row: &[u8], bytes: [u8; 2]) {
    let mut file = fs::read(path).expect("the file can be read");
    let at = file.windows(row.len()).position(|window| window == row).expect("the file has the row") + row.len() / 2;
    file[at..at + 2].copy_from_slice(&bytes);
    fs::write(path, file).expect("the file can be written");
}

/// The number of batches before the first error, and the error itself.
fn first_error(mut next: impl FnMut() -> Result<Batch, ShardsError>) -> (u64, ShardsError) {
    let mut count = 0;
    loop {
        match next() {
            Ok(_) if count == 1000 => panic!("1000 batches came without an error"),
            Ok(_) => count += 1,
            Err(error) => return (count, error),
        }
    }
}

#[test]
fn batch_with_rows_of_a_damaged_block_is_never_returned() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out, 6000, 40, 400);
    let dataset = open(&out);
    let (plan, blocks) = (plan(&dataset, Mask::none(), 700), read_blocks(&dataset));
    // Block 3 is the first block of the second file.
    let (file, view) = (out.join("part-00001.parquet"), plan.epoch(0).expect("the epoch is in range"));
    let first = |share: Share| {
        let slice = plan.slice(share).expect("there are fewer workers than rows");
        let has = |step: u64| view.step(step, &slice).any(|sample| sample.expect("the epoch is in range").block == 3);
        (0..plan.steps()).find(|step| has(*step)).expect("every block is used")
    };
    let shown =
        view.samples(0..6000).map(|sample| sample.expect("the epoch is in range")).find(|sample| sample.block == 3);
    let shown = &blocks[shown.expect("every block is used").view as usize];
    damage(&file, &shown[3][100 * 80..][..80], [0x55, 0x05]);
    // With 35 workers, each worker takes twenty rows of a batch. When these rows include rows of the damaged block,
    // they rarely include the damaged row itself. The worker must still get the error.
    for share in [Share::WHOLE, Share { worker: 17, workers: 35 }] {
        let mut inline =
            InlineBatches::new(dataset.as_ref(), plan.clone(), plan.start(), share).expect("the options are valid");
        let mut threads = threaded(&dataset, &plan, share, Cache::None);
        let mut cached = threaded(&dataset, &plan, share, Cache::Host { bytes_max: 1 << 30 });
        let failures = [first_error(|| threads.next()), first_error(|| cached.next()), first_error(|| inline.next())];
        for again in [threads.next(), inline.next()] {
            let text = again.expect_err("an error ends the batches").to_string();
            assert!(text.contains("another batch was requested after the error"), "wrong error: {text}");
        }
        for (made, error) in &failures {
            assert_eq!(error.exit_code(), ExitCode::Corrupt, "wrong exit code for: {error}");
            for part in ["part-00001.parquet: row group 0: column `embedding", "the file is damaged"] {
                assert!(error.to_string().contains(part), "{part:?} is missing in: {error}");
            }
            assert_eq!(*made, first(share), "the error did not come at the first batch with a row of block 3");
        }
    }
}

#[test]
fn non_finite_row_is_named_or_skipped_and_the_rest_of_its_block_is_read() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out, 2000, 40, 400);
    let whole = open(&out);
    let blocks = read_blocks(&whole);
    let file = out.join("part-00001.parquet");
    for view in &blocks {
        damage(&file, &view[3][100 * 80..][..80], f16::NAN.to_le_bytes());
    }
    fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
    let dataset = open(&out);
    let refused = plan(&dataset, Mask::none(), 700);
    let mut batches = threaded(&dataset, &refused, Share::WHOLE, Cache::None);
    let (_, error) = first_error(|| batches.next());
    assert_eq!(error.exit_code(), ExitCode::BadData);
    assert!(
        error.to_string().contains("row group 0: column `embedding") && error.to_string().contains("row 100: "),
        "wrong error: {error}"
    );
    let mask = Mask::scan(dataset.as_ref(), 1).expect("the blocks can be read");
    assert_eq!((mask.count(), mask.skipped(3)), (1, &[100][..]));
    let plan = plan(&dataset, mask, 700);
    let mut batches = threaded(&dataset, &plan, Share::WHOLE, Cache::None);
    let mut position = plan.start();
    while position.epoch < 2 {
        assert_batch(&batches.next().expect("the blocks are valid"), &plan, &blocks, position);
        position = plan.after(position);
    }
}
