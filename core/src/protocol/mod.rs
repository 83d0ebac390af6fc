//! What launcher and worker say to each other: JSON in frames of a 4-byte big-endian length, over a Unix socket.
//!
//! The worker connects and says [`Hello`]; the launcher answers with [`ToWorker::Start`] once all have. Where workers must meet,
//! rank 0 says where it listens, and the launcher tells the others. A worker ends with [`ToLauncher::Result`] or [`ToLauncher::Failed`]. `Hello` keeps its shape in every version, so that two builds that do not
//! fit can say so.

mod checkpoint;
mod eval;
mod measure;
mod result;
mod shards;
mod train;

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use checkpoint::{ExportJob, Exported};
pub use eval::{
    EvalJob, EvalSummary, GalleryEmbedded, HybridWish, Located, LocatedRow, Method, TruthWritten, TuningErrors,
};
pub use measure::{CollectiveRow, PerturbationBlock, Probed, SelfCheck, ShddRow};
pub use result::{Answer, JobResult, WrongResult};
pub use shards::{
    GeoclipImported, ImageHead, Inspection, Problem, ReadingSpeed, ReplayReport, ReplayedSize, ShardsBenched,
    ShardsJob, ShardsMade, Statistics, Verified,
};
pub use train::{
    CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest, Fault, PartsWritten, Progress,
    QuickEvaluation, TrainJob, TrainSummary, partial_name, step_name,
};

/// Version of the messages. Raise it with every change of their meaning.
pub const PROTOCOL_VERSION: u32 = 6;

/// No message is larger; a longer length is a peer that speaks something else.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Environment variable with the path of the launcher's socket.
pub const CONTROL_VARIABLE: &str = "LOCDIFF_CONTROL";

/// Environment variable with the launcher's process id, by which a worker sees that its launcher died before it could ask
/// for the parent-death signal.
pub const LAUNCHER_PID_VARIABLE: &str = "LOCDIFF_LAUNCHER_PID";

/// The first message, from the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The worker's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// Who is speaking.
    pub rank: u32,
    /// The worker's process id.
    pub pid: u32,
    /// Version of the worker's crate.
    pub version: String,
    /// Git revision of the worker.
    pub revision: String,
    /// libtorch that the worker was compiled with.
    pub libtorch_built: String,
    /// libtorch that the worker has loaded.
    pub libtorch_loaded: String,
    /// CUDA runtime of the worker; none in the CPU variant.
    pub cuda: Option<String>,
    /// NCCL of the worker; none in the CPU variant.
    pub nccl: Option<String>,
}

/// Where a worker stands among the others, and what it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Global rank, from 0.
    pub rank: u32,
    /// Number of workers of the run.
    pub world: u32,
    /// Rank on this node, from 0.
    pub local_rank: u32,
    /// Index of the GPU among the visible ones; none on the CPU.
    pub gpu: Option<u32>,
    /// CPU threads.
    pub threads: u32,
}

/// How the workers of a run find each other and how long they wait for each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Meeting {
    /// Interface that they bind to; "": loopback.
    pub interface: String,
    /// Which attempt of the run this is, from 0: what an earlier one left in the store is not seen.
    pub attempt: u32,
    /// Workers that one replica of the model is split over.
    pub tensor_parallel: u32,
    /// Until all have met, seconds.
    pub rendezvous_timeout_s: f64,
    /// Until a collective operation has ended, seconds.
    pub collective_timeout_s: f64,
}

/// What a worker is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// Say hello and end: for `--version` and `doctor`.
    Probe,
    /// Check that libtorch computes right in this process.
    SelfCheck,
    /// Check and time collective operations.
    BenchCollectives {
        /// Largest tensor.
        bytes_max: u64,
    },
    /// Check and time spherical harmonics.
    BenchShdd,
    /// Measure how far noise on a code moves its mode; the workers share the points.
    Perturbation {
        /// Points per degree.
        points: u32,
    },
    /// Work on shards.
    Shards(Box<ShardsJob>),
    /// Train a model.
    Train(Box<TrainJob>),
    /// Make one file of a checkpoint's averaged weights.
    Export(Box<ExportJob>),
    /// Locate the rows of a data set; the workers share them.
    Eval(Box<EvalJob>),
    /// Embed the gallery of an evaluation, so that its embeddings lie on the disk.
    Gallery(Box<EvalJob>),
}

