//! The protobuf messages of an event file, limited to the fields that this project uses. Field numbers and names are
//! those of TensorFlow's `.proto` files. Images and histograms are tensors tagged with a plugin's name, as TensorFlow 2
//! writes them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::{Message, Oneof};

/// The file version in the first record of every event file.
pub(super) const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
pub(super) const SESSION_START: i32 = 1;
/// `DataType.DT_FLOAT`.
const TYPE_FLOAT: i32 = 1;
/// `DataType.DT_DOUBLE`.
const TYPE_DOUBLE: i32 = 2;
/// `DataType.DT_STRING`.
const TYPE_STRING: i32 = 7;
/// `DataClass.DATA_CLASS_TENSOR`.
pub(super) const CLASS_TENSOR: i32 = 2;
/// `DataClass.DATA_CLASS_BLOB_SEQUENCE`.
pub(super) const CLASS_BLOBS: i32 = 3;

/// The current time, for `wall_time`.
pub(super) fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "EventContent", tags = "3, 5, 7")]
    pub(super) content: Option<EventContent>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum EventContent {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
    #[prost(oneof = "Payload", tags = "2, 8")]
    pub(super) payload: Option<Payload>,
}

/// `Summary.Value.value`, without the fields that only TensorFlow 1 uses (4: image, 5: histogram, 6: audio).
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Payload {
    #[prost(float, tag = "2")]
    Simple(f32),
    #[prost(message, tag = "8")]
    Tensor(TensorProto),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
    #[prost(int32, tag = "4")]
    pub(super) data_class: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) content: Vec<u8>,
}

impl SummaryMetadata {
    /// Metadata that makes a TensorBoard plugin show a value. `content` is the encoded message of the plugin. A message
    /// with version 0 and no other fields is empty when encoded.
    pub(super) fn of(plugin: &str, content: Vec<u8>, data_class: i32) -> Self {
        Self { plugin_data: Some(PluginData { plugin_name: plugin.to_owned(), content }), data_class }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<TensorShape>,
    #[prost(double, repeated, tag = "6")]
    pub(super) double_val: Vec<f64>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dimension {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}

impl TensorProto {
    /// A scalar string.
    pub(super) fn string(text: &str) -> Self {
        Self { string_val: vec![text.as_bytes().to_vec()], ..Self::shaped(TYPE_STRING, &[]) }
    }

    /// A vector of byte strings.
    pub(super) fn strings(string_val: Vec<Vec<u8>>) -> Self {
        let sizes = [string_val.len()];
        Self { string_val, ..Self::shaped(TYPE_STRING, &sizes) }
    }

    /// A matrix with three columns.
    pub(super) fn triples(rows: &[[f64; 3]]) -> Self {
        Self { double_val: rows.concat(), ..Self::shaped(TYPE_DOUBLE, &[rows.len(), 3]) }
    }

    /// An empty tensor, for values whose plugin reads only the metadata.
    pub(super) fn empty() -> Self {
        Self::shaped(TYPE_FLOAT, &[0])
    }

    fn shaped(dtype: i32, sizes: &[usize]) -> Self {
        let dim = sizes.iter().map(|size| Dimension { size: *size as i64 }).collect();
        Self { dtype, tensor_shape: Some(TensorShape { dim }), double_val: Vec::new(), string_val: Vec::new() }
    }
}

/// The fields of an event that are read back. Decoding skips all other fields.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Stamp {
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
}
