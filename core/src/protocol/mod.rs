//! Messages between launcher and worker: JSON over a Unix socket. Each message is preceded by its length in 4
//! big-endian bytes.
//!
//! Each worker connects and sends [`Hello`]. When all workers have sent `Hello`, the launcher sends each of them
//! [`ToWorker::Start`]. Workers that must connect to each other find each other through the launcher's key-value store
//! ([`ToLauncher::Store`], [`ToWorker::Stored`]). The last message of a worker is [`ToLauncher::Result`] or
//! [`ToLauncher::Failed`].
//!
//! `Hello` has the same fields in every version, so that mismatched builds can recognise each other.

mod checkpoint;
mod eval;
mod fault;
mod goodput;
mod measure;
mod result;
mod shards;
mod store;
mod train;

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::exit_code::FailureKind;
use crate::pulse::Beat;

pub use checkpoint::{ExportJob, Exported, RunParts};
pub use eval::{
    Alternative, EvalJob, EvalSummary, EvalTask, GalleryEmbedded, HybridRequest, LocatedRow, LocatedRows, Method,
    NearestKnown, PhotoToLocate, PredictedRow, PredictedRows, Prediction, RefusedPhoto, ReportPhoto, RowDensity,
    ServedModel, StepDensity, TruthWritten, TuningErrors, piece_rows,
};
pub use fault::{FaultKind, InjectedFault, MEMORY_EVENTS_VARIABLE};
pub use goodput::Goodput;
pub use measure::{
    Ceilings, CollectiveRow, PerturbationBlock, Probed, ProfileRow, SampleBench, SampleBenched, SelfCheck, ShddRow,
    StepProfile, StepSpeed, TrainBench, TrainBenched,
};
pub use result::{JobResult, TypedResult, WrongResult};
pub use shards::{
    CellPart, CellSplit, GeoclipImported, ImageHead, Inspection, PieceFolders, PiecesSimulated, Problem, ReadingSpeed,
    ReplayReport, ReplayedSize, ShardsBenched, ShardsJob, ShardsMade, SimulatedWorld, SimulationStep, Statistics,
    Verified,
};
pub use store::{KeyValues, STORE_BYTES_MAX, StoreAnswer, StoreOperation, StoreReply, StoreRequest, StoreValue};
pub use train::{
    CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CHECKPOINT_STATE, CheckpointFile, CheckpointManifest, PartsWritten,
    Progress, QuickEvaluation, TimeBefore, TrainJob, TrainSummary, partial_name, step_name,
};

/// Version of the protocol. Increase it whenever a message changes.
pub const PROTOCOL_VERSION: u32 = 20;

/// Size limit of a message. If the peer announces a longer message, it probably uses another protocol.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Environment variable with the path of the launcher's socket.
pub const CONTROL_VARIABLE: &str = "LOCDIFF_CONTROL";

/// Environment variable with the launcher's process id. A worker compares it with the id of its parent process, because
/// the launcher may have died before the worker requested the parent-death signal.
pub const LAUNCHER_PID_VARIABLE: &str = "LOCDIFF_LAUNCHER_PID";

/// The first message that a worker sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The worker's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// Rank of the worker.
    pub rank: u32,
    /// The worker's process id.
    pub pid: u32,
    /// Version of the worker's crate.
    pub version: String,
    /// Git revision of the worker.
    pub revision: String,
    /// libtorch version that the worker was compiled with.
    pub libtorch_built: String,
    /// libtorch version that the worker has loaded.
    pub libtorch_loaded: String,
    /// CUDA runtime version of the worker; `None` in the CPU variant.
    pub cuda: Option<String>,
    /// NCCL version of the worker; `None` in the CPU variant.
    pub nccl: Option<String>,
}

/// Ranks and resources of one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerSlot {
    /// Global rank, from 0.
    pub rank: u32,
    /// Number of workers.
    pub world: u32,
    /// Number of the worker's node, from 0.
    pub node: u32,
    /// Rank of the worker on its node, from 0.
    pub local_rank: u32,
    /// Index of the worker's GPU among the visible GPUs; `None` on the CPU.
    pub gpu: Option<u32>,
    /// Number of CPU threads that the worker uses.
    pub threads: u32,
}

