//! Data without a manifest is what it was when a run began, or an error that names the chunk.

use std::fs;
use std::path::Path;

use locdiff::shards::{
    BlockRows, Blocks, Bookmark, Contents, Dataset, Layout, MANIFEST_NAME, Mask, Plan, PlanOptions, ShardWriter,
    ShardsError, Survey, WriterRows,
};
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};

use crate::shards::support::{ROWS, WIDTH, all, embeddings, expected, options};

fn open(folder: &Path) -> Dataset {
    Dataset::open(&folder.display().to_string(), &ShardsConfig::default()).expect("opens")
}

/// Writes the sixty-four rows without a manifest, with identifiers so long that no embedding is among the first 64 KiB of a file.
fn bare(folder: &Path) {
    let mut writer = ShardWriter::create(folder, options()).expect("begun");
    let ids: Vec<String> = (0..ROWS).map(|row| format!("{row:0>8192}")).collect();
    let BlockRows { latitudes, longitudes, .. } = expected(0);
    let rows = WriterRows { ids, latitudes, longitudes, views: vec![embeddings(0), embeddings(1)] };
    writer.push(&rows).expect("pushed");
    writer.finish().expect("written");
    fs::remove_file(folder.join(MANIFEST_NAME)).expect("removed");
}

/// Flips the lowest bit of a number of view 1 of row 9 of the second file: row group 0 of that file, block 2.
fn flip(folder: &Path) {
    let path = folder.join("part-00001.parquet");
    let mut bytes = fs::read(&path).expect("read");
    let row = &expected(1).embeddings[(48 + 9) * WIDTH * 2..][..WIDTH * 2];
    // Five numbers find it, the sixth is another every time.
    let at = bytes.windows(10).position(|window| window == &row[..10]).expect("row 9 of the second file");
    bytes[at + 10] ^= 1;
    fs::write(&path, bytes).expect("written");
}

#[track_caller]
fn changed<T>(result: Result<T, ShardsError>) {
    let error = result.err().expect("must be refused");
    assert_eq!(error.exit_code(), ExitCode::DataChanged, "{error}");
    let words = "part-00001.parquet: row group 0: column `embedding_1`: the data has changed since the run began";
    assert!(error.to_string().contains(words), "{error}");
}

fn bookmark(dataset: &Dataset, contents: Option<Contents>) -> Bookmark {
    let options = PlanOptions::new(&ShardsConfig::default(), 7, 16);
    let plan = Plan::new(Layout::of(dataset), Mask::none(), options).expect("a plan");
    let mark = Bookmark { contents, ..plan.bookmark(plan.start()) };
    // As a checkpoint keeps it.
    serde_json::from_str(&serde_json::to_string(&mark).expect("JSON")).expect("a bookmark")
}

/// The same checksums, with what the files say of themselves today.
fn of_today(contents: &Contents, dataset: &Dataset) -> Contents {
    let [mut then, now] = [contents, &dataset.read_contents().expect("read")]
        .map(|contents| serde_json::to_value(contents).expect("JSON"));
    then["versions"] = now["versions"].clone();
    serde_json::from_value(then).expect("contents")
}

#[test]
fn data_without_a_manifest_that_changed_is_refused_when_resumed_and_when_read() {
    let scratch = tempfile::tempdir().expect("temporary folder");
    let folder = scratch.path().join("data");
    bare(&folder);
    let config = ShardsConfig::default();
    let location = folder.display().to_string();
    let mut first = open(&folder);
    let survey = Survey::begin(&first, &config).expect("read once");
    let contents = survey.contents.clone().expect("no manifest knows them");
    assert_eq!(contents, first.read_contents().expect("read"), "a scan hashes what is read");
    let mark = bookmark(&first, survey.contents.clone());
    let resumed = Survey::resume(&mut open(&folder), &config, &mark, &location).expect("nothing has changed");
    assert_eq!((resumed.contents.as_ref(), resumed.mask), (Some(&contents), survey.mask));

    // While training goes on: what was open is read again.
    first.expect(Some(contents.clone())).expect("its own");
    flip(&folder);
    changed(all(&first, 1));
    assert_eq!(all(&first, 0).expect("the other view is whole"), expected(0));
    // At resuming, before anything is trained on; even where the file says that nobody has touched it, when it is read.
    let mut again = open(&folder);
    assert_eq!(
        again.fingerprint(),
        first.fingerprint(),
        "the middle of a page is not in it, or this test proves nothing"
    );
    changed(Survey::resume(&mut again, &config, &mark, &location));
    let unseen = bookmark(&again, Some(of_today(&contents, &again)));
    Survey::resume(&mut again, &config, &unseen, &location).expect("nothing was read");
    changed(all(&again, 1));
    let skip = ShardsConfig { on_bad_rows: OnBadRows::Skip, ..config.clone() };
    changed(Survey::resume(&mut open(&folder), &skip, &unseen, &location));
    // Flipped back, it is the same data, whoever touched it.
    flip(&folder);
    let resumed = Survey::resume(&mut open(&folder), &config, &mark, &location).expect("the same bytes");
    assert_ne!(resumed.contents, Some(contents), "with the versions of today");
    // A checkpoint that knew nothing knows from now on.
    let ignorant = bookmark(&first, None);
    let resumed = Survey::resume(&mut open(&folder), &config, &ignorant, &location).expect("nothing to compare");
    assert_eq!(resumed.contents, Some(open(&folder).read_contents().expect("read")));
}

#[test]
fn bad_rows_are_found_before_the_first_step_and_count_in_no_mean() {
    let scratch = tempfile::tempdir().expect("temporary folder");
    let folder = scratch.path().join("data");
    bare(&folder);
    let path = folder.join("part-00001.parquet");
    let mut bytes = fs::read(&path).expect("read");
    let row = &expected(1).embeddings[(48 + 9) * WIDTH * 2..][..WIDTH * 2];
    let at = bytes.windows(row.len()).position(|window| window == row).expect("row 9 of the second file");
    bytes[at + 11] = 0x7e;
    fs::write(&path, bytes).expect("written");
    let dataset = open(&folder);
    let error = Survey::begin(&dataset, &ShardsConfig::default()).expect_err("NaN in view 1");
    assert_eq!(error.exit_code(), ExitCode::BadData, "{error}");
    assert!(error.to_string().contains("row group 0: column `embedding_1`: row 9: number 5 is NaN"), "{error}");
    let skip = ShardsConfig { on_bad_rows: OnBadRows::Skip, ..ShardsConfig::default() };
    let survey = Survey::begin(&dataset, &skip).expect("left out");
    assert_eq!((survey.mask.count(), survey.mask.skipped(2)), (1, &[9][..]));
    assert_eq!(survey.mask, Mask::scan(&dataset, 2).expect("scanned"));
    // View 0 of the row is good, but the row is never trained on.
    assert_eq!(survey.statistics.expect("scanned").rows, 63);
}
