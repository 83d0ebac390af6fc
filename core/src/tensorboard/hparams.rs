//! The HPARAMS page of TensorBoard: the hyperparameters of a run, and the scalars that are shown as its results.
//!
//! TensorBoard uses only the first record of each kind, so a resumed run would keep showing the values of its first
//! attempt. The values are therefore stored in a separate small file, which every attempt replaces. The record that
//! marks the end of a run (`session_end_info`) is written by the [`Board`](super::Board), one step after the last step.
//! This record is removed when the run resumes.
//!
//! Source: `tensorboard/plugins/hparams/{api,plugin_data}.proto`.

use std::collections::BTreeMap;
use std::path::Path;

use prost::{Message, Oneof};

use super::error::BoardError;
use super::event::{
    CLASS_TENSOR, Event, EventContent, FILE_VERSION, Payload, Summary, SummaryMetadata, SummaryValue, TensorProto,
    since_1970,
};
use super::record::frame;
use crate::files::FileError;

/// Name of the file with the values. It sorts before the names of all other event files, so TensorBoard reads this file
/// first.
pub(super) const FILE: &str = "events.out.tfevents.0000000000.hparams";
/// Temporary name of the file while it is written. TensorBoard ignores files with this name.
const FILE_TEMPORARY: &str = "hparams.new";
const PLUGIN: &str = "hparams";
const EXPERIMENT: &str = "_hparams_/experiment";
const SESSION_START: &str = "_hparams_/session_start_info";
const SESSION_END: &str = "_hparams_/session_end_info";
/// `Status.STATUS_SUCCESS`.
const STATUS_SUCCESS: i32 = 1;
// `DataType`.
const TYPE_STRING: i32 = 1;
const TYPE_BOOL: i32 = 2;
const TYPE_FLOAT64: i32 = 3;

/// The value of a hyperparameter.
#[derive(Debug, Clone, PartialEq)]
pub enum Hyperparameter {
    /// A number.
    Number(f64),
    /// A string.
    Text(String),
    /// A boolean.
    Flag(bool),
}

/// The hyperparameters of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Hyperparameters {
    /// Names and values.
    pub values: BTreeMap<String, Hyperparameter>,
    /// Names of the hyperparameters to show first. By default TensorBoard's HPARAMS page shows only five columns.
    pub shown_first: Vec<String>,
    /// Tags of the scalars whose last values are the results of the run. By default TensorBoard's HPARAMS page shows
    /// only the first five tags.
    pub metrics: Vec<String>,
}

impl Hyperparameters {
    /// Writes the values to the folder of a run. The values of an earlier attempt are replaced atomically.
    pub fn save(&self, folder: &Path) -> Result<(), BoardError> {
        std::fs::create_dir_all(folder).map_err(FileError::at(folder))?;
        let (path, temporary) = (folder.join(FILE), folder.join(FILE_TEMPORARY));
        let wall_time = since_1970().as_secs_f64();
        let experiment = Content::Experiment(self.experiment(wall_time));
        let start = Content::Start(SessionStart { hparams: self.session_values(), start_time_secs: wall_time });
        let value = vec![value(EXPERIMENT, experiment), value(SESSION_START, start)];
        let events = [EventContent::FileVersion(FILE_VERSION.to_owned()), EventContent::Summary(Summary { value })];
        let records =
            events.map(|content| frame(&Event { wall_time, step: 0, content: Some(content) }.encode_to_vec()));
        std::fs::write(&temporary, records.concat()).map_err(FileError::at(&temporary))?;
        Ok(std::fs::rename(&temporary, &path).map_err(FileError::at(&path))?)
    }

    fn experiment(&self, time_created_secs: f64) -> Experiment {
        let info = |(name, value): (&String, &Hyperparameter)| {
            let kind = match value {
                Hyperparameter::Number(_) => TYPE_FLOAT64,
                Hyperparameter::Text(_) => TYPE_STRING,
                Hyperparameter::Flag(_) => TYPE_BOOL,
            };
            // TensorBoard's HPARAMS page shows the columns marked `differs` first, and sorts the other columns by name.
            HparamInfo { name: name.clone(), kind, differs: self.shown_first.contains(name) }
        };
        let metric = |tag: &String| MetricInfo { name: Some(MetricName { tag: tag.clone() }) };
        Experiment {
            time_created_secs,
            hparam_infos: self.values.iter().map(info).collect(),
            metric_infos: self.metrics.iter().map(metric).collect(),
        }
    }

    fn session_values(&self) -> BTreeMap<String, AnyValue> {
        let any = |value: &Hyperparameter| match value {
            Hyperparameter::Number(number) => AnyKind::Number(*number),
            Hyperparameter::Text(text) => AnyKind::Text(text.clone()),
            Hyperparameter::Flag(flag) => AnyKind::Flag(*flag),
        };
        self.values.iter().map(|(name, value)| (name.clone(), AnyValue { kind: Some(any(value)) })).collect()
    }
}

/// The value that marks the end of a session.
pub(super) fn session_end() -> SummaryValue {
    value(SESSION_END, Content::End(SessionEnd { status: STATUS_SUCCESS, end_time_secs: since_1970().as_secs_f64() }))
}

fn value(tag: &str, content: Content) -> SummaryValue {
    let content = PluginContent { content: Some(content) }.encode_to_vec();
    let metadata = Some(SummaryMetadata::of(PLUGIN, content, CLASS_TENSOR));
    SummaryValue { tag: tag.to_owned(), metadata, payload: Some(Payload::Tensor(TensorProto::empty())) }
}

/// `HParamsPluginData`. The field `version` is omitted: its value is 0, which encodes to no bytes.
#[derive(Clone, PartialEq, Message)]
struct PluginContent {
    #[prost(oneof = "Content", tags = "2, 3, 4")]
    content: Option<Content>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Content {
    #[prost(message, tag = "2")]
    Experiment(Experiment),
    #[prost(message, tag = "3")]
    Start(SessionStart),
    #[prost(message, tag = "4")]
    End(SessionEnd),
}

#[derive(Clone, PartialEq, Message)]
struct Experiment {
    #[prost(double, tag = "3")]
    time_created_secs: f64,
    #[prost(message, repeated, tag = "4")]
    hparam_infos: Vec<HparamInfo>,
    #[prost(message, repeated, tag = "5")]
    metric_infos: Vec<MetricInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct HparamInfo {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "4")]
    kind: i32,
    #[prost(bool, tag = "7")]
    differs: bool,
}

#[derive(Clone, PartialEq, Message)]
struct MetricInfo {
    #[prost(message, optional, tag = "1")]
    name: Option<MetricName>,
}

#[derive(Clone, PartialEq, Message)]
struct MetricName {
    #[prost(string, tag = "2")]
    tag: String,
}

#[derive(Clone, PartialEq, Message)]
struct SessionStart {
    #[prost(btree_map = "string, message", tag = "1")]
    hparams: BTreeMap<String, AnyValue>,
    #[prost(double, tag = "5")]
    start_time_secs: f64,
}

#[derive(Clone, PartialEq, Message)]
struct SessionEnd {
    #[prost(int32, tag = "1")]
    status: i32,
    #[prost(double, tag = "2")]
    end_time_secs: f64,
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(oneof = "AnyKind", tags = "2, 3, 4")]
    kind: Option<AnyKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum AnyKind {
    #[prost(double, tag = "2")]
    Number(f64),
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(bool, tag = "4")]
    Flag(bool),
}
