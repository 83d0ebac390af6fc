//! If data without a manifest changes after a run has begun, resuming the run or reading the data gives an error that
//! names the column chunk.

use std::fs;
use std::path::Path;

use locdiff::shards::{
    BlockRows, Blocks, Bookmark, Contents, DataLayout, Dataset, MANIFEST_NAME, Mask, Plan, PlanOptions, ShardWriter,
    ShardsError, Survey, WriterRows,
};
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};

use crate::shards::support::{ROWS, WIDTH, embeddings, expected, options, read_all};

fn open(folder: &Path) -> Dataset {
    Dataset::open(&folder.display().to_string(), &ShardsConfig::default()).expect("the shards are valid")
}

/// Writes shards of sixty-four rows and removes the manifest. The identifiers are so long that the first 64 KiB of a
/// file contain no embedding.
fn write_without_manifest(folder: &Path) {
    let mut writer = ShardWriter::create(folder, options()).expect("the output folder does not exist");
    let ids: Vec<String> = (0..ROWS).map(|row| format!("{row:0>8192}")).collect();
    let BlockRows { latitudes, longitudes, .. } = expected(0);
    let rows = WriterRows { ids, latitudes, longitudes, views: vec![embeddings(0), embeddings(1)] };
    writer.push(&rows).expect("the rows are valid");
    writer.finish().expect("the shards can be written");
    fs::remove_file(folder.join(MANIFEST_NAME)).expect("the file exists");
}

/// Flips the lowest bit of one number in the second file. The number is in view 1 of row 9 of row group 0, which is
/// block 2 of the data set. A second call restores the bit.
fn flip_bit(folder: &Path) {
    let path = folder.join("part-00001.parquet");
    let mut bytes = fs::read(&path).expect("the file can be read");
    let row = &expected(1).embeddings[(48 + 9) * WIDTH * 2..][..WIDTH * 2];
    // The first five numbers of the row occur in this sequence only once in the file, so they identify the row. The bit
    // to flip is in the sixth number, so the row is found even if an earlier call has flipped the bit.
    let at = bytes.windows(10).position(|window| window == &row[..10]).expect("the file has the row");
    bytes[at + 10] ^= 1;
    fs::write(&path, bytes).expect("the file can be written");
}

#[track_caller]
fn assert_data_changed<T>(result: Result<T, ShardsError>) {
    let error = result.err().expect("the result is not an error");
    assert_eq!(error.exit_code(), ExitCode::DataChanged, "wrong exit code for: {error}");
    let message = "part-00001.parquet: row group 0: column `embedding_1`: the data has changed";
    assert!(error.to_string().contains(message), "wrong error: {error}");
}

fn bookmark(dataset: &Dataset, contents: Option<Contents>) -> Bookmark {
    let options = PlanOptions::new(&ShardsConfig::default(), 7, 16);
    let plan = Plan::new(DataLayout::of(dataset), Mask::none(), options).expect("the plan is valid");
    let mark = Bookmark { contents, ..plan.bookmark(plan.start()) };
    // A checkpoint stores a bookmark as JSON, so the bookmark is converted to JSON and back.
    serde_json::from_str(&serde_json::to_string(&mark).expect("the value can be written as JSON"))
        .expect("the JSON was just written")
}

/// Returns `contents` with its file versions replaced by the current versions of the files of `dataset`.
fn with_current_versions(contents: &Contents, dataset: &Dataset) -> Contents {
    let [mut then, now] = [contents, &dataset.read_contents().expect("the blocks are valid")]
        .map(|contents| serde_json::to_value(contents).expect("the value can be written as JSON"));
    then["versions"] = now["versions"].clone();
    serde_json::from_value(then).expect("the JSON was just written")
}

