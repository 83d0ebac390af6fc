//! Decodes values directly from the pages of a column chunk.
//!
//! Supports chunks without nulls in which every list has the right width. Their pages may be PLAIN or dictionary pages,
//! of version 1 or 2, with any codec of the `parquet` crate. Reports all other chunks as unsupported;
//! [`super::careful`] reads them.

use std::sync::Arc;

use bytes::{Buf, Bytes};
use half::f16;
use half::slice::HalfFloatSliceExt;
use parquet::basic::Encoding;
use parquet::column::page::{Page, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescriptor;

use super::levels::{Run, Runs, all_defined, lists_have_width, unpacked};

/// The number type that a column stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    Float16,
    Float32,
    Float64,
    Int32,
    Int64,
}

impl Number {
    fn bytes(self) -> usize {
        match self {
            Self::Float16 => 2,
            Self::Float32 | Self::Int32 => 4,
            Self::Float64 | Self::Int64 => 8,
        }
    }
}

/// The bytes of one column chunk. Bytes are addressed by their offset in the file.
#[derive(Debug, Clone)]
pub(crate) struct ChunkBytes {
    pub(crate) bytes: Bytes,
    /// File offset of the first byte.
    pub(crate) start: u64,
    /// Size of the whole file.
    pub(crate) file_bytes: u64,
}

impl ChunkBytes {
    fn from(&self, start: u64) -> Result<Bytes, ParquetError> {
        let begin = start.checked_sub(self.start).and_then(|begin| usize::try_from(begin).ok());
        match begin {
            Some(begin) if begin <= self.bytes.len() => Ok(self.bytes.slice(begin..)),
            _ => Err(ParquetError::General(format!("byte {start} is outside its column chunk"))),
        }
    }
}

impl Length for ChunkBytes {
    fn len(&self) -> u64 {
        self.file_bytes
    }
}

impl ChunkReader for ChunkBytes {
    type T = bytes::buf::Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(self.from(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let bytes = self.from(start)?;
        if length > bytes.len() {
            return Err(ParquetError::General(format!("{length} bytes at offset {start} exceed their column chunk")));
        }
        Ok(bytes.slice(..length))
    }
}

/// A type to which numbers are decoded.
pub(crate) trait DecodedNumber: Copy {
    /// A dictionary entry.
    type Entry: Copy;
    /// Decodes PLAIN numbers of type `number` and appends them to `into`. Returns false if this type is not supported.
    fn append(number: Number, body: &[u8], into: &mut Vec<Self>) -> bool;
    /// Converts the decoded numbers of a dictionary page into dictionary entries.
    fn entries(decoded: &[Self]) -> Vec<Self::Entry>;
    /// Appends dictionary entries to `into`.
    fn extend(entries: &[Self::Entry], into: &mut Vec<Self>);
}

/// Embeddings are decoded to the bytes of little-endian float16 numbers.
impl DecodedNumber for u8 {
    type Entry = [u8; 2];

    fn append(number: Number, body: &[u8], into: &mut Vec<u8>) -> bool {
        let mut rounded = [f16::ZERO; TILE];
        match number {
            Number::Float16 => into.extend_from_slice(body),
            Number::Float32 => {
                let mut tile = [0.0_f32; TILE];
                for part in body.as_chunks::<4>().0.chunks(TILE) {
                    tile.iter_mut().zip(part).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
                    rounded[..part.len()].convert_from_f32_slice(&tile[..part.len()]);
                    append_rounded(&rounded[..part.len()], into);
                }
            }
            Number::Float64 => {
                for part in body.as_chunks::<8>().0.chunks(TILE) {
                    let round = |bytes: &[u8; 8]| f16::from_f64(f64::from_le_bytes(*bytes));
                    rounded.iter_mut().zip(part).for_each(|(value, bytes)| *value = round(bytes));
                    append_rounded(&rounded[..part.len()], into);
                }
            }
            Number::Int32 | Number::Int64 => return false,
        }
        true
    }

