//! `shards build`: makes shards from one file of embeddings per view, and from a table of ids and coordinates if there
//! is one.
//!
//! Row n of the table and row n of every file of embeddings belong together. All files are read a few thousand rows at
//! a time. Without a table, row numbers are the ids, and no row has coordinates.
//!
//! A row with bad values or a duplicate identifier is an error, whose message names the file and the row. With
//! `on_bad_rows = skip`, such rows are skipped and counted instead. It is always an error if the files differ in their
//! number of rows, or if the embeddings differ in their width. After an error the output folder is unchanged: it does
//! not exist, or it is still the old folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::f16;
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::tables::{ColumnNames, Matrix, PlacesPresent, TableError, TableReader, TableRow};
use twox_hash::XxHash3_128;

use super::error::{SKIP_ADVICE, ShardsError};
use super::format::{ImageHead, Manifest, ShardWriter, WriterOptions, WriterRows, first_not_finite};

/// Number of rows to read at a time.
const CHUNK_ROWS: usize = 4096;

/// Inputs of [`build`].
#[derive(Debug, Clone)]
pub struct Build<'a> {
    /// CSV or Parquet file with ids and coordinates, if there is one.
    pub table: Option<&'a Path>,
    /// Which rows have coordinates. Without a table, no row has any.
    pub places: PlacesPresent,
    /// One `.npy` or safetensors file per view.
    pub embeddings: &'a [PathBuf],
    /// Column names, and how to handle bad rows.
    pub config: &'a ShardsConfig,
    /// Whether to replace an existing output folder.
    pub overwrite: bool,
}

impl Build<'_> {
    /// The file that errors about rows name: the table, or the first file of embeddings.
    fn named(&self) -> &Path {
        self.table.unwrap_or(&self.embeddings[0])
    }

    /// The rows of the table. Without a table, `rows` rows without id and coordinates.
    fn table_rows(&self, rows: u64) -> Result<Box<dyn Iterator<Item = Result<TableRow, TableError>>>, TableError> {
        let ShardsConfig { id_column, latitude_column, longitude_column, .. } = self.config;
        let names =
            ColumnNames { id: Some(id_column), latitude: Some(latitude_column), longitude: Some(longitude_column) };
        Ok(match self.table {
            Some(table) => Box::new(TableReader::open_with(self.places, table, names, true)?),
            None => Box::new((0..rows).map(|_| Ok(TableRow { id: None, place: None }))),
        })
    }
}

/// Builds a folder of shards. Returns its manifest and the number of skipped rows.
pub fn build(inputs: &Build<'_>, out: &Path) -> Result<(Manifest, u64), ShardsError> {
    if inputs.embeddings.is_empty() {
        return Err(ShardsError::Argument("--embeddings is missing; give one file per view".to_owned()));
    }
    if inputs.table.is_none() && inputs.places != PlacesPresent::None {
        let reason = "--places: without --table, no row has coordinates; give a --table, or --places none";
        return Err(ShardsError::Argument(reason.to_owned()));
    }
    let mut matrices = inputs.embeddings.iter().map(|path| Matrix::open(path)).collect::<Result<Vec<_>, _>>()?;
    let (rows, width) = common_shape(inputs.embeddings, &matrices)?;
    let mut table = inputs.table_rows(rows)?;
    let width_small = u32::try_from(width)
        .map_err(|_| ShardsError::Argument(format!("embeddings have width {width}, wanted a width below 2^32")))?;
    let name = inputs.named().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut writer = ShardWriter::create(
        out,
        WriterOptions {
            places: inputs.places,
            overwrite: inputs.overwrite,
            ..WriterOptions::new(width_small, matrices.len() as u32, format!("built from {name}"), ImageHead::None)
        },
    )?;
    let (mut first, mut skipped, mut seen_ids) = (0_u64, SkippedRows::default(), RowsById::default());
    loop {
        let chunk: Vec<_> = table.by_ref().take(CHUNK_ROWS).collect();
        if chunk.is_empty() {
            break;
        }
        let end = first + chunk.len() as u64;
        if end > rows {
            return Err(length_mismatch(inputs, format!("more than {rows}"), rows));
        }
        let views = matrices.iter_mut().map(|matrix| matrix.read_f16(first, chunk.len()));
        let views = views.collect::<Result<Vec<_>, _>>()?;
        let good = usable_rows(inputs, chunk, &matrices, &views, first, &mut seen_ids, &mut skipped)?;
        writer.push(&good)?;
        first = end;
    }
    if first != rows {
        return Err(length_mismatch(inputs, first.to_string(), rows));
    }
    if let Some(first) = &skipped.first_reason {
        tracing::warn!(
            "skipped {} of {rows} rows, because they cannot be used; the first of them: {first}",
            skipped.count
        );
    }
    if skipped.count == rows {
        return Err(TableError::file(inputs.named(), "none of its rows can be used").into());
    }
    Ok((writer.finish()?, skipped.count))
}

