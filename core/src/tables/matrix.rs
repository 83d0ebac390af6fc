//! Matrices of numbers in files (NumPy's `.npy` and safetensors), read a few rows at a time.
//!
//! The matrix must be in C order and little-endian, with elements of float16, float32 or float64. The sizes in the
//! header are compared with the length of the file before they are used. In a safetensors file with several tensors,
//! the matrix is the tensor `embedding`. Sources: NEP 1 (numpy/lib/format.py); github.com/huggingface/safetensors,
//! "Format".

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::tensor::{Dtype, Metadata};

use super::error::TableError;

/// Size limit of a header. A file with a longer header is rejected as damaged.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// An open matrix file.
#[derive(Debug)]
pub struct Matrix {
    path: PathBuf,
    /// Name of the tensor; `None` for `.npy`, which has no names.
    column: Option<String>,
    file: File,
    start: u64,
    /// F16, F32 or F64.
    element: Dtype,
    rows: u64,
    width: usize,
}

/// The layout of the file according to its header.
struct MatrixLayout {
    column: Option<String>,
    start: u64,
    element: Dtype,
    shape: Vec<u64>,
}

impl Matrix {
    /// Opens a `.npy` or `.safetensors` file. The extension decides which of the two formats is read.
    pub fn open(path: &Path) -> Result<Self, TableError> {
        let io = |error| TableError::io(path, &error);
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        let layout: fn(&mut MatrixHeader<'_>) -> Result<MatrixLayout, TableError> = match extension.to_str() {
            Some("npy") => npy_layout,
            Some("safetensors") => safetensors_layout,
            _ => return Err(TableError::file(path, "the file name ends in neither .npy nor .safetensors")),
        };
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let MatrixLayout { column, start, element, shape } =
            layout(&mut MatrixHeader { path, file: &mut file, length })?;
        let [rows, width] = shape[..] else {
            return Err(TableError::file(path, format!("shape is {shape:?}, wanted two dimensions")));
        };
        let bytes = rows.checked_mul(width).and_then(|count| count.checked_mul(element.size() as u64));
        let end = bytes.and_then(|bytes| bytes.checked_add(start));
        if end.is_none_or(|end| end > length) {
            let reason = format!("cut short: {length} bytes are too few for a header and {rows} x {width} numbers");
            return Err(TableError::damaged(path, reason));
        }
        let usable = usize::try_from(width).ok().filter(|width| *width > 0);
        let width = usable.ok_or_else(|| TableError::file(path, format!("row width is {width}, wanted at least 1")))?;
        Ok(Self { path: path.to_owned(), column, file, start, element, rows, width })
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Numbers per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// An error about one row of this file.
    pub fn bad_row(&self, row: u64, reason: &str) -> TableError {
        let named = self.column.as_ref().map_or_else(String::new, |name| format!("tensor `{name}`: "));
        TableError::row(&self.path, row as usize, format!("{named}{reason}"))
    }

    /// A `.npy` file with the rows for which `keep` is true. `keep` has one entry per row.
    pub(super) fn npy_of_rows(&mut self, keep: &[bool]) -> Result<Vec<u8>, TableError> {
        let (rows, width) = (keep.iter().filter(|keep| **keep).count(), self.width);
        let descr = match self.element {
            Dtype::F16 => "<f2",
            Dtype::F32 => "<f4",
            _ => "<f8",
        };
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
        // The header ends with a newline. Spaces before the newline align the data to 64 bytes (NEP 1).
        let padded = (NPY_MAGIC.len() + 4 + header.len() + 1).next_multiple_of(64) - NPY_MAGIC.len() - 4;
        let mut file = [NPY_MAGIC, &[1, 0], &(padded as u16).to_le_bytes()].concat();
        file.extend(format!("{header:<0$}\n", padded - 1).as_bytes());
        let bytes = self.bytes(0, keep.len())?;
        let rows = bytes.chunks_exact(width * self.element.size()).zip(keep);
        rows.filter(|(_, keep)| **keep).for_each(|(row, _)| file.extend(row));
        Ok(file)
    }

    fn bytes(&mut self, first: u64, count: usize) -> Result<Vec<u8>, TableError> {
        let row_bytes = (self.width * self.element.size()) as u64;
        let mut bytes = vec![0; count * row_bytes as usize];
        let position = self.file.seek(SeekFrom::Start(self.start + first * row_bytes));
        position.and_then(|_| self.file.read_exact(&mut bytes)).map_err(|error| TableError::io(&self.path, &error))?;
        Ok(bytes)
    }

    /// Reads `count` rows as f64, starting with row `first`.
    pub fn read_f64(&mut self, first: u64, count: usize) -> Result<Vec<f64>, TableError> {
        let bytes = self.bytes(first, count)?;
        Ok(match self.element {
            Dtype::F16 => numbers(&bytes, |bytes| f16::from_le_bytes(bytes).to_f64()),
            Dtype::F32 => numbers(&bytes, |bytes| f64::from(f32::from_le_bytes(bytes))),
            _ => numbers(&bytes, f64::from_le_bytes),
        })
    }

    /// Reads `count` rows, starting with row `first`, and rounds them to float16. Values that are too large for float16
    /// become infinite; the caller must check for them.
    pub fn read_f16(&mut self, first: u64, count: usize) -> Result<Vec<f16>, TableError> {
        let bytes = self.bytes(first, count)?;
        Ok(match self.element {
            Dtype::F16 => numbers(&bytes, f16::from_le_bytes),
            Dtype::F32 => numbers(&bytes, |bytes| f16::from_f32(f32::from_le_bytes(bytes))),
            _ => numbers(&bytes, |bytes| f16::from_f64(f64::from_le_bytes(bytes))),
        })
    }
}

fn numbers<const BYTES: usize, T>(bytes: &[u8], number: impl Fn([u8; BYTES]) -> T) -> Vec<T> {
    let pieces = bytes.chunks_exact(BYTES);
    pieces.map(|piece| number(std::array::from_fn(|index| piece[index]))).collect()
}

/// Reads the header at the start of a file.
struct MatrixHeader<'a> {
    path: &'a Path,
    file: &'a mut File,
    length: u64,
}