    fn entries(decoded: &[u8]) -> Vec<[u8; 2]> {
        decoded.as_chunks().0.to_vec()
    }

    fn extend(entries: &[[u8; 2]], into: &mut Vec<u8>) {
        into.extend_from_slice(entries.as_flattened());
    }
}

/// Coordinates are decoded to float64.
impl DecodedNumber for f64 {
    type Entry = f64;

    fn append(number: Number, body: &[u8], into: &mut Vec<f64>) -> bool {
        match number {
            Number::Float16 => into.extend(body.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f64())),
            Number::Float32 => {
                into.extend(body.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))))
            }
            Number::Float64 => into.extend(body.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes))),
            Number::Int32 => into.extend(body.as_chunks().0.iter().map(|bytes| f64::from(i32::from_le_bytes(*bytes)))),
            Number::Int64 => into.extend(body.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as f64)),
        }
        true
    }

    fn entries(decoded: &[f64]) -> Vec<f64> {
        decoded.to_vec()
    }

    fn extend(entries: &[f64], into: &mut Vec<f64>) {
        into.extend_from_slice(entries);
    }
}

/// A column chunk to decode.
pub(crate) struct Chunk<'a> {
    pub(crate) bytes: ChunkBytes,
    pub(crate) metadata: &'a ColumnChunkMetaData,
    pub(crate) rows: usize,
    pub(crate) number: Number,
    /// Numbers per row.
    pub(crate) width: usize,
}

impl Chunk<'_> {
    /// Decodes the chunk and appends the numbers to `into`. Returns false if this module does not support the chunk;
    /// the contents of `into` are then undefined.
    pub(crate) fn decode<T: DecodedNumber>(&self, into: &mut Vec<T>) -> Result<bool, ParquetError> {
        let mut pages = SerializedPageReader::new(Arc::new(self.bytes.clone()), self.metadata, self.rows, None)?;
        let (mut dictionary, mut place, mut values) = (None, 0, 0);
        while let Some(page) = pages.get_next_page()? {
            if let Page::DictionaryPage { buf, .. } = &page {
                let mut decoded = Vec::new();
                T::append(self.number, buf, &mut decoded);
                dictionary = Some(T::entries(&decoded));
                continue;
            }
            let count = page.num_values() as usize;
            values += count;
            if values > self.rows * self.width {
                return Ok(false);
            }
            let Some(body) = self.body(&page, &mut place) else { return Ok(false) };
            let is_decoded = match page.encoding() {
                Encoding::PLAIN => {
                    let body = body.get(..count * self.number.bytes());
                    body.is_some_and(|body| T::append(self.number, body, into))
                }
                #[allow(deprecated, reason = "old files use this name for the encoding")]
                Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                    let push = |entries: &[T::Entry]| T::extend(entries, into);
                    dictionary.as_ref().is_some_and(|table| look_up(body, count, table, push))
                }
                _ => false,
            };
            if !is_decoded {
                return Ok(false);
            }
        }
        Ok(values == self.rows * self.width && place == 0)
    }

    /// The bytes of a page's values. `None` if a list does not have `self.width` numbers, a value is null, or the
    /// encoding of the levels is not supported.
    fn body<'b>(&self, page: &'b Page, place: &mut usize) -> Option<&'b [u8]> {
        let descriptor = self.metadata.column_descr();
        let count = page.num_values() as usize;
        match page {
            Page::DataPage { buf, rep_level_encoding, def_level_encoding, .. } => {
                let is_old = |level_max: i16, encoding: Encoding| level_max > 0 && encoding != Encoding::RLE;
                let old = is_old(descriptor.max_rep_level(), *rep_level_encoding)
                    || is_old(descriptor.max_def_level(), *def_level_encoding);
                if old { None } else { split_levels(descriptor, self.width, place, buf, count) }
            }
            Page::DataPageV2 { buf, rep_levels_byte_len, def_levels_byte_len, .. } => {
                let (repetition, rest) = buf.split_at_checked(*rep_levels_byte_len as usize)?;
                let (definition, rest) = rest.split_at_checked(*def_levels_byte_len as usize)?;
                are_full(descriptor, self.width, place, (repetition, definition), count).then_some(rest)
            }
            Page::DictionaryPage { .. } => None,
        }
    }
}

