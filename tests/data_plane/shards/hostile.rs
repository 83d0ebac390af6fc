//! If a footer makes false statements, the error names the file and the row group. A row with a list of the wrong
//! length gives an error or is skipped. The reader never allocates memory for rows that do not exist.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, ListBuilder};
use arrow_array::{ArrayRef, FixedSizeBinaryArray, Float64Array, RecordBatch, UInt64Array};
use locdiff::shards::{Blocks, Dataset, MANIFEST_NAME, Mask, ShardsError, verify};
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::{
    ColumnChunkMetaData, ColumnChunkMetaDataBuilder, ParquetMetaDataReader, ParquetMetaDataWriter,
};

use crate::shards::support::{problems, write};

fn open(path: &Path, on_bad_rows: OnBadRows) -> Result<Dataset, ShardsError> {
    Dataset::open(&path.display().to_string(), &ShardsConfig { on_bad_rows, ..ShardsConfig::default() })
}

/// A false statement in a footer about a row group. `rows` replaces the number of rows in the row group. `chunk`
/// changes the metadata of one column chunk of the row group; `column` is the index of this column chunk.
struct Lie {
    rows: Option<i64>,
    column: usize,
    chunk: fn(ColumnChunkMetaDataBuilder) -> ColumnChunkMetaDataBuilder,
}

/// Rewrites the file with a footer that makes a false statement about row group 1.
fn write_false_footer(path: &Path, lie: &Lie) {
    let bytes = fs::read(path).expect("the file can be read");
    let length =
        u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().expect("the slice has four bytes")) as usize;
    let (pages, footer) = bytes.split_at(bytes.len() - 8 - length);
    let metadata = ParquetMetaDataReader::decode_metadata(&footer[..length]).expect("the footer is valid");
    let mut groups = metadata.row_groups().to_vec();
    let mut columns: Vec<ColumnChunkMetaData> = groups[1].columns().to_vec();
    columns[lie.column] =
        (lie.chunk)(columns[lie.column].clone().into_builder()).build().expect("the chunk metadata is complete");
    let rows = lie.rows.unwrap_or_else(|| groups[1].num_rows());
    groups[1] = groups[1]
        .clone()
        .into_builder()
        .set_num_rows(rows)
        .set_column_metadata(columns)
        .build()
        .expect("the row group has all columns");
    let metadata = metadata.into_builder().set_row_groups(groups).build();
    let mut lying = pages.to_vec();
    ParquetMetaDataWriter::new(&mut lying, &metadata).finish().expect("the footer can be written");
    fs::write(path, lying).expect("the file can be written");
}