#[test]
fn changed_data_without_a_manifest_is_refused_on_resume_and_on_read() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("data");
    write_without_manifest(&folder);
    let config = ShardsConfig::default();
    let location = folder.display().to_string();
    let mut first = open(&folder);
    let survey = Survey::begin(&first, &config).expect("the data is valid");
    let contents = survey.contents.clone().expect("data without a manifest is hashed");
    assert_eq!(contents, first.read_contents().expect("the blocks are valid"), "the scan gave wrong checksums");
    let mark = bookmark(&first, survey.contents.clone());
    let resumed = Survey::resume(&mut open(&folder), &config, &mark, &location).expect("nothing has changed");
    assert_eq!((resumed.contents.as_ref(), resumed.mask), (Some(&contents), survey.mask));

    // The file changes during training, while the data set is open. Reading the changed chunk again gives an error.
    first.expect_contents(Some(contents.clone())).expect("the contents have the right shape");
    flip_bit(&folder);
    assert_data_changed(read_all(&first, 1));
    assert_eq!(read_all(&first, 0).expect("the other view is undamaged"), expected(0));
    // There are three ways to resume after the change:
    // - `mark` records the file version from before the change, so resuming reads the file again and finds the change.
    // - `unchanged_versions` records the current file versions, so resuming reads no embeddings. The change is found
    //   only when the changed chunk is read.
    // - With `on_bad_rows = skip`, resuming scans all rows and always finds the change.
    let mut again = open(&folder);
    assert_eq!(
        again.fingerprint(),
        first.fingerprint(),
        "the fingerprint covers the flipped bit, so this test proves nothing"
    );
    assert_data_changed(Survey::resume(&mut again, &config, &mark, &location));
    let unchanged_versions = bookmark(&again, Some(with_current_versions(&contents, &again)));
    Survey::resume(&mut again, &config, &unchanged_versions, &location).expect("the versions have not changed");
    assert_data_changed(read_all(&again, 1));
    let skip = ShardsConfig { on_bad_rows: OnBadRows::Skip, ..config.clone() };
    assert_data_changed(Survey::resume(&mut open(&folder), &skip, &unchanged_versions, &location));
    // When the bit is flipped back, the data is the same as at the beginning, although the file has a new version.
    flip_bit(&folder);
    let resumed =
        Survey::resume(&mut open(&folder), &config, &mark, &location).expect("the bytes are the original ones");
    assert_ne!(resumed.contents, Some(contents), "resuming recorded the old file versions instead of the current ones");
    // If the bookmark of a checkpoint has no `contents` (checksums), resuming computes them and records them.
    let without_contents = bookmark(&first, None);
    let resumed = Survey::resume(&mut open(&folder), &config, &without_contents, &location)
        .expect("a bookmark needs no contents");
    assert_eq!(resumed.contents, Some(open(&folder).read_contents().expect("the blocks are valid")));
}

#[test]
fn bad_rows_are_found_before_the_first_step_and_left_out_of_statistics() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("data");
    write_without_manifest(&folder);
    let path = folder.join("part-00001.parquet");
    let mut bytes = fs::read(&path).expect("the file can be read");
    let row = &expected(1).embeddings[(48 + 9) * WIDTH * 2..][..WIDTH * 2];
    let at = bytes.windows(row.len()).position(|window| window == row).expect("the file has the row");
    bytes[at + 11] = 0x7e;
    fs::write(&path, bytes).expect("the file can be written");
    let dataset = open(&folder);
    let error = Survey::begin(&dataset, &ShardsConfig::default()).expect_err("view 1 has NaN");
    assert_eq!(error.exit_code(), ExitCode::BadData, "wrong exit code for: {error}");
    assert!(
        error.to_string().contains("row group 0: column `embedding_1`: row 9: number 5 is NaN"),
        "wrong error: {error}"
    );
    let skip = ShardsConfig { on_bad_rows: OnBadRows::Skip, ..ShardsConfig::default() };
    let survey = Survey::begin(&dataset, &skip).expect("the row is skipped");
    assert_eq!((survey.mask.count(), survey.mask.skipped(2)), (1, &[9][..]));
    assert_eq!(survey.mask, Mask::scan(&dataset, 2).expect("the blocks can be read"));
    // View 0 of row 9 is valid, but the statistics leave out the whole row, because training never uses it.
    assert_eq!(survey.statistics.expect("a new run computes statistics").rows, 63);
}
