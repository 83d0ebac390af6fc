//! Files with one matrix of numbers: NumPy's `.npy` and safetensors, read a few rows at a time.
//!
//! C order, little-endian, float16, 32 or 64. The header is believed only as far as the file's length agrees. Sources: NEP 1
//! (numpy/lib/format.py); github.com/huggingface/safetensors, "Format".

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::f16;

use super::{ShardsError, Spot};

/// A header that is longer is none.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// Kind of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F16,
    F32,
    F64,
}

impl Element {
    fn bytes(self) -> u64 {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// An open file with a matrix.
#[derive(Debug)]
pub(super) struct Matrix {
    path: PathBuf,
    /// Name within the file, where it has names.
    column: Option<String>,
    file: File,
    start: u64,
    element: Element,
    rows: u64,
    width: usize,
}

/// What a header says.
struct Layout {
    column: Option<String>,
    start: u64,
    element: Element,
    shape: Vec<u64>,
}

impl Matrix {
    /// Opens `.npy` or `.safetensors` by its extension.
    pub(super) fn open(path: &Path) -> Result<Self, ShardsError> {
        let io = |error| ShardsError::io(path, error);
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let layout = match path.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => npy_layout(path, &mut file, length)?,
            Some("safetensors") => safetensors_layout(path, &mut file, length)?,
            _ => return Err(bad(path, "the name ends in neither .npy nor .safetensors".to_owned())),
        };
        let Layout { column, start, element, shape } = layout;
        let [rows, width] = shape[..] else {
            return Err(bad(path, format!("shape is {shape:?}, wanted two dimensions")));
        };
        let bytes = rows.checked_mul(width).and_then(|count| count.checked_mul(element.bytes()));
        let end = bytes.and_then(|bytes| bytes.checked_add(start));
        if end.is_none_or(|end| end > length) {
            let reason = format!("{length} bytes, too few for a header and {rows} x {width} numbers; it is cut short");
            return Err(ShardsError::Corrupt { spot: Box::new(spot(path)), reason });
        }
        if width == 0 {
            return Err(bad(path, "rows of width 0".to_owned()));
        }
        let width = usize::try_from(width).map_err(|_| bad(path, format!("rows of width {width}")))?;
        Ok(Self { path: path.to_owned(), column, file, start, element, rows, width })
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Where a row is, for messages.
    pub(super) fn spot(&self, row: u64) -> Spot {
        Spot { column: self.column.clone(), row: Some(row), ..spot(&self.path) }
    }

    fn bytes(&mut self, first: u64, count: usize) -> Result<Vec<u8>, ShardsError> {
        let row_bytes = self.width as u64 * self.element.bytes();
        let mut bytes = vec![0; count * row_bytes as usize];
        let io = |error| ShardsError::io(&self.path, error);
        self.file.seek(SeekFrom::Start(self.start + first * row_bytes)).map_err(io)?;
        self.file.read_exact(&mut bytes).map_err(io)?;
        Ok(bytes)
    }

    /// Rows as f64.
    pub(super) fn read_f64(&mut self, first: u64, count: usize) -> Result<Vec<f64>, ShardsError> {
        let bytes = self.bytes(first, count)?;
        Ok(match self.element {
            Element::F16 => numbers(&bytes, |bytes| f16::from_le_bytes(bytes).to_f64()),
            Element::F32 => numbers(&bytes, |bytes| f64::from(f32::from_le_bytes(bytes))),
            Element::F64 => numbers(&bytes, f64::from_le_bytes),
        })
    }

    /// Rows rounded to float16; what does not fit becomes infinite or NaN, and the caller's to find.
    pub(super) fn read_f16(&mut self, first: u64, count: usize) -> Result<Vec<f16>, ShardsError> {
        let bytes = self.bytes(first, count)?;
        Ok(match self.element {
            Element::F16 => numbers(&bytes, f16::from_le_bytes),
            Element::F32 => numbers(&bytes, |bytes| f16::from_f32(f32::from_le_bytes(bytes))),
            Element::F64 => numbers(&bytes, |bytes| f16::from_f64(f64::from_le_bytes(bytes))),
        })
    }
}

fn numbers<const BYTES: usize, T>(bytes: &[u8], number: impl Fn([u8; BYTES]) -> T) -> Vec<T> {
    let pieces = bytes.chunks_exact(BYTES);
    pieces.map(|piece| number(std::array::from_fn(|index| piece[index]))).collect()
}

fn spot(path: &Path) -> Spot {
    Spot { file: path.display().to_string(), row_group: None, column: None, row: None }
}

fn bad(path: &Path, reason: String) -> ShardsError {
    ShardsError::Bad { spot: Box::new(spot(path)), reason }
}

fn corrupt(path: &Path, reason: &str) -> ShardsError {
    ShardsError::Corrupt { spot: Box::new(spot(path)), reason: reason.to_owned() }
}

/// `count` bytes, or what the file is instead.
fn header_bytes(path: &Path, file: &mut File, count: u64, length: u64, what: &str) -> Result<Vec<u8>, ShardsError> {
    if count > HEADER_BYTES_MAX || count > length {
        return Err(corrupt(path, &format!("not {what}, or cut short: a header of {count} bytes in {length}")));
    }
    let mut bytes = vec![0; count as usize];
    file.read_exact(&mut bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => corrupt(path, &format!("cut short within the header of {what}")),
        _ => ShardsError::io(path, error),
    })?;
    Ok(bytes)
}

fn npy_layout(path: &Path, file: &mut File, length: u64) -> Result<Layout, ShardsError> {
    const WHAT: &str = "a .npy file";
    let start = header_bytes(path, file, 8, length, WHAT)?;
    if !start.starts_with(NPY_MAGIC) {
        return Err(corrupt(path, "does not begin as a .npy file does"));
    }
    // Version 1 has two bytes of length, later ones four.
    let wide = start[6] > 1;
    let size = header_bytes(path, file, if wide { 4 } else { 2 }, length, WHAT)?;
    let size = size.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let header = header_bytes(path, file, size, length, WHAT)?;
    let header = String::from_utf8_lossy(&header);
    let field = |name: &str| {
        let (_, rest) = header.split_once(&format!("'{name}':"))?;
        Some(rest.trim_start())
    };
    let quoted = |text: &str| text.split('\'').nth(1).unwrap_or_default().to_owned();
    let kind = field("descr").map(quoted).unwrap_or_default();
    let element = match kind.as_str() {
        "<f2" => Element::F16,
        "<f4" => Element::F32,
        "<f8" => Element::F64,
        other => return Err(bad(path, format!("numbers are `{other}`, wanted <f2, <f4 or <f8"))),
    };
    if field("fortran_order").is_none_or(|text| !text.starts_with("False")) {
        return Err(bad(path, "in Fortran order, wanted C order; save numpy.ascontiguousarray(it)".to_owned()));
    }
    let shape = field("shape").and_then(|text| text.strip_prefix('(')?.split_once(')')).map(|(inside, _)| inside);
    let lengths = shape.unwrap_or("?").split(',').map(str::trim).filter(|text| !text.is_empty());
    let shape: Result<Vec<u64>, _> = lengths.map(str::parse).collect();
    let shape = shape.map_err(|_| bad(path, format!("no shape in the header {header}")))?;
    let start = 8 + if wide { 4 } else { 2 } + size;
    Ok(Layout { column: None, start, element, shape })
}

fn safetensors_layout(path: &Path, file: &mut File, length: u64) -> Result<Layout, ShardsError> {
    const WHAT: &str = "a safetensors file";
    let size = header_bytes(path, file, 8, length, WHAT)?;
    let size = size.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let header = header_bytes(path, file, size, length, WHAT)?;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|error| corrupt(path, &format!("header: {error}")))?;
    let tensors: Vec<_> = header.iter().filter(|(name, _)| *name != "__metadata__").collect();
    let chosen = match &tensors[..] {
        [only] => Some(only),
        many => many.iter().find(|(name, _)| *name == "embedding"),
    };
    let Some((name, tensor)) = chosen else {
        let names: Vec<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
        return Err(bad(path, format!("tensors {names:?}, wanted exactly one, or one named `embedding`")));
    };
    let element = match tensor["dtype"].as_str() {
        Some("F16") => Element::F16,
        Some("F32") => Element::F32,
        Some("F64") => Element::F64,
        other => {
            return Err(bad(
                path,
                format!("tensor `{name}` is {}, wanted F16, F32 or F64", other.unwrap_or("nothing")),
            ));
        }
    };
    let list = |value: &serde_json::Value| -> Option<Vec<u64>> {
        value.as_array()?.iter().map(serde_json::Value::as_u64).collect()
    };
    let begin = list(&tensor["data_offsets"]).and_then(|offsets| offsets.first().copied());
    let (Some(shape), Some(begin)) = (list(&tensor["shape"]), begin) else {
        return Err(corrupt(path, &format!("tensor `{name}` has no shape or no place")));
    };
    let start = begin.checked_add(8 + size).ok_or_else(|| corrupt(path, "a tensor beyond the end of the file"))?;
    Ok(Layout { column: Some((*name).clone()), start, element, shape })
}
