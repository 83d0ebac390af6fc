//! The messages of an event file, as far as they are used here. Numbers and names are those of TensorFlow's `.proto` files;
//! what is left out (images, histograms, audio) has its place in [`Payload`].

use prost::{Message, Oneof};

/// What the first record of every event file says.
pub(super) const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
pub(super) const SESSION_START: i32 = 1;
/// `DataType.DT_STRING`.
pub(super) const TYPE_STRING: i32 = 7;
/// `DataClass.DATA_CLASS_TENSOR`.
pub(super) const CLASS_TENSOR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub(super) what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
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

/// `Summary.Value.value`; 4 is an image, 5 a histogram, 6 audio.
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

/// A tensor without dimensions: one string.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

/// `TensorShapeProto`, of which only the shape without dimensions is used.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {}

/// What of any event is read again: other fields are skipped.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Stamp {
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
}
