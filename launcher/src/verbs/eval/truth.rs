//! The true places of the test photos, for evaluations that need no photos. They come from the file `eval.truth`. If
//! `eval.truth` is empty, a worker reads them from `shards.test`.

use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::predictions::Truth;
use locdiff_core::protocol::{Job, ShardsJob, TruthWritten};

use crate::error::LaunchError;
use crate::rendezvous::{NodeWorkers, cores};
use crate::supervisor::{Echo, Supervisor};
use crate::verbs::locations::require_shards;
use crate::verbs::paths::require_file;

/// The true places of the test photos.
pub(super) struct TestPlaces {
    pub truth: Truth,
    /// Whether the test photos are simulated.
    pub is_simulated: bool,
}

impl TestPlaces {
    pub(super) fn read(config: &RunConfig, supervisor: &mut Supervisor) -> anyhow::Result<Self> {
        if !config.eval.truth.is_empty() {
            let file = Path::new(&config.eval.truth).to_owned();
            require_file("eval.truth", &file)?;
            let truth = supervisor.compute(move || Ok(Truth::read(&file).map_err(LaunchError::reported)?))?;
            return Ok(Self { truth, is_simulated: false });
        }
        require_shards("shards.test", &config.shards.test)?;
        let folder = tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?;
        let out = folder.path().join("truth.parquet");
        let job = Job::Shards(Box::new(ShardsJob::Truth { out: out.clone(), config: Box::new(config.clone()) }));
        let world = NodeWorkers::one_cpu_worker(cores());
        let found = supervisor.run::<TruthWritten>(config, &world, job, 0, &mut Echo)?;
        let source = config.shards.test.clone();
        let truth = supervisor.compute(move || Ok(Truth::read_as(source, &out).map_err(LaunchError::reported)?))?;
        Ok(Self { truth, is_simulated: found.first()?.is_simulated })
    }
}