/// How the workers of a run connect to each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Meeting {
    /// Network interface that workers bind to; "": loopback.
    pub interface: String,
    /// Number of the attempt, from 0.
    pub attempt: u32,
    /// Number of workers that one replica of the model is split over.
    pub tensor_parallel: u32,
    /// Time limit for all workers to connect, seconds.
    pub rendezvous_timeout_s: f64,
    /// Time limit of a collective operation, seconds.
    pub collective_timeout_s: f64,
    /// Time between two heartbeats, seconds.
    pub heartbeat_s: f64,
}

/// Work for the workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// Send `Hello` and exit, for `--version` and `doctor`.
    Probe,
    /// Check that libtorch computes correctly.
    SelfCheck,
    /// Check and time collective operations.
    BenchCollectives {
        /// Size of the largest tensor, bytes.
        bytes_max: u64,
    },
    /// Check and time spherical harmonics.
    BenchShdd,
    /// Time training steps.
    BenchTrain(Box<TrainBench>),
    /// Time the location of images. Only one worker takes part.
    BenchSample(Box<SampleBench>),
    /// Measure how far noise moves the mode of a code. The points are divided among the workers.
    Perturbation {
        /// Number of points per degree, over all workers.
        points: u32,
    },
    /// Work on shards.
    Shards(Box<ShardsJob>),
    /// Train a model.
    Train(Box<TrainJob>),
    /// Export the averaged weights of a checkpoint to one file.
    Export(Box<ExportJob>),
    /// Locate the rows of a data set. The rows are divided among the workers.
    Eval(Box<EvalJob>),
    /// Compute the embeddings of an evaluation's gallery and store them on disk.
    Gallery(Box<EvalJob>),
    /// Load a model, and locate the photos that the launcher sends until the launcher ends. Only one worker takes part.
    Serve(Box<EvalJob>),
}

impl Job {
    /// Name of the job in error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::SelfCheck => "self-check",
            Self::BenchCollectives { .. } => "bench collectives",
            Self::BenchShdd => "bench shdd",
            Self::BenchTrain(_) => "bench train",
            Self::BenchSample(_) => "bench sample",
            Self::Perturbation { .. } => "eval --suite perturbation",
            Self::Shards(job) => job.name(),
            Self::Train(_) => "train",
            Self::Export(_) => "checkpoint export",
            Self::Eval(_) => "eval",
            Self::Gallery(_) => "eval --hybrid (gallery)",
            Self::Serve(_) => "serve",
        }
    }
}

/// Messages from launcher to worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToWorker {
    /// Start a job.
    Start {
        /// Ranks and resources of the worker.
        place: WorkerSlot,
        /// How to connect to the other workers.
        meeting: Meeting,
        /// The work to do.
        job: Job,
    },
    /// The reply to [`ToLauncher::Store`].
    Stored(StoreReply),
    /// Write a checkpoint and end the job early.
    Stop,
    /// Inject a fault.
    Inject(InjectedFault),
    /// Locate a photo, if the job is [`Job::Serve`].
    Locate(PhotoToLocate),
}

/// The error of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The error with its chain of causes.
    pub message: String,
    /// Whether another worker caused the failure, by dying, stopping or never connecting. If so, this failure is not
    /// the root cause.
    pub of_peer: bool,
    /// Exit code for the whole command.
    pub exit_code: u8,
    /// The kind of the failure, which decides whether and how to try again.
    pub kind: FailureKind,
}

