//! Lets workers locate the photos of a data set with a model.

use std::path::Path;

use locdiff_core::config::{DecodeAnchors, RetrievalHead, RunConfig, TrainMethod};
use locdiff_core::protocol::{EvalJob, EvalSummary, EvalTask, GalleryEmbedded, HybridRequest, Job};

use super::gather::{GalleryProgress, RowCollector};
use super::model::{ModelFile, head_model};
use crate::error::LaunchError;
use crate::rendezvous::{NodeWorkers, cores};
use crate::supervisor::Supervisor;
use crate::terminal::Display;
use crate::verbs::paths::require_file;
use crate::verbs::restarts::try_again;

/// The workers and their model.
pub(in crate::verbs) struct LocatingGang<'a> {
    pub(in crate::verbs) supervisor: &'a mut Supervisor,
    pub(in crate::verbs) config: &'a RunConfig,
    pub(in crate::verbs) world: &'a NodeWorkers,
    pub(in crate::verbs) model: &'a ModelFile,
}

impl LocatingGang<'_> {
    /// Lets the workers locate the rows of the shards at `data`. After a failure that may pass, tries again with the rows
    /// that `rows` does not have yet.
    pub(in crate::verbs) fn run(
        &mut self,
        data: &str,
        hybrid: HybridRequest,
        task: EvalTask,
        rows: &mut impl RowCollector,
    ) -> anyhow::Result<EvalSummary> {
        let mut job = prepared_job(self.config.clone(), self.model, data, hybrid, task)?;
        if job.hybrid != HybridRequest::No && job.config.retrieval.may_need_geoclip() {
            self.embed_gallery(&job)?;
        }
        let (config, world) = (self.config, self.world);
        try_again(self.supervisor, &config.supervise, |supervisor| {
            // If a node is lost for good, the others do its share.
            let world = supervisor.gather(world)?.with_all_cores();
            rows.begin(&mut job)?;
            let found = supervisor.run(config, &world, Job::Eval(Box::new(job.clone())), 0, rows);
            rows.end();
            found?.first()
        })
    }

    /// Lets one worker with all cores embed the gallery. The result is cached on disk for all workers.
    fn embed_gallery(&mut self, job: &EvalJob) -> anyhow::Result<()> {
        let world = self.world.clone().first_worker_only(cores());
        let (config, job) = (self.config, Job::Gallery(Box::new(job.clone())));
        try_again(self.supervisor, &config.supervise, |supervisor| {
            let mut progress = GalleryProgress(Display::new());
            supervisor.run::<GalleryEmbedded>(config, &world, job.clone(), 0, &mut progress).map(drop)
        })
    }
}

/// The job that locates the rows at `data`. Finds the head of a run that has one, and checks the files that the
/// configuration names.
pub(in crate::verbs) fn prepared_job(
    mut config: RunConfig,
    model: &ModelFile,
    data: &str,
    mut hybrid: HybridRequest,
    task: EvalTask,
) -> Result<EvalJob, LaunchError> {
    if config.train.method == TrainMethod::Geoclip {
        hybrid = HybridRequest::Wanted;
        config.retrieval.head = RetrievalHead::Trained;
        config.retrieval.run = model.path.display().to_string();
    } else if hybrid != HybridRequest::No && config.retrieval.wanted_head() == RetrievalHead::Trained {
        config.retrieval.run = head_model(&config)?.path.display().to_string();
    }
    require_files(&config, data, hybrid, task.needs_truth())?;
    let (checkpoint, checkpoint_xxh3) = (model.path.clone(), model.xxh3.clone());
    Ok(EvalJob { config, checkpoint, checkpoint_xxh3, data: data.to_owned(), hybrid, task, done: Vec::new() })
}

/// Checks the files that the configuration names and the evaluation of the shards at `data` needs. Fails if one of
/// these files is unreadable.
fn require_files(config: &RunConfig, data: &str, hybrid: HybridRequest, needs_truth: bool) -> Result<(), LaunchError> {
    let reads_truth = needs_truth && data == config.shards.test;
    let retrieves = hybrid != HybridRequest::No && config.retrieval.may_need_geoclip();
    let reads_gallery = retrieves || config.eval.anchors == DecodeAnchors::Gallery;
    let files = [
        ("eval.truth", &config.eval.truth, reads_truth),
        ("retrieval.gallery", &config.retrieval.gallery, reads_gallery),
    ];
    let mut read = files.into_iter().filter(|(_, path, is_read)| *is_read && !path.is_empty());
    read.try_for_each(|(key, path, _)| require_file(key, Path::new(path)))
}
