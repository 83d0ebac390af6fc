//! The header of a safetensors file: the length of the JSON text in 8 little-endian bytes, then the JSON text, padded
//! with spaces to a multiple of 8 bytes (github.com/huggingface/safetensors, "Format").
//!
//! In the JSON text, each tensor is a [`TensorInfo`] of the `safetensors` crate. The reader and writer of that crate
//! are not used, because they need the whole file in memory and do not verify a checksum.
//!
//! All functions are pure. A parsed header covers the data of the file exactly: the data of the tensors has no gaps or
//! overlaps, and the length of each tensor's data matches its shape.

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Map, Value, json};
use tch::Kind;

const METADATA: &str = "__metadata__";

/// The supported element types.
const KINDS: [Kind; 5] = [Kind::Double, Kind::Int64, Kind::Float, Kind::BFloat16, Kind::Half];

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub kind: Kind,
    /// Shape of the tensor.
    pub shape: Vec<i64>,
    /// Length of the tensor's data in the file.
    pub bytes: u64,
}

/// The metadata and the tensors of a safetensors file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header {
    /// Metadata of the file: free-form text by key.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, in the order in which the file stores their data.
    pub tensors: Vec<TensorEntry>,
}

/// Why a header cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The header violates the format.
    #[error("{0}")]
    Malformed(String),
    /// The header is valid, but uses a feature that is not supported.
    #[error("{0}")]
    Unsupported(String),
}

fn malformed<T>(reason: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError::Malformed(reason.into()))
}

impl TensorEntry {
    /// The entry of a tensor. Fails if the name is not valid, the kind is not supported, or the shape is impossible.
    pub fn new(name: &str, kind: Kind, shape: Vec<i64>) -> Result<Self, HeaderError> {
        if name.is_empty() || name == METADATA || name.contains(|c: char| c == '/' || c.is_control()) {
            return malformed(format!("{name:?} is not a valid tensor name"));
        }
        if !KINDS.contains(&kind) {
            let text = format!("tensor `{name}` has the type {kind:?}, wanted one of {KINDS:?}");
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
            dtype: self.kind.try_into().expect("`new` accepts only kinds that safetensors has"),
            shape: self.shape.iter().map(|length| *length as usize).collect(),
            data_offsets: (begin as usize, (begin + self.bytes) as usize),
        }
    }
}

impl Header {
    /// The bytes of the header: length, JSON, padding.
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

    /// Parses the JSON of a header. `data_bytes` is the length of the data after the header.
    pub fn parse(text: &[u8], data_bytes: u64) -> Result<Self, HeaderError> {
        let map: Map<String, Value> = parsed("header", serde_json::from_slice(text))?;
        let mut header = Self::default();
        let mut placed = Vec::new();
        for (name, value) in map {
            if name == METADATA {
                header.metadata = parsed(METADATA, serde_json::from_value(value))?;
            } else {
                placed.push(entry(&name, value)?);
            }
        }
        placed.sort_by_key(|(begin, entry)| (*begin, entry.bytes));
        let mut end = 0_u64;
        for (begin, entry) in placed {
            if begin != end {
                return malformed(format!("tensor `{}` begins at byte {begin}, wanted byte {end}", entry.name));
            }
            end = match end.checked_add(entry.bytes).filter(|end| *end <= data_bytes) {
                Some(end) => end,
                None => return malformed(format!("tensor `{}` ends beyond the end of the file", entry.name)),
            };
            header.tensors.push(entry);
        }
        if end != data_bytes {
            return malformed(format!("the tensors end at byte {end}, but the data ends at byte {data_bytes}"));
        }
        Ok(header)
    }
}

fn parsed<T>(what: &str, result: serde_json::Result<T>) -> Result<T, HeaderError> {
    result.map_err(|error| HeaderError::Malformed(format!("{what}: {error}")))
}

/// Parses the entry of one tensor. Returns the offset of the tensor's data and the entry.
fn entry(name: &str, value: Value) -> Result<(u64, TensorEntry), HeaderError> {
    // If the `safetensors` crate does not know the element type, the file is unsupported, not damaged.
    let unsupported = |error: String| HeaderError::Unsupported(format!("tensor `{name}`: {error}"));
    let dtype: Dtype =
        serde_json::from_value(value["dtype"].clone()).map_err(|error| unsupported(error.to_string()))?;
    let kind = Kind::try_from(dtype).map_err(|error| unsupported(error.to_string()))?;
    let info: TensorInfo = parsed(&format!("tensor `{name}`"), serde_json::from_value(value))?;
    let shape = info.shape.iter().map(|length| i64::try_from(*length)).collect::<Result<_, _>>();
    let Ok(shape) = shape else {
        return malformed(format!("tensor `{name}` has the impossible shape {:?}", info.shape));
    };
    let entry = TensorEntry::new(name, kind, shape)?;
    let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    if begin.checked_add(entry.bytes) != Some(end) {
        let reason =
            format!("tensor `{name}` has data from byte {begin} to {end}, but its shape needs {} bytes", entry.bytes);
        return malformed(reason);
    }
    Ok((begin, entry))
}