/// Maps each identifier seen so far to the last row that has it. The key is a 128-bit hash of the identifier, so that
/// two different identifiers practically never have the same key.
type RowsById = HashMap<u128, u64>;

/// Rows that were skipped because they cannot be used.
#[derive(Default)]
struct SkippedRows {
    count: u64,
    first_reason: Option<String>,
}

fn length_mismatch(inputs: &Build<'_>, got: String, rows: u64) -> ShardsError {
    let matrix = inputs.embeddings[0].display();
    TableError::file(inputs.named(), format!("{got} rows, but {matrix} has {rows}")).into()
}

/// Returns the number of rows and the width of the matrices. It is an error if they are not the same in all matrices.
fn common_shape(paths: &[PathBuf], matrices: &[Matrix]) -> Result<(u64, usize), TableError> {
    let (rows, width) = (matrices[0].rows(), matrices[0].width());
    for (path, matrix) in paths.iter().zip(matrices) {
        if (matrix.rows(), matrix.width()) != (rows, width) {
            let got = format!("{} x {} numbers", matrix.rows(), matrix.width());
            return Err(TableError::file(path, format!("{got}, but {} has {rows} x {width}", paths[0].display())));
        }
    }
    Ok((rows, width))
}

/// Returns the usable rows of a chunk. `first` is the number of the chunk's first row. Depending on `on_bad_rows`, a
/// bad row is an error, or is left out and counted in `skipped`.
fn usable_rows(
    inputs: &Build<'_>,
    chunk: Vec<Result<TableRow, TableError>>,
    matrices: &[Matrix],
    views: &[Vec<f16>],
    first: u64,
    seen_ids: &mut RowsById,
    skipped: &mut SkippedRows,
) -> Result<WriterRows, TableError> {
    let mut good = WriterRows::new(views.len());
    let width = matrices[0].width();
    for ((offset, row), number) in chunk.into_iter().enumerate().zip(first..) {
        let embedding = |view: usize| &views[view][offset * width..(offset + 1) * width];
        let usable = row.and_then(|TableRow { id, place }| {
            for (view, matrix) in matrices.iter().enumerate() {
                if let Some((element, reason)) = first_not_finite(embedding(view)) {
                    let reason = format!("as float16, element {element} is {reason}");
                    return Err(matrix.bad_row(number, &reason));
                }
            }
            let id = id.unwrap_or_else(|| number.to_string());
            if let Some(first) = seen_ids.insert(XxHash3_128::oneshot(id.as_bytes()), number) {
                let reason = format!("duplicate identifier {id:?}, also in row {first}");
                return Err(TableError::row(inputs.named(), number as usize, reason));
            }
            Ok((id, place))
        });
        match usable {
            Ok((id, place)) => {
                good.ids.push(id);
                if inputs.places != PlacesPresent::None {
                    good.latitudes.push(place.map_or(f64::NAN, |place| place.latitude().0));
                    good.longitudes.push(place.map_or(f64::NAN, |place| place.longitude().0));
                }
                (0..views.len()).for_each(|view| good.views[view].extend_from_slice(embedding(view)));
            }
            Err(error @ TableError::Row { .. }) if inputs.config.on_bad_rows == OnBadRows::Skip => {
                skipped.count += 1;
                skipped.first_reason.get_or_insert_with(|| error.to_string());
            }
            Err(TableError::Row { path, row, reason }) => {
                return Err(TableError::Row { path, row, reason: format!("{reason}; {SKIP_ADVICE}") });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(good)
}
