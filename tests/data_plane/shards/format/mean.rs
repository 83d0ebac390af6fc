//! Means over views (`shards.mean_views`): what a reader gets, which views each mean takes, and that a bad number in any
//! of these views is found.

use std::path::Path;
use std::sync::Arc;

use half::f16;
use locdiff::shards::{
    Blocks, DataLayout, Dataset, ImageHead, InlineBatches, MANIFEST_NAME, Mask, Plan, PlanOptions, ShardWriter, Share,
    WriterOptions, WriterRows, inspect, verify,
};
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use tch::Kind;

use crate::shards::support::read_all;

const ROWS: usize = 40;
const WIDTH: usize = 700;

/// Number `index` of view `view` of a row. Sums of several such numbers are not float16 numbers.
fn number(row: usize, index: usize, view: usize) -> f16 {
    f16::from_f64(((row * 7919 + index * 104_729 + view * 1_299_709) % 60_013) as f64 - 30_000.0)
}

/// Writes shards whose rows have the given views. Each view is given by its numbers, row by row.
fn write(out: &Path, views: Vec<Vec<f16>>) {
    let options = WriterOptions::new(WIDTH as u32, views.len() as u32, "means", ImageHead::None);
    let options = WriterOptions { rows_per_group: 16, ..options };
    let degrees: Vec<f64> = (0..ROWS).map(|row| row as f64).collect();
    let ids = (0..ROWS).map(|row| row.to_string()).collect();
    let mut writer = ShardWriter::create(out, options).expect("the output folder does not exist");
    writer
        .push(&WriterRows { ids, latitudes: degrees.clone(), longitudes: degrees, views })
        .expect("the rows are valid");
    writer.finish().expect("the shards can be written");
}

fn stored(view: usize) -> Vec<f16> {
    (0..ROWS * WIDTH).map(|at| number(at / WIDTH, at % WIDTH, view)).collect()
}

/// The mean over some views, computed in float64. The sums of these numbers are exact in float32 too.
fn mean(views: std::ops::Range<usize>) -> Vec<f16> {
    let of = |at: usize| {
        let sum: f64 = views.clone().map(|view| number(at / WIDTH, at % WIDTH, view).to_f64()).sum();
        f16::from_f32(sum as f32 / views.len() as f32)
    };
    (0..ROWS * WIDTH).map(of).collect()
}

fn open(path: &Path, mean_views: u32) -> Dataset {
    let config = ShardsConfig { mean_views, ..ShardsConfig::default() };
    Dataset::open(&path.display().to_string(), &config).expect("the shards are valid")
}

#[test]
fn views_are_averaged_in_order_and_the_last_mean_takes_the_rest() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out, (0..7).map(stored).collect());
    for with_manifest in [true, false] {
        if !with_manifest {
            std::fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
        }
        // The first view of each mean.
        for (mean_views, firsts) in [(1, &[0, 1, 2, 3, 4, 5, 6][..]), (3, &[0, 3]), (7, &[0]), (9, &[0])] {
            let dataset = open(&out, mean_views);
            assert_eq!((dataset.views() as usize, dataset.stored_views()), (firsts.len(), 7), "with {mean_views}");
            let ends = firsts.iter().skip(1).chain(&[7]);
            for (view, of) in (0_u32..).zip(firsts.iter().zip(ends).map(|(first, end)| *first..*end)) {
                let read = read_all(&dataset, view).expect("the blocks are valid");
                let want: Vec<u8> = mean(of.clone()).iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(read.latitudes.len(), ROWS, "wrong number of rows");
                assert!(read.embeddings == want, "view {view} with {mean_views} is not the mean over {of:?}");
            }
            // What describes the files themselves does not depend on the setting.
            let found = inspect(&dataset, &ShardsConfig::default()).expect("the shards are valid");
            assert_eq!((found.views, found.statistics), (7, open(&out, 1).scan().expect("valid").statistics));
        }
    }
}

#[test]
fn training_batches_of_means_equal_those_of_stored_means() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let [views, means] = ["views", "means"].map(|name| folder.path().join(name));
    write(&views, (0..4).map(stored).collect());
    write(&means, vec![mean(0..2), mean(2..4)]);
    let batches = |dataset: Dataset| -> Vec<Vec<i16>> {
        let dataset = Arc::new(dataset);
        let options = PlanOptions::new(&ShardsConfig::default(), 3, 10);
        let plan = Plan::new(DataLayout::of(dataset.as_ref()), Mask::none(), options).expect("the plan is valid");
        let share = Share { worker: 0, workers: 1 };
        let mut batches =
            InlineBatches::new(dataset.as_ref(), plan.clone(), plan.start(), share).expect("the options are valid");
        let mut next = || batches.next().expect("the blocks are valid").embeddings.view_dtype(Kind::Int16).view(-1);
        (0..8).map(|_| Vec::<i16>::try_from(next()).expect("16-bit numbers")).collect()
    };
    // Two epochs of four batches, so both means of a row are used.
    assert!(batches(open(&views, 2)) == batches(open(&means, 1)), "the batches differ");
    assert!(batches(open(&views, 2)) != batches(open(&views, 1)), "views were not averaged");
}

#[test]
fn bad_number_in_any_averaged_view_is_found() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out, (0..4).map(stored).collect());
    std::fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
    let file = out.join("part-00000.parquet");
    let mut bytes = std::fs::read(&file).expect("the file can be read");
    // Row 5 of the last of four views becomes infinite.
    let row: Vec<u8> = (0..WIDTH).flat_map(|index| number(5, index, 3).to_le_bytes()).collect();
    let at = bytes.windows(row.len()).position(|found| found == row).expect("the file holds the row");
    bytes[at..at + 2].copy_from_slice(&f16::INFINITY.to_le_bytes());
    std::fs::write(&file, bytes).expect("the file can be written");
    let dataset = open(&out, 2);
    read_all(&dataset, 0).expect("the first mean does not need the bad view");
    let error = read_all(&dataset, 1).expect_err("the bad number was not found");
    assert!(error.to_string().contains("column `embedding_3`: row 5"), "wrong error: {error}");
    assert_eq!(error.exit_code(), ExitCode::BadData);
    assert_eq!(dataset.bad_rows(0).expect("the block can be read"), [5]);
    let scan = dataset.scan().expect("the blocks can be read");
    assert_eq!(scan.bad_rows.iter().map(|bad| bad.row).collect::<Vec<_>>(), [5]);
    let (problems, _) = verify(&dataset, OnBadRows::Error).expect("the files can be read");
    assert_eq!(problems.len(), 1, "wrong problems: {problems:?}");
}