impl MatrixHeader<'_> {
    /// Reads the next `count` bytes. `what` is the name of the file format in error messages.
    fn take(&mut self, count: u64, what: &str) -> Result<Vec<u8>, TableError> {
        if count > HEADER_BYTES_MAX || count > self.length {
            let reason =
                format!("not {what}, or cut short: the header needs {count} bytes, and the file has {}", self.length);
            return Err(TableError::damaged(self.path, reason));
        }
        let mut bytes = vec![0; count as usize];
        self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                TableError::damaged(self.path, format!("cut short within the header of {what}"))
            }
            _ => TableError::io(self.path, &error),
        })?;
        Ok(bytes)
    }

    /// Reads a little-endian integer of `count` bytes.
    fn number(&mut self, count: u64, what: &str) -> Result<u64, TableError> {
        Ok(self.take(count, what)?.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

fn npy_layout(file: &mut MatrixHeader<'_>) -> Result<MatrixLayout, TableError> {
    const WHAT: &str = "a .npy file";
    let path = file.path;
    let start = file.take(8, WHAT)?;
    if !start.starts_with(NPY_MAGIC) {
        return Err(TableError::damaged(path, "not a .npy file: the magic number is wrong"));
    }
    // The length of the header is stored in two bytes in version 1, and in four bytes in later versions.
    let size_bytes = if start[6] > 1 { 4 } else { 2 };
    let size = file.number(size_bytes, WHAT)?;
    let header = file.take(size, WHAT)?;
    let header = String::from_utf8_lossy(&header);
    let field = |name: &str| {
        let (_, rest) = header.split_once(&format!("'{name}':"))?;
        Some(rest.trim_start())
    };
    let element = match field("descr").and_then(|text| text.split('\'').nth(1)).unwrap_or_default() {
        "<f2" => Dtype::F16,
        "<f4" => Dtype::F32,
        "<f8" => Dtype::F64,
        other => return Err(TableError::file(path, format!("number type is `{other}`, wanted <f2, <f4 or <f8"))),
    };
    if field("fortran_order").is_none_or(|text| !text.starts_with("False")) {
        let reason = "the matrix is in Fortran order, wanted C order; save numpy.ascontiguousarray(matrix)";
        return Err(TableError::file(path, reason));
    }
    let shape = field("shape").and_then(|text| text.strip_prefix('(')?.split_once(')')).map(|(inside, _)| inside);
    let lengths = shape.unwrap_or("?").split(',').map(str::trim).filter(|text| !text.is_empty());
    let shape: Result<Vec<u64>, _> = lengths.map(str::parse).collect();
    let shape = shape.map_err(|_| TableError::file(path, format!("no valid shape in the header: {header}")))?;
    Ok(MatrixLayout { column: None, start: 8 + size_bytes + size, element, shape })
}

fn safetensors_layout(file: &mut MatrixHeader<'_>) -> Result<MatrixLayout, TableError> {
    const WHAT: &str = "a safetensors file";
    let path = file.path;
    let size = file.number(8, WHAT)?;
    let header = file.take(size, WHAT)?;
    // `SafeTensors::read_metadata` is not used here, because it needs the whole file in memory.
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|error| TableError::damaged(path, format!("header: {error}")))?;
    let tensors = header.tensors();
    let mut names: Vec<&String> = tensors.keys().collect();
    names.sort_unstable();
    let wanted = if let [only] = names[..] { only } else { "embedding" };
    let Some(tensor) = tensors.get(wanted) else {
        let reason = format!("got the tensors {names:?}, wanted exactly one tensor, or one named `embedding`");
        return Err(TableError::file(path, reason));
    };
    let element = tensor.dtype;
    if !matches!(element, Dtype::F16 | Dtype::F32 | Dtype::F64) {
        return Err(TableError::file(path, format!("tensor `{wanted}` is {element:?}, wanted F16, F32 or F64")));
    }
    let start = (tensor.data_offsets.0 as u64).checked_add(8 + size);
    let start = start.ok_or_else(|| TableError::damaged(path, "a tensor lies beyond the end of the file"))?;
    let shape = tensor.shape.iter().map(|length| *length as u64).collect();
    Ok(MatrixLayout { column: Some(wanted.to_owned()), start, element, shape })
}
