//! Records of a W&B run, the messages of its `.wandb` file.
//!
//! Field numbers come from W&B's `wandb_internal.proto`. Fields that DeepBurn does not write are
//! omitted. A value is JSON text with three more words, `NaN`, `Infinity` and `-Infinity`, as W&B's
//! own client writes it.

use prost::Message;

/// `Record`: one entry of the file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// The number of the record in the file, from 1.
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(oneof = "RecordKind", tags = "2, 3, 17, 18, 21")]
    pub(super) kind: Option<RecordKind>,
}

/// The content of a [`Record`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum RecordKind {
    #[prost(message, tag = "2")]
    History(HistoryRecord),
    #[prost(message, tag = "3")]
    Summary(UpdateRecord),
    #[prost(message, tag = "17")]
    Run(RunRecord),
    #[prost(message, tag = "18")]
    Exit(ExitRecord),
    #[prost(message, tag = "21")]
    Header(HeaderRecord),
}

/// `HeaderRecord`: the first record of a file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderRecord {
    #[prost(message, optional, tag = "1")]
    pub(super) version_info: Option<VersionInfo>,
}

/// `VersionInfo`: who wrote the file, and who can read it.
#[derive(Clone, PartialEq, Message)]
pub(super) struct VersionInfo {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    /// The oldest version of W&B's server that can read the file.
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}

/// `RunRecord`: the identity and the configuration of a run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RunRecord {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    /// The team; empty for the default entity of whoever uploads the run.
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<UpdateRecord>,
    #[prost(string, tag = "6")]
    pub(super) run_group: String,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    /// The step of the first history row; 0 for a new run.
    #[prost(int64, tag = "14")]
    pub(super) starting_step: i64,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<Timestamp>,
    /// The seconds that earlier parts of the run took.
    #[prost(int32, tag = "20")]
    pub(super) runtime: i32,
    /// Whether the upload continues a run of this ID. Versions of W&B before 0.29 do not have the
    /// field and ignore it.
    #[prost(bool, tag = "24")]
    pub(super) resume: bool,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Timestamp {
    /// Seconds since 1970.
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

/// `ConfigRecord` and `SummaryRecord`, which are alike: values of the configuration, or the last
/// value of each metric.
#[derive(Clone, PartialEq, Message)]
pub(super) struct UpdateRecord {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<WandbItem>,
}

/// `HistoryRecord`: the row of a step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HistoryRecord {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<WandbItem>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<HistoryStep>,
}

impl HistoryRecord {
    /// Returns the step of the row; 0 if it has none.
    pub(super) fn step(&self) -> u64 {
        let num = self.step.as_ref().map_or(0, |step| step.num);
        u64::try_from(num).unwrap_or(0)
    }
}

/// `HistoryStep`: the step of a row.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HistoryStep {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

/// `RunExitRecord`: the end of a run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ExitRecord {
    /// The exit status of the program; 0 is success.
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    /// The duration of the run in seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}

/// `HistoryItem`, `SummaryItem` and `ConfigItem`, which are alike: a value and its key.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbItem {
    /// The key; empty if `nested_key` is given.
    #[prost(string, tag = "1")]
    pub(super) key: String,
    /// The path of a value inside of others.
    #[prost(string, repeated, tag = "2")]
    pub(super) nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

impl WandbItem {
    /// Returns an item with a number, which may be NaN or infinite.
    pub(super) fn number(key: &str, value: f64) -> Self {
        let value_json = match value {
            value if value.is_nan() => "NaN".to_owned(),
            f64::INFINITY => "Infinity".to_owned(),
            f64::NEG_INFINITY => "-Infinity".to_owned(),
            value => serde_json::Value::from(value).to_string(),
        };
        Self { key: key.to_owned(), nested_key: Vec::new(), value_json }
    }

    /// Returns an item with a count.
    pub(super) fn count(key: &str, value: u64) -> Self {
        Self::json(key, &value.into())
    }

    /// Returns an item with any value.
    pub(super) fn json(key: &str, value: &serde_json::Value) -> Self {
        Self { key: key.to_owned(), nested_key: Vec::new(), value_json: value.to_string() }
    }
}