/// Messages from worker to launcher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToLauncher {
    /// The first message of a worker.
    Hello(Hello),
    /// A question to the key-value store.
    Store(StoreRequest),
    /// From rank 0: training progress.
    Progress(Progress),
    /// From rank 0: result of a quick evaluation.
    Evaluated(QuickEvaluation),
    /// This worker is about to trigger an injected fault.
    Breaking(InjectedFault),
    /// What this worker is doing. A separate thread of the worker sends this message.
    Beat(Beat),
    /// This rank has written its parts of a checkpoint.
    Parts(PartsWritten),
    /// Rows of an evaluation, with the locations that this worker found.
    Located(LocatedRows),
    /// Rows of a data set, or photos of [`ToWorker::Locate`], with the predictions of this worker.
    Predicted(PredictedRows),
    /// After all rows of an evaluation: a photo for the report.
    ReportPhoto(ReportPhoto),
    /// The worker has loaded its model and waits for photos.
    Serving(ServedModel),
    /// A photo of [`ToWorker::Locate`] cannot be located.
    Refused(RefusedPhoto),
    /// From rank 0, in the order of the rows: how near the test rows are to known places.
    Nearest(NearestKnown),
    /// Progress of embedding the gallery of an evaluation.
    Embedded {
        /// Number of gallery points embedded so far.
        points: u64,
        /// Total number of gallery points.
        of_points: u64,
    },
    /// The job succeeded. The worker exits after this message.
    Result(Box<JobResult>),
    /// The job failed. The worker exits after this message.
    Failed(Failure),
}

/// A message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The socket failed, or closed in the middle of a message.
    #[error("control socket: {0}")]
    Io(#[from] io::Error),
    /// The message is longer than the protocol allows.
    #[error("control socket: message of {got} bytes, wanted at most {FRAME_BYTES_MAX}")]
    TooLong {
        /// Length of the message.
        got: usize,
    },
    /// The message is not valid JSON, or not a message of this protocol.
    #[error("control socket: malformed message: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Writes one message.
pub fn write_message(out: &mut impl Write, message: &impl Serialize) -> Result<(), ProtocolError> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= FRAME_BYTES_MAX);
    let length = length.ok_or(ProtocolError::TooLong { got: body.len() })?;
    out.write_all(&length.to_be_bytes())?;
    out.write_all(&body)?;
    Ok(out.flush()?)
}

/// Reads one message; `None` if the peer closed the socket after a complete message.
pub fn read_message<T: DeserializeOwned>(input: &mut impl Read) -> Result<Option<T>, ProtocolError> {
    let mut length = [0_u8; 4];
    match input.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => input.read_exact(&mut length[1..])?,
    }
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(ProtocolError::TooLong { got: length });
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body)?;
    Ok(Some(serde_json::from_slice(&body)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(body: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(body.len()).expect("the body is shorter than 4 GiB").to_be_bytes().to_vec();
        bytes.extend_from_slice(body);
        bytes
    }

    proptest! {
        #[test]
        fn messages_survive_a_round_trip(message in ".*", of_peer: bool, count in 1_usize..4) {
            let sent = ToLauncher::Failed(Failure { message, of_peer, exit_code: 14, kind: FailureKind::Crash });
            let mut wire = Vec::new();
            for _ in 0..count {
                write_message(&mut wire, &sent).expect("writing to a Vec cannot fail");
            }
            let mut input = wire.as_slice();
            for _ in 0..count {
                prop_assert_eq!(read_message(&mut input).expect("the message is complete"), Some(sent.clone()));
            }
            prop_assert_eq!(read_message::<ToLauncher>(&mut input).expect("the input ends after a message"), None);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>) {
            let _ = read_message::<ToLauncher>(&mut bytes.as_slice());
            let _ = read_message::<ToLauncher>(&mut frame(&bytes).as_slice());
        }
    }

    #[test]
    fn truncated_message_is_an_error() {
        let mut wire = Vec::new();
        write_message(&mut wire, &ToLauncher::Result(Box::new(Probed {}.into()))).expect("a Vec grows as needed");
        for cut in 1..wire.len() {
            let error = read_message::<ToLauncher>(&mut &wire[..cut]).expect_err("the message is cut short");
            assert!(matches!(error, ProtocolError::Io(_)), "{cut}: {error}");
        }
    }

    #[test]
    fn oversized_length_is_refused_before_allocation() {
        let error = read_message::<ToLauncher>(&mut b"GET / HTTP/1.1".as_slice()).expect_err("this is not a message");
        assert!(matches!(error, ProtocolError::TooLong { got: 0x4745_5420 }), "{error}");
    }

    #[test]
    fn unknown_message_is_an_error() {
        let wire = frame(br#"{"dance":{}}"#);
        let error = read_message::<ToWorker>(&mut wire.as_slice()).expect_err("the variant is unknown");
        assert!(error.to_string().contains("unknown variant `dance`"), "{error}");
    }
}
