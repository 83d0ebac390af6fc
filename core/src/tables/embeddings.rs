//! Copies embeddings from any file that users have to a Parquet file that is read like shards without coordinates.
//!
//! Sources:
//! - `.npy` and safetensors: one row per photo. The number of the row is its id.
//! - CSV with a header: a column `embedding` (or another name of [`EMBEDDING_NAMES`]) with the numbers of a row, or one
//!   column per number. The columns of ids, coordinates and authors are not part of the embedding.
//! - Lines of text, as from another program: on each line a JSON list, numbers with commas or spaces between them, or a
//!   JSON object with `embedding` and perhaps `id`.
//!
//! A bad row is left out: one that is not numbers, has another width than wanted, or is zero everywhere. The first bad
//! rows are named, and all of them are counted.

use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;

use arrow_array::types::Float16Type;
use arrow_array::{ArrayRef, FixedSizeListArray, PrimitiveArray, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use half::f16;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde::Deserialize;

use super::error::TableError;
use super::matrix::Matrix;
use super::names::{AUTHOR_NAMES, EMBEDDING_NAMES, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, columns_named};
use crate::text::shown;

/// Rows of a row group.
const GROUP_ROWS: usize = 1024;
/// Number of bad rows that are named.
const NAMED_MAX: usize = 3;
/// Largest number of bytes on one line of text. It protects against a source without line ends.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// What [`copy_embeddings`] or [`copy_lines`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopiedRows {
    /// Rows that were copied.
    pub rows: u64,
    /// Rows that were left out.
    pub bad: u64,
    /// What is wrong with the first few rows that were left out.
    pub reasons: Vec<String>,
}

/// Whether a file must be copied before its embeddings can be read: `.npy`, safetensors and CSV.
pub fn needs_copy(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    ["npy", "safetensors", "csv"].iter().any(|wanted| extension == *wanted)
}

/// Copies the embeddings of a `.npy`, safetensors or CSV file to the Parquet file `to`. `width` is the number of numbers
/// of an embedding; `None` if the first good row decides it.
pub fn copy_embeddings(from: &Path, to: &Path, width: Option<usize>) -> Result<CopiedRows, TableError> {
    let mut copy = Copy::new(from, to, width);
    if from.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
        copy_csv(from, &mut copy)?;
    } else {
        copy_matrix(from, &mut copy)?;
    }
    copy.finish()
}

/// Copies embeddings from lines of text to the Parquet file `to`. `name` is the name of the source in messages, and
/// `width` is as in [`copy_embeddings`].
pub fn copy_lines(
    source: &mut dyn BufRead,
    name: &Path,
    to: &Path,
    width: Option<usize>,
) -> Result<CopiedRows, TableError> {
    let (mut copy, mut line) = (Copy::new(name, to, width), Vec::new());
    let mut row = 0;
    loop {
        line.clear();
        let read =
            source.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(|error| TableError::io(name, &error))?;
        if read == 0 {
            return copy.finish();
        }
        if read as u64 == LINE_BYTES_MAX {
            return Err(TableError::row(name, row, format!("the line has more than {LINE_BYTES_MAX} bytes")));
        }
        let text = String::from_utf8_lossy(&line);
        if text.trim().is_empty() {
            continue;
        }
        copy.add(row, parse_line(text.trim()))?;
        row += 1;
    }
}

/// The id of a row, if it has one, and its numbers. The error says why the row is bad.
type ParsedRow = Result<(Option<String>, Vec<f32>), String>;

/// The numbers of an embedding as float16. The error names the first number that float16 cannot hold;
/// it counts from 1. It is also an error if all numbers are 0, as they are where an encoder has failed.
pub fn to_halves(values: &[f32]) -> Result<Vec<f16>, String> {
    let halves: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
    if halves.iter().all(|half| *half == f16::ZERO) {
        return Err("all numbers of the embedding are 0 in float16".to_owned());
    }
    match halves.iter().position(|half| !half.is_finite()) {
        Some(element) => {
            Err(format!("number {} is {}, wanted a number that float16 can hold", element + 1, values[element]))
        }
        None => Ok(halves),
    }
}

fn parse_line(text: &str) -> ParsedRow {
    #[derive(Deserialize)]
    struct Object {
        id: Option<serde_json::Value>,
        embedding: Vec<f32>,
    }
    if !text.starts_with('{') {
        return Ok((None, parse_numbers(text)?));
    }
    let Object { id, embedding } = serde_json::from_str(text).map_err(|error| format!("not an embedding: {error}"))?;
    let id = id.map(|id| id.as_str().map_or_else(|| id.to_string(), str::to_owned));
    Ok((id, embedding))
}