#[test]
fn false_footer_is_refused_with_file_and_row_group() {
    let (id, lat, embedding) = (0, 1, 3);
    let lies = [
        ("a negative size", Lie { rows: None, column: embedding, chunk: |chunk| chunk.set_total_compressed_size(-5) }),
        ("a negative offset", Lie { rows: None, column: lat, chunk: |chunk| chunk.set_data_page_offset(-1) }),
        ("ids beyond the end", Lie { rows: None, column: id, chunk: |chunk| chunk.set_data_page_offset(1 << 40) }),
        (
            "sizes that wrap around",
            Lie { rows: None, column: lat, chunk: |chunk| chunk.set_total_compressed_size(i64::MAX) },
        ),
        ("u32::MAX rows", Lie { rows: Some(u32::MAX.into()), column: embedding, chunk: |chunk| chunk }),
        (
            "u32::MAX rows and 2^40 values",
            Lie { rows: Some(u32::MAX.into()), column: embedding, chunk: |chunk| chunk.set_num_values(1 << 40) },
        ),
        ("more rows than fit in u32", Lie { rows: Some(1 << 40), column: embedding, chunk: |chunk| chunk }),
        ("a negative number of rows", Lie { rows: Some(-1), column: embedding, chunk: |chunk| chunk }),
        ("wide rows", Lie { rows: None, column: embedding, chunk: |chunk| chunk.set_num_values(24 << 21) }),
    ];
    for (name, lie) in lies {
        let scratch = tempfile::tempdir().expect("a temporary folder can be created");
        let folder = scratch.path().join("data");
        write(&folder);
        fs::remove_file(folder.join(MANIFEST_NAME)).expect("the file exists");
        write_false_footer(&folder.join("part-00000.parquet"), &lie);
        let error =
            open(&folder, OnBadRows::Error).err().unwrap_or_else(|| panic!("a footer with {name} was accepted"));
        let (code, text) = (error.exit_code(), error.to_string());
        assert!(matches!(code, ExitCode::Corrupt | ExitCode::BadData), "{name}: wrong exit code {code:?} for: {text}");
        assert!(
            text.contains("part-00000.parquet") && text.contains("row group 1"),
            "{name}: file or row group is not named in: {text}"
        );
        // With `on_bad_rows = skip`, opening must fail with the same error, except in the case `wide rows`. In that
        // case the reader takes the width from the lists themselves, and no row is bad.
        match open(&folder, OnBadRows::Skip) {
            Ok(dataset) => {
                assert_eq!((name, dataset.width()), ("wide rows", 8));
                assert_eq!(Mask::scan(&dataset, 1).map(|mask| mask.count()).expect("the blocks can be read"), 0);
            }
            Err(error) => assert_eq!(
                (error.exit_code(), error.to_string()),
                (code, text),
                "{name}: the error changes if bad rows are skipped"
            ),
        }
    }
}

#[test]
fn absurd_width_is_refused() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("data");
    write(&folder);
    fs::remove_file(folder.join(MANIFEST_NAME)).expect("the file exists");
    for part in ["part-00000.parquet", "part-00001.parquet"] {
        let path = folder.join(part);
        let bytes = fs::read(&path).expect("the file can be read");
        let length =
            u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().expect("the slice has four bytes")) as usize;
        let (pages, footer) = bytes.split_at(bytes.len() - 8 - length);
        let metadata = ParquetMetaDataReader::decode_metadata(&footer[..length]).expect("the footer is valid");
        let wide = |chunk: &ColumnChunkMetaData, rows: i64| {
            chunk.clone().into_builder().set_num_values(rows << 21).build().expect("the chunk metadata is complete")
        };
        let groups = metadata.row_groups().iter().map(|group| {
            let mut columns = group.columns().to_vec();
            columns.iter_mut().skip(3).for_each(|chunk| *chunk = wide(chunk, group.num_rows()));
            group.clone().into_builder().set_column_metadata(columns).build().expect("the row group has all columns")
        });
        let groups = groups.collect();
        let metadata = metadata.into_builder().set_row_groups(groups).build();
        let mut lying = pages.to_vec();
        ParquetMetaDataWriter::new(&mut lying, &metadata).finish().expect("the footer can be written");
        fs::write(path, lying).expect("the file can be written");
    }
    let error = open(&folder, OnBadRows::Error).err().expect("the width was accepted");
    assert_eq!(error.exit_code(), ExitCode::BadData, "wrong exit code for: {error}");
    assert!(error.to_string().contains("embeddings of width 2097152, wanted at most 1048576"), "wrong error: {error}");
}

/// Writes a file with one row group for each element of `groups`. An element holds the lengths of the lists in its row
/// group. `ids` makes the identifiers of a row group from the index of its first row and its number of rows.
fn write_ragged(path: &Path, groups: &[&[usize]], ids: impl Fn(usize, usize) -> ArrayRef) {
    let mut writer = None;
    let mut first = 0;
    for lengths in groups {
        let mut lists = ListBuilder::new(Float32Builder::new());
        for length in *lengths {
            (0..*length).for_each(|index| lists.values().append_value(index as f32));
            lists.append(true);
        }
        let degrees: ArrayRef = Arc::new(Float64Array::from(vec![1.0; lengths.len()]));
        let columns: [(&str, ArrayRef); 4] = [
            ("id", ids(first, lengths.len())),
            ("lat", Arc::clone(&degrees)),
            ("lon", degrees),
            ("embedding", Arc::new(lists.finish())),
        ];
        first += lengths.len();
        let batch = RecordBatch::try_from_iter(columns).expect("the columns have equal lengths");
        let writer = writer.get_or_insert_with(|| {
            ArrowWriter::try_new(File::create(path).expect("the file can be created"), batch.schema(), None)
                .expect("the schema is valid")
        });
        writer.write(&batch).expect("the file can be written");
        writer.flush().expect("the file can be written");
    }
    writer.expect("there is at least one row group").close().expect("the file can be written");
}

