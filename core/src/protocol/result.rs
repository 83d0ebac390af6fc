//! The result of every job. The launcher takes a result out by its type: another job's result is an error that says so.

use serde::{Deserialize, Serialize};

use super::{
    CollectiveRow, EvalSummary, Exported, GalleryEmbedded, GeoclipImported, Inspection, PerturbationBlock, Probed,
    SelfCheck, ShardsBenched, ShardsMade, ShddRow, TrainSummary, TruthWritten, Verified,
};

/// A result that is not the one of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("got the result of `{got}`, wanted that of `{want}`")]
pub struct WrongResult {
    /// The kind that came.
    pub got: &'static str,
    /// The kind of the job.
    pub want: &'static str,
}

/// The result of some job.
pub trait Answer: TryFrom<JobResult, Error = WrongResult> {}

impl<T: TryFrom<JobResult, Error = WrongResult>> Answer for T {}

macro_rules! results {
    ($($kind:ident($result:ty) $name:literal,)*) => {
        /// What a worker answers when its job is done: one kind for each job.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[allow(missing_docs, reason = "each kind is described at its type")]
        pub enum JobResult {
            $($kind($result),)*
        }

        impl JobResult {
            /// Name of the jobs that have this kind of result.
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

results! {
    Probe(Probed) "probe",
    SelfCheck(SelfCheck) "self-check",
    BenchCollectives(Vec<CollectiveRow>) "bench collectives",
    BenchShdd(Vec<ShddRow>) "bench shdd",
    BenchShards(ShardsBenched) "bench shards",
    Perturbation(Vec<PerturbationBlock>) "eval --suite perturbation",
    ShardsMade(ShardsMade) "shards simulate or build",
    ShardsVerified(Verified) "shards verify",
    ShardsInspected(Inspection) "shards inspect",
    GeoclipImported(GeoclipImported) "geoclip import",
    Truth(TruthWritten) "eval --predictions (truth)",
    Train(TrainSummary) "train",
    Export(Exported) "checkpoint export",
    Eval(EvalSummary) "eval",
    Gallery(GalleryEmbedded) "eval --hybrid (gallery)",
}
