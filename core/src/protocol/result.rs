//! The results of all jobs. The launcher extracts a result by its type. If the worker sent the result of another kind
//! of job, the extraction fails with [`WrongResult`].

use std::convert::Infallible;

use serde::{Deserialize, Serialize};

use super::{
    CollectiveRow, EvalSummary, Exported, GalleryEmbedded, GeoclipImported, Inspection, PerturbationBlock,
    PiecesSimulated, Probed, SampleBenched, SelfCheck, ShardsBenched, ShardsMade, ShddRow, TrainBenched, TrainSummary,
    TruthWritten, Verified,
};

/// The result belongs to another job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("got the result of `{got}`, wanted the result of `{want}`")]
pub struct WrongResult {
    /// Job to which the received result belongs.
    pub got: &'static str,
    /// Job whose result was expected.
    pub want: &'static str,
}

/// A type that is the result of a job.
pub trait TypedResult: TryFrom<JobResult, Error = WrongResult> {}

impl<T: TryFrom<JobResult, Error = WrongResult>> TypedResult for T {}

macro_rules! results {
    ($($kind:ident($result:ty) $name:literal,)*) => {
        /// The result of a job: one variant per kind of result.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[allow(missing_docs, reason = "the types in the variants are documented")]
        pub enum JobResult {
            $($kind($result),)*
        }

        impl JobResult {
            /// Name of the job that gives this kind of result.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$kind(_) => $name,)*
                }
            }
        }

        $(
            impl From<$result> for JobResult {
                fn from(result: $result) -> Self {
                    Self::$kind(result)
                }
            }

            impl TryFrom<JobResult> for $result {
                type Error = WrongResult;

                fn try_from(result: JobResult) -> Result<Self, WrongResult> {
                    match result {
                        JobResult::$kind(result) => Ok(result),
                        other => Err(WrongResult { got: other.name(), want: $name }),
                    }
                }
            }
        )*
    };
}

/// A worker that serves ends without a result, so any result is wrong.
impl TryFrom<JobResult> for Infallible {
    type Error = WrongResult;

    fn try_from(result: JobResult) -> Result<Self, WrongResult> {
        Err(WrongResult { got: result.name(), want: "serve" })
    }
}

results! {
    Probe(Probed) "probe",
    SelfCheck(SelfCheck) "self-check",
    BenchCollectives(Vec<CollectiveRow>) "bench collectives",
    BenchShdd(Vec<ShddRow>) "bench shdd",
    BenchShards(ShardsBenched) "bench shards",
    BenchTrain(TrainBenched) "bench train",
    BenchSample(SampleBenched) "bench sample",
    Perturbation(Vec<PerturbationBlock>) "eval --suite perturbation",
    ShardsMade(ShardsMade) "shards simulate or build",
    PiecesSimulated(PiecesSimulated) "shards simulate (pieces)",
    ShardsVerified(Verified) "shards verify",
    ShardsInspected(Inspection) "shards inspect",
    GeoclipImported(GeoclipImported) "geoclip import",
    Truth(TruthWritten) "eval (true places)",
    Train(TrainSummary) "train",
    Export(Exported) "checkpoint export",
    Eval(EvalSummary) "eval",
    Gallery(GalleryEmbedded) "eval --hybrid (gallery)",
}