fn numbers(first: usize, count: usize) -> ArrayRef {
    Arc::new(UInt64Array::from_iter_values((first..first + count).map(|row| u64::MAX - row as u64)))
}

#[test]
fn lists_of_the_wrong_length_are_skipped_in_every_row_group() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("ragged.parquet");
    // Row group 0 has a single row with a list of 3 numbers. Only the other row groups show that this length is wrong.
    // Row group 1 has two rows. Their mean length is the right width, 8, but neither row has this length. Row group 2
    // is the largest and determines the width.
    write_ragged(&path, &[&[3], &[4, 12], &[8, 8, 8, 5]], numbers);
    let error = open(&path, OnBadRows::Error).err().expect("the ragged lists were accepted");
    assert_eq!(error.exit_code(), ExitCode::BadData, "wrong exit code for: {error}");
    let dataset = open(&path, OnBadRows::Skip).expect("the shards are valid");
    assert_eq!((dataset.width(), dataset.block_rows()), (8, &[1, 2, 4][..]));
    let mask = Mask::scan(&dataset, 1).expect("the blocks can be read");
    assert_eq!((mask.skipped(0), mask.skipped(1), mask.skipped(2)), (&[0][..], &[0, 1][..], &[3][..]));
    let (found_problems, found) = verify(&dataset, OnBadRows::Skip).expect("the files can be read");
    assert_eq!((found_problems, found), (Vec::new(), mask), "verify and training skip different rows");
    let strict = problems(&dataset);
    assert_eq!(strict.len(), 4, "wanted four problems, got {strict:?}");
    assert!(strict[0].message.contains("row group 0: column `embedding`: row 0: a list of 3 numbers, wanted 8"));
    // This file has a single row group. The mean length of its lists is 6, a whole number, but no list has this length.
    write_ragged(&path, &[&[8, 8, 8, 4, 2]], numbers);
    assert_eq!(open(&path, OnBadRows::Skip).expect("the shards are valid").width(), 8);
}

#[test]
fn identifiers_of_every_type_are_verified() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("ids.parquet");
    write_ragged(&path, &[&[2, 2, 2]], numbers);
    assert!(
        problems(&open(&path, OnBadRows::Error).expect("the shards are valid")).is_empty(),
        "verify found problems in uint64 identifiers"
    );
    let digests = |same: bool| {
        move |first: usize, count: usize| -> ArrayRef {
            let digest = |row: usize| if same { [7_u8, 255] } else { [row as u8, 255] };
            Arc::new(
                FixedSizeBinaryArray::try_from_iter((first..first + count).map(digest))
                    .expect("all digests have equal lengths"),
            )
        }
    };
    write_ragged(&path, &[&[2, 2]], digests(false));
    assert!(
        problems(&open(&path, OnBadRows::Error).expect("the shards are valid")).is_empty(),
        "verify found problems in fixed-size binary identifiers"
    );
    write_ragged(&path, &[&[2, 2]], digests(true));
    let problems = problems(&open(&path, OnBadRows::Error).expect("the shards are valid"));
    assert_eq!(problems.len(), 1, "wanted one problem, got {problems:?}");
    assert!(
        problems[0].message.contains("column `id`: row 1: duplicate identifier \"0x07ff\""),
        "wrong problem: {problems:?}"
    );
}
