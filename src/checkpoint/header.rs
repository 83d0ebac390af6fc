//! The header of a safetensors file: 8 bytes of length, little-endian, then JSON, padded with spaces to 8
//! (github.com/huggingface/safetensors, "Format").
//!
//! Pure. A header that was read covers the data exactly: tensors lie one behind the other, without a gap or an overlap, and
//! each has the length that its shape says.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use tch::Kind;

/// No header is larger (the limit of the safetensors library).
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// The types of numbers that are written and read.
const KINDS: [(Kind, &str); 5] =
    [(Kind::Double, "F64"), (Kind::Int64, "I64"), (Kind::Float, "F32"), (Kind::BFloat16, "BF16"), (Kind::Half, "F16")];

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
        if KINDS.iter().all(|(known, _)| *known != kind) {
            return Err(HeaderError::Unsupported(format!(
                "tensor `{name}` is {kind:?}, wanted one of {}",
                known_kinds()
            )));
        }
        let elements =
            shape.iter().try_fold(1_u64, |product, length| product.checked_mul(u64::try_from(*length).ok()?));
        let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes() as u64));
        match bytes {
            Some(bytes) => Ok(Self { name: name.to_owned(), kind, shape, bytes }),
            None => malformed(format!("tensor `{name}` has the impossible shape {shape:?}")),
        }
    }
}

fn known_kinds() -> String {
    KINDS.map(|(_, name)| name).join(", ")
}

impl Header {
    /// Length of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|entry| entry.bytes).sum()
    }

    /// The bytes that a file begins with.
    pub fn encode(&self) -> Vec<u8> {
        let mut map = Map::new();
        if !self.metadata.is_empty() {
            map.insert(METADATA.into(), json!(self.metadata));
        }
        let mut begin = 0;
        for entry in &self.tensors {
            let end = begin + entry.bytes;
            let kind = KINDS.iter().find(|(kind, _)| *kind == entry.kind).map_or("", |(_, name)| name);
            map.insert(
                entry.name.clone(),
                json!({ "dtype": kind, "shape": entry.shape, "data_offsets": [begin, end] }),
            );
            begin = end;
        }
        let mut text = Value::Object(map).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text);
        bytes
    }

    /// Reads the JSON of a header whose file has `data_bytes` of data.
    pub fn parse(text: &[u8], data_bytes: u64) -> Result<Self, HeaderError> {
        let map: Map<String, Value> = match serde_json::from_slice(text) {
            Ok(map) => map,
            Err(error) => return malformed(format!("header: {error}")),
        };
        let mut header = Self::default();
        let mut placed = Vec::new();
        for (name, value) in &map {
            if name == METADATA {
                header.metadata = metadata(value)?;
            } else {
                placed.push(entry(name, value)?);
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

fn metadata(value: &Value) -> Result<BTreeMap<String, String>, HeaderError> {
    let Some(map) = value.as_object() else { return malformed(format!("{METADATA} is no object")) };
    let text = |(key, value): (&String, &Value)| match value.as_str() {
        Some(value) => Ok((key.clone(), value.to_owned())),
        None => malformed(format!("{METADATA}: `{key}` is no text")),
    };
    map.iter().map(text).collect()
}

/// A tensor and where its data begins.
fn entry(name: &str, value: &Value) -> Result<(u64, Entry), HeaderError> {
    let dtype = value["dtype"].as_str().unwrap_or("nothing");
    let Some((kind, _)) = KINDS.iter().find(|(_, known)| *known == dtype) else {
        return Err(HeaderError::Unsupported(format!("tensor `{name}` is {dtype}, wanted one of {}", known_kinds())));
    };
    let list = |key: &str| value[key].as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    let shape: Option<Vec<u64>> = list("shape");
    let shape = shape.and_then(|shape| shape.into_iter().map(|length| i64::try_from(length).ok()).collect());
    let place: Option<Vec<u64>> = list("data_offsets");
    let (Some(shape), Some([begin, end])) = (shape, place.as_deref()) else {
        return malformed(format!("tensor `{name}` has no shape or no place"));
    };
    let entry = Entry::new(name, *kind, shape)?;
    if begin.checked_add(entry.bytes) != Some(*end) {
        let reason = format!("tensor `{name}` lies at {begin} to {end}, its shape says {} bytes", entry.bytes);
        return malformed(reason);
    }
    Ok((*begin, entry))
}
