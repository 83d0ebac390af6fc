//! What rank 0 logs before the first step: the sizes of the model, the gang and the data.

use locdiff_core::config::RunConfig;
use locdiff_core::text::training_time;

use crate::comm::Communicator;
use crate::shards::RowWeights;
use crate::train::data::TrainingData;
use crate::train::work::autograd_reason;

/// With more epochs than this, a model sees each row so often that it may memorise the rows.
const EPOCHS_MANY: f64 = 200.0;

/// Logs a summary of the training. `parameters` is the number of parameters of a replica. `cache` describes where the
/// rows are kept. `seconds` is a lower bound of the time that the remaining `steps_left` steps take; `None` if the
/// bound is unknown.
pub(in crate::train) fn log(
    config: &RunConfig,
    (data, parameters): (&TrainingData, usize),
    ranks: &Communicator,
    cache: &str,
    (seconds, steps_left): (Option<f64>, u64),
) {
    let parameters = parameters as f64 / 1e6;
    let (workers, device) = (ranks.world().size(), ranks.world().device());
    let device = if device.is_cuda() { "GPU" } else { "CPU" };
    let engine = match autograd_reason(config, ranks) {
        Some(reason) => format!("autograd, because {reason}"),
        None => "fused kernels without autograd".to_owned(),
    };
    tracing::info!("{parameters:.1} M parameters, trained by {workers} {device} worker(s) with {engine}");
    let (plan, batch, steps) = (&data.plan, config.train.global_batch, config.train.steps);
    let (rows, views) = (plan.rows(), plan.layout().views);
    let views = if views == 1 { "one view".to_owned() } else { format!("{views} views") };
    let means = config.shards.mean_views;
    let views = if means > 1 { format!("{views} (means of {means} stored views)") } else { views };
    tracing::info!("{rows} rows with {views} each from {}: {cache}", config.shards.train);
    if let Some((low, high)) = plan.weights().map(RowWeights::range) {
        let (alpha, cell) = (config.shards.density_alpha, config.shards.density_cell_degrees);
        tracing::info!(
            "rows are drawn in proportion to density^-{alpha} in cells of {cell} degrees: each row comes on average \
             {low:.3} to {high:.1} times per epoch"
        );
    }
    let tail = match (plan.dropped_rows(), plan.padded_rows()) {
        (0, 0) => String::new(),
        (dropped, 0) => format!("; it leaves out {dropped} rows, different ones in each epoch"),
        (_, padded) => format!("; it repeats {padded} rows, different ones in each epoch"),
    };
    let epoch_steps = plan.steps();
    let epochs = steps as f64 / epoch_steps as f64;
    tracing::info!("{steps} steps of {batch} rows = {epochs:.1} epochs");
    tracing::info!("an epoch has {epoch_steps} steps{tail}");
    if epochs > EPOCHS_MANY {
        tracing::warn!(
            "{epochs:.0} epochs of only {rows} rows: the model may memorise the rows; lower train.steps, or train on \
             more rows"
        );
    }
    if let Some(seconds) = seconds.filter(|_| steps_left > 0) {
        match training_time("at least about", seconds, steps_left) {
            (text, true) => tracing::warn!("{text}"),
            (text, false) => tracing::info!("{text}, going by the speed of matrix products"),
        }
    }
}