/// Splits the levels off the front of a version 1 page and returns the bytes of the values. `None` if a list does not
/// have `width` numbers or a value is null.
pub(crate) fn split_levels<'a>(
    descriptor: &ColumnDescriptor,
    width: usize,
    place: &mut usize,
    page: &'a [u8],
    count: usize,
) -> Option<&'a [u8]> {
    let mut rest = page;
    let repetition = level_bytes(&mut rest, descriptor.max_rep_level() > 0)?;
    let definition = level_bytes(&mut rest, descriptor.max_def_level() > 0)?;
    are_full(descriptor, width, place, (repetition, definition), count).then_some(rest)
}

/// Splits the repetition levels or the definition levels off the front of a version 1 page. The levels are stored as a
/// length, followed by that many bytes.
fn level_bytes<'a>(rest: &mut &'a [u8], present: bool) -> Option<&'a [u8]> {
    if !present {
        return Some(&[]);
    }
    let (length, after) = rest.split_first_chunk::<4>()?;
    let (levels, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *rest = after;
    Some(levels)
}

/// Whether the repetition and definition levels of a page mean that every list has `width` numbers and no value is
/// null. `place` has the same meaning as in [`lists_have_width`].
fn are_full(
    descriptor: &ColumnDescriptor,
    width: usize,
    place: &mut usize,
    (repetition, definition): (&[u8], &[u8]),
    count: usize,
) -> bool {
    let Ok(definition_max) = u32::try_from(descriptor.max_def_level()) else { return false };
    let full = match descriptor.max_rep_level() {
        0 => width == 1,
        1 => lists_have_width(width, place, repetition, count),
        _ => false,
    };
    full && (definition_max == 0 || all_defined(definition, definition_max, count))
}

/// Number of values to convert at a time. They fit in the L1 cache.
const TILE: usize = 1024;

fn append_rounded(rounded: &[f16], halves: &mut Vec<u8>) {
    let mut bytes = [[0_u8; 2]; TILE];
    bytes.iter_mut().zip(rounded).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    halves.extend_from_slice(bytes[..rounded.len()].as_flattened());
}

/// Decodes a page of dictionary indices and passes the entries to `push`. Returns false if an index is outside the
/// dictionary or the page is malformed.
fn look_up<T: Copy>(body: &[u8], count: usize, table: &[T], mut push: impl FnMut(&[T])) -> bool {
    let Some((&bits, body)) = body.split_first() else { return count == 0 };
    let bits = u32::from(bits);
    let Some(&any) = table.first().filter(|_| bits <= 32) else { return false };
    let (mut indices, mut values) = ([0_u32; TILE], [any; TILE]);
    let mut runs = Runs::new(body, bits, count);
    for run in &mut runs {
        match run {
            Run::Repeated { value, count } => {
                let Some(&value) = table.get(value as usize) else { return false };
                values[..count.min(TILE)].fill(value);
                (0..count).step_by(TILE).for_each(|first| push(&values[..TILE.min(count - first)]));
            }
            Run::Packed { bytes, count } => {
                for first in (0..count).step_by(TILE) {
                    let indices = &mut indices[..TILE.min(count - first)];
                    let unpacked = unpacked(bytes, bits, first, indices.len());
                    indices.iter_mut().zip(unpacked).for_each(|(index, value)| *index = value);
                    // Check only the largest index, to avoid a branch per index.
                    if indices.iter().fold(0, |largest, index| largest.max(*index)) as usize >= table.len() {
                        return false;
                    }
                    values.iter_mut().zip(&*indices).for_each(|(value, index)| *value = table[*index as usize]);
                    push(&values[..indices.len()]);
                }
            }
        }
    }
    runs.left == 0
}
