//! The header of a safetensors file: 8 bytes of length, little-endian, then JSON, padded with spaces to 8
//! (github.com/huggingface/safetensors, "Format").
//!
//! What a header says of one tensor is the `safetensors` crate's own [`TensorInfo`]; its reader and writer are not used, because
//! they want the whole file in memory and check no sum. Pure. A header that was read covers the data exactly: tensors lie one
//! behind the other, without a gap or an overlap, and each has the length that its shape says.

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Map, Value, json};
use tch::Kind;

/// No header is larger (the limit of the safetensors library).
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// The types of numbers that are written and read.
const KINDS: [Kind; 5] = [Kind::Double, Kind::Int64, Kind::Float, Kind::BFloat16, Kind::Half];

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Type of its numbers.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Length of its numbers.
    pub bytes: u64,
}

/// What is in a file, in the order of its data.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header {
    /// Names and texts.
    pub metadata: BTreeMap<String, String>,
    /// Tensors, one behind the other.
    pub tensors: Vec<Entry>,
}

/// Why a header cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// It breaks the rules of the format.
    #[error("{0}")]
    Malformed(String),
    /// It follows them, but is not for us.
    #[error("{0}")]
    Unsupported(String),
}

fn malformed<T>(reason: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError::Malformed(reason.into()))
}

impl Entry {
    /// A tensor of this name, kind and shape.
    pub fn new(name: &str, kind: Kind, shape: Vec<i64>) -> Result<Self, HeaderError> {
        if name.is_empty() || name == METADATA || name.contains(|c: char| c == '/' || c.is_control()) {
            return malformed(format!("{name:?} is no name for a tensor"));
        }
        if !KINDS.contains(&kind) {
            let text = format!("tensor `{name}` is {kind:?}, wanted one of {KINDS:?}");
            return Err(HeaderError::Unsupported(text));
        }
        let elements =
            shape.iter().try_fold(1_u64, |product, length| product.checked_mul(u64::try_from(*length).ok()?));
        match elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes() as u64)) {
            Some(bytes) => Ok(Self { name: name.to_owned(), kind, shape, bytes }),
            None => malformed(format!("tensor `{name}` has the impossible shape {shape:?}")),
        }
    }

    fn info(&self, begin: u64) -> TensorInfo {
        TensorInfo {
            dtype: self.kind.try_into().expect("its kind was checked when it was made"),
            shape: self.shape.iter().map(|length| *length as usize).collect(),
            data_offsets: (begin as usize, (begin + self.bytes) as usize),
        }
    }
}

impl Header {
    /// The bytes that a file begins with.
    pub fn encode(&self) -> Vec<u8> {
        let mut map = Map::new();
        if !self.metadata.is_empty() {
            map.insert(METADATA.into(), json!(self.metadata));
        }
        let mut begin = 0;
        for entry in &self.tensors {
            map.insert(entry.name.clone(), json!(entry.info(begin)));
            begin += entry.bytes;
        }
        let mut text = Value::Object(map).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        [(text.len() as u64).to_le_bytes().to_vec(), text].concat()
    }

    /// Reads the JSON of a header whose file has `data_bytes` of data.
    pub fn parse(text: &[u8], data_bytes: u64) -> Result<Self, HeaderError> {
        let map: Map<String, Value> = read("header", serde_json::from_slice(text))?;
        let mut header = Self::default();
        let mut placed = Vec::new();
        for (name, value) in map {
            if name == METADATA {
                header.metadata = read(METADATA, serde_json::from_value(value))?;
            } else {
                placed.push(entry(&name, value)?);
            }
        }
        placed.sort_by_key(|(begin, entry)| (*begin, entry.bytes));
        let mut end = 0_u64;
        for (begin, entry) in placed {
            if begin != end {
                return malformed(format!("tensor `{}` begins at {begin}, wanted {end}", entry.name));
            }
            end = match end.checked_add(entry.bytes).filter(|end| *end <= data_bytes) {
                Some(end) => end,
                None => return malformed(format!("tensor `{}` ends behind the file", entry.name)),
            };
            header.tensors.push(entry);
        }
        if end != data_bytes {
            return malformed(format!("tensors end at {end}, the data at {data_bytes}"));
        }
        Ok(header)
    }
}

fn read<T>(what: &str, read: serde_json::Result<T>) -> Result<T, HeaderError> {
    read.map_err(|error| HeaderError::Malformed(format!("{what}: {error}")))
}

/// A tensor and where its data begins.
fn entry(name: &str, value: Value) -> Result<(u64, Entry), HeaderError> {
    // A type that the crate does not know is no damage.
    let unsupported = |error: String| HeaderError::Unsupported(format!("tensor `{name}`: {error}"));
    let dtype: Dtype =
        serde_json::from_value(value["dtype"].clone()).map_err(|error| unsupported(error.to_string()))?;
    let kind = Kind::try_from(dtype).map_err(|error| unsupported(error.to_string()))?;
    let info: TensorInfo = read(&format!("tensor `{name}`"), serde_json::from_value(value))?;
    let shape = info.shape.iter().map(|length| i64::try_from(*length)).collect::<Result<_, _>>();
    let Ok(shape) = shape else {
        return malformed(format!("tensor `{name}` has the impossible shape {:?}", info.shape));
    };
    let entry = Entry::new(name, kind, shape)?;
    let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    if begin.checked_add(entry.bytes) != Some(end) {
        let reason = format!("tensor `{name}` lies at {begin} to {end}, its shape says {} bytes", entry.bytes);
        return malformed(reason);
    }
    Ok((begin, entry))
}