impl Job {
    /// Its name in messages to people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::SelfCheck => "self-check",
            Self::BenchCollectives { .. } => "bench collectives",
            Self::BenchShdd => "bench shdd",
            Self::Perturbation { .. } => "eval --suite perturbation",
            Self::Shards(job) => job.name(),
            Self::Train(_) => "train",
            Self::Export(_) => "checkpoint export",
            Self::Eval(_) => "eval",
            Self::Gallery(_) => "eval --hybrid (gallery)",
        }
    }
}

/// From launcher to worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToWorker {
    /// Begin.
    Start {
        /// Where it stands.
        place: Place,
        /// How it finds the others.
        meeting: Meeting,
        /// What to do.
        job: Job,
    },
    /// Rank 0 keeps the store that all meet at.
    Rendezvous {
        /// HOST:PORT of the store.
        address: String,
    },
}

/// What went wrong in a worker, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The error, with all that lies behind it.
    pub message: String,
    /// The failure is that of a peer as this worker sees it: a collective that was broken off. It is never the first cause.
    pub of_peer: bool,
    /// The exit code that the whole command should end with.
    pub exit_code: u8,
}

/// From worker to launcher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToLauncher {
    /// First of all.
    Hello(Hello),
    /// From rank 0: the store that all meet at listens.
    Listening {
        /// HOST:PORT of the store.
        address: String,
    },
    /// Training goes on; from rank 0.
    Progress(Progress),
    /// A quick evaluation was made; from rank 0.
    Evaluated(QuickEvaluation),
    /// This worker is about to break something, as it was asked to.
    Breaking(Fault),
    /// This rank's parts of a checkpoint are written.
    Parts(PartsWritten),
    /// Rows of an evaluation were located.
    Located(Located),
    /// The job is done; the worker ends now.
    Result(Box<JobResult>),
    /// The job cannot be done; the worker ends now.
    Failed(Failure),
}

/// A message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The socket failed, or closed in the middle of a message.
    #[error("control socket: {0}")]
    Io(#[from] io::Error),
    /// The length cannot be one of ours.
    #[error("control socket: message of {got} bytes, at most {FRAME_BYTES_MAX} are allowed")]
    TooLong {
        /// The length that was announced.
        got: usize,
    },
    /// Not the JSON that was expected.
    #[error("control socket: message not understood: {0}")]
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

/// Reads one message; none when the peer has closed the socket between two of them.
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
        let mut bytes = u32::try_from(body.len()).expect("short").to_be_bytes().to_vec();
        bytes.extend_from_slice(body);
        bytes
    }

    proptest! {
        #[test]
        fn messages_survive_the_wire(message in ".*", of_peer: bool, count in 1_usize..4) {
            let sent = ToLauncher::Failed(Failure { message, of_peer, exit_code: 14 });
            let mut wire = Vec::new();
            for _ in 0..count {
                write_message(&mut wire, &sent).expect("fits");
            }
            let mut input = wire.as_slice();
            for _ in 0..count {
                prop_assert_eq!(read_message(&mut input).expect("reads"), Some(sent.clone()));
            }
            prop_assert_eq!(read_message::<ToLauncher>(&mut input).expect("ends"), None);
        }

        #[test]
        fn hostile_bytes_are_errors_not_panics(bytes: Vec<u8>) {
            let _ = read_message::<ToLauncher>(&mut bytes.as_slice());
            let _ = read_message::<ToLauncher>(&mut frame(&bytes).as_slice());
        }
    }

    #[test]
    fn a_message_cut_short_is_an_error() {
        let mut wire = Vec::new();
        write_message(&mut wire, &ToLauncher::Result(Box::new(Probed {}.into()))).expect("fits");
        for cut in 1..wire.len() {
            let error = read_message::<ToLauncher>(&mut &wire[..cut]).expect_err("cut short");
            assert!(matches!(error, ProtocolError::Io(_)), "{cut}: {error}");
        }
    }

    #[test]
    fn a_length_that_cannot_be_ours_allocates_nothing() {
        let error = read_message::<ToLauncher>(&mut b"GET / HTTP/1.1".as_slice()).expect_err("no frame");
        assert!(matches!(error, ProtocolError::TooLong { got: 0x4745_5420 }), "{error}");
    }

    #[test]
    fn a_message_from_a_later_version_is_not_guessed_at() {
        let wire = frame(br#"{"dance":{}}"#);
        let error = read_message::<ToWorker>(&mut wire.as_slice()).expect_err("unknown");
        assert!(error.to_string().contains("unknown variant `dance`"), "{error}");
    }
}