/// Numbers in a JSON list, or with commas, semicolons or spaces between them.
fn parse_numbers(text: &str) -> Result<Vec<f32>, String> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let words = inner.split(|letter: char| letter == ',' || letter == ';' || letter.is_whitespace());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let number = |word: &&str| word.parse().map_err(|_| format!("\"{}\" is not a number", shown(word)));
    words.iter().map(number).collect()
}

fn copy_matrix(from: &Path, copy: &mut Copy<'_>) -> Result<(), TableError> {
    let mut matrix = Matrix::open(from)?;
    let (rows, width) = (matrix.rows(), matrix.width());
    for first in (0..rows).step_by(GROUP_ROWS) {
        let halves = matrix.read_f16(first, GROUP_ROWS.min((rows - first) as usize))?;
        for (row, numbers) in (first as usize..).zip(halves.chunks_exact(width)) {
            copy.add(row, Ok((None, numbers.iter().map(|number| number.to_f32()).collect())))?;
        }
    }
    Ok(())
}

fn copy_csv(from: &Path, copy: &mut Copy<'_>) -> Result<(), TableError> {
    let reader = csv::ReaderBuilder::new().trim(csv::Trim::All).flexible(true).from_path(from);
    let mut reader = reader.map_err(|error| TableError::csv(from, None, &error))?;
    let header = reader.headers().map_err(|error| TableError::csv(from, None, &error))?;
    let header: Vec<String> = header.iter().map(|name| name.trim_start_matches('\u{feff}').trim().to_owned()).collect();
    let named = |accepted: &[&str]| columns_named(&header, accepted, None);
    let (id, lists) = (named(ID_NAMES).first().copied(), named(EMBEDDING_NAMES));
    let other: Vec<usize> =
        [ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, AUTHOR_NAMES].iter().flat_map(|accepted| named(accepted)).collect();
    // pandas writes its index as a column without a name.
    let is_number = |column: &usize| !other.contains(column) && !header[*column].is_empty();
    let numbers: Vec<usize> = (0..header.len()).filter(is_number).collect();
    // Names may be numbers only if they count the columns, as pandas names them.
    let mut names = numbers.iter().filter_map(|column| header[*column].parse::<f64>().ok());
    if header.iter().all(|name| name.parse::<f32>().is_ok())
        && names.by_ref().zip(0..).any(|(name, at)| name != f64::from(at))
    {
        let reason = "the first line has numbers, wanted a header with a name for each column, such as x0,x1,x2";
        return Err(TableError::file(from, reason));
    }
    if lists.is_empty() && numbers.is_empty() {
        let reason = format!("no column holds numbers of an embedding; found: {}", shown(&header.join(", ")));
        return Err(TableError::file(from, reason));
    }
    for (row, record) in reader.records().enumerate() {
        let parsed = record.map_err(|error| match error.kind() {
            csv::ErrorKind::Io(_) => Err(TableError::csv(from, None, &error)),
            _ => Ok(error.to_string()),
        });
        let record = match parsed {
            Ok(record) => record,
            Err(Ok(reason)) => {
                copy.add(row, Err(reason))?;
                continue;
            }
            Err(Err(error)) => return Err(error),
        };
        let cell = |column: usize| record.get(column).unwrap_or_default();
        let values = match lists.first() {
            Some(column) => parse_numbers(cell(*column)),
            None => numbers
                .iter()
                .map(|column| {
                    let text = cell(*column);
                    text.parse().map_err(|_| {
                        format!("column `{}` is \"{}\", wanted a number", shown(&header[*column]), shown(text))
                    })
                })
                .collect(),
        };
        let id = id.map(|column| cell(column).to_owned()).filter(|id| !id.is_empty());
        copy.add(row, values.map(|values| (id, values)))?;
    }
    Ok(())
}

/// Writes rows to a Parquet file.
struct Copy<'a> {
    from: &'a Path,
    to: &'a Path,
    /// Numbers of an embedding. Without a given width, the first good row decides it.
    width: Option<usize>,
    ids: Vec<String>,
    halves: Vec<f16>,
    writer: Option<ArrowWriter<File>>,
    copied: CopiedRows,
}

impl<'a> Copy<'a> {
    fn new(from: &'a Path, to: &'a Path, width: Option<usize>) -> Self {
        let copied = CopiedRows::default();
        Self { from, to, width, ids: Vec::new(), halves: Vec::new(), writer: None, copied }
    }

    fn add(&mut self, row: usize, parsed: ParsedRow) -> Result<(), TableError> {
        let checked = parsed.and_then(|(id, values)| self.checked(&values).map(|halves| (id, halves)));
        let (id, halves) = match checked {
            Ok(good) => good,
            Err(reason) => {
                self.copied.bad += 1;
                if self.copied.reasons.len() < NAMED_MAX {
                    self.copied.reasons.push(TableError::row(self.from, row, reason).to_string());
                }
                return Ok(());
            }
        };
        self.width = Some(halves.len());
        self.ids.push(id.unwrap_or_else(|| row.to_string()));
        self.halves.extend(halves);
        self.copied.rows += 1;
        if self.ids.len() == GROUP_ROWS { self.write_group() } else { Ok(()) }
    }

    /// The numbers as float16, if the row is good.
    fn checked(&self, values: &[f32]) -> Result<Vec<f16>, String> {
        if values.is_empty() {
            return Err("the embedding is empty".to_owned());
        }
        if let Some(width) = self.width.filter(|width| values.len() != *width) {
            return Err(format!("the embedding has {} numbers, wanted {width}", values.len()));
        }
        to_halves(values)
    }

    fn write_group(&mut self) -> Result<(), TableError> {
        let failed = |error: &dyn std::fmt::Display| TableError::io(self.to, &std::io::Error::other(error.to_string()));
        let item = Arc::new(Field::new("item", DataType::Float16, false));
        let width = i32::try_from(self.width.unwrap_or_default()).map_err(|error| failed(&error))?;
        let numbers = Arc::new(PrimitiveArray::<Float16Type>::from(std::mem::take(&mut self.halves)));
        let lists = FixedSizeListArray::try_new(item.clone(), width, numbers, None).map_err(|error| failed(&error))?;
        let columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(std::mem::take(&mut self.ids))), Arc::new(lists)];
        let embedding = Field::new("embedding", DataType::FixedSizeList(item, width), false);
        let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Utf8, false), embedding]));
        let batch = RecordBatch::try_new(schema.clone(), columns).map_err(|error| failed(&error))?;
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => {
                let file = File::create(self.to).map_err(|error| TableError::io(self.to, &error))?;
                let properties = WriterProperties::builder().set_max_row_group_row_count(Some(GROUP_ROWS)).build();
                let created = ArrowWriter::try_new(file, schema, Some(properties)).map_err(|error| failed(&error))?;
                none.insert(created)
            }
        };
        writer.write(&batch).map_err(|error| failed(&error))
    }

    fn finish(mut self) -> Result<CopiedRows, TableError> {
        if !self.ids.is_empty() {
            self.write_group()?;
        }
        let Some(writer) = self.writer else {
            let first = self.copied.reasons.first().map_or_else(String::new, |reason| format!("; {reason}"));
            return Err(TableError::file(self.from, format!("it has no embedding that can be used{first}")));
        };
        let closed = writer.close().map_err(|error| TableError::io(self.to, &std::io::Error::other(error)));
        closed.map(|_| self.copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(source: &[u8]) -> (CopiedRows, Vec<(String, Vec<f32>)>) {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let to = folder.path().join("copy.parquet");
        let found = copy_lines(&mut &source[..], Path::new("stdin"), &to, None).expect("the lines can be copied");
        (found, rows_of(&to))
    }

    fn rows_of(path: &Path) -> Vec<(String, Vec<f32>)> {
        use arrow_array::cast::AsArray as _;
        let file = File::open(path).expect("the file exists");
        let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file)
            .and_then(|builder| builder.build())
            .expect("the file is Parquet");
        let mut rows = Vec::new();
        for batch in reader {
            let batch = batch.expect("the rows can be read");
            let (ids, lists) = (batch.column(0).as_string::<i32>(), batch.column(1).as_fixed_size_list());
            for row in 0..batch.num_rows() {
                let numbers = lists.value(row);
                let halves = numbers.as_primitive::<Float16Type>().values();
                rows.push((ids.value(row).to_owned(), halves.iter().map(|half| half.to_f32()).collect()));
            }
        }
        rows
    }

    #[test]
    fn lines_of_all_forms_are_read_and_bad_ones_are_named() {
        let (found, rows) =
            copied(b"[1, 2.5]\n\n3 4\n{\"id\": \"a\", \"embedding\": [5, 6]}\n7,x\n[1]\n1e9,0\n8;9\n\xff\n");
        let texts = [("0", [1.0, 2.5]), ("1", [3.0, 4.0]), ("a", [5.0, 6.0]), ("6", [8.0, 9.0])];
        assert_eq!(rows, texts.map(|(id, numbers)| (id.to_owned(), numbers.to_vec())));
        assert_eq!((found.rows, found.bad), (4, 4));
        for (reason, part) in
            found.reasons.iter().zip(["row 3: \"x\" is not", "row 4: the embedding has 1", "row 5: number 1 "])
        {
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn wanted_width_decides_and_text_of_the_source_is_shortened_and_escaped() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let to = folder.path().join("copy.parquet");
        let source = format!("1 2 3\n4 5\n0 -0\n{}\n\u{1b}]0;x\u{7} 1\n", "x".repeat(1 << 20));
        let found = copy_lines(&mut source.as_bytes(), Path::new("stdin"), &to, Some(2)).expect("a row is usable");
        assert_eq!(rows_of(&to), [("1".to_owned(), vec![4.0, 5.0])]);
        assert_eq!((found.rows, found.bad), (1, 4));
        let long = "x".repeat(40);
        let wanted = [
            "stdin: row 0: the embedding has 3 numbers, wanted 2",
            "stdin: row 2: all numbers of the embedding are 0 in float16",
            &format!("stdin: row 3: \"{long}...\" is not a number"),
        ];
        assert_eq!(found.reasons, wanted);
        let found = copy_lines(&mut "\u{1b}]0x\u{7}\n1\n".as_bytes(), Path::new("stdin"), &to, None);
        let reasons = found.expect("a row is usable").reasons;
        assert!(!reasons[0].contains('\u{1b}') && reasons[0].contains("\\u{1b}]0x\\u{7}"), "{reasons:?}");
    }

    #[test]
    fn nothing_usable_is_an_error_that_says_why() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let to = folder.path().join("copy.parquet");
        let error = copy_lines(&mut "x\n".as_bytes(), Path::new("stdin"), &to, None).expect_err("no line is usable");
        assert_eq!(
            error.to_string(),
            "stdin: it has no embedding that can be used; stdin: row 0: \"x\" is not a number"
        );
    }

    #[test]
    fn csv_may_have_one_column_of_lists_or_one_column_per_number() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let (from, to) = (folder.path().join("a.csv"), folder.path().join("copy.parquet"));
        for text in ["path,lat,embedding\np,1,\"[1, 2]\"\nq,1,\"3 4\"\n", "e0,e1,lat,path\n1,2,9,p\n3,4,9,q\n"] {
            std::fs::write(&from, text).expect("the folder is writable");
            assert!(needs_copy(&from));
            assert_eq!(copy_embeddings(&from, &to, Some(2)).expect("the file is valid").rows, 2);
            assert_eq!(rows_of(&to), [("p".to_owned(), vec![1.0, 2.0]), ("q".to_owned(), vec![3.0, 4.0])]);
        }
        // As pandas writes it, with and without its index.
        for text in ["0,1\n1,2\n3,4\n", ",0,1\n0,1,2\n1,3,4\n"] {
            std::fs::write(&from, text).expect("the folder is writable");
            assert_eq!(copy_embeddings(&from, &to, None).expect("the file is valid").rows, 2, "{text}");
            assert_eq!(rows_of(&to)[1].1, [3.0, 4.0], "{text}");
        }
        std::fs::write(&from, "1.5,2\n3,4\n").expect("the folder is writable");
        let error = copy_embeddings(&from, &to, None).expect_err("there is no header").to_string();
        assert!(error.contains("the first line has numbers, wanted a header"), "{error}");
    }

    #[test]
    fn npy_of_many_rows_is_copied_in_groups() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let (from, to) = (folder.path().join("a.npy"), folder.path().join("copy.parquet"));
        let rows = GROUP_ROWS + 5;
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 2), }}");
        let mut bytes =
            [&b"\x93NUMPY\x01\x00"[..], &118_u16.to_le_bytes(), format!("{header:<117}\n").as_bytes()].concat();
        (0..2 * rows).for_each(|number| bytes.extend((number as f32 / 64.0).to_le_bytes()));
        std::fs::write(&from, bytes).expect("the folder is writable");
        assert_eq!(copy_embeddings(&from, &to, None).expect("the file is valid").rows, rows as u64);
        let copied = rows_of(&to);
        assert_eq!(copied[rows - 1].0, (rows - 1).to_string());
        assert_eq!(copied[1].1, [2.0 / 64.0, 3.0 / 64.0]);
    }
}
