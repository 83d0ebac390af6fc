//! Opens the training and validation rows on all ranks. Rank 0 lists the files, reads the footers and scans the rows,
//! then broadcasts its findings to the other ranks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use locdiff_core::config::RunConfig;
use locdiff_core::geo::{UnitVector, places};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::error::TrainError;
use crate::comm::{Communicator, Group};
use crate::shards::{
    Batch, BatchOptions, Batches, BlockRows, Blocks, Bookmark, Cache, Contents, DataLayout, Dataset, DatasetIndex,
    InlineBatches, Mask, Plan, PlanOptions, Position, Room, RowWeights, ShardsError, Share, Statistics, Survey,
};
use crate::shdd::{Basis, Filter, ShddError};

/// Timeout of the ranks that wait for rank 0. It is so long that it never expires, because rank 0 may have to read
/// every row. The launcher ends all workers if rank 0 dies or makes no progress (`supervise.data_timeout_s`).
const WATCHED_BY_LAUNCHER: Duration = Duration::from_secs(365 * 24 * 3600);

/// The training rows and their order.
pub(super) struct TrainingData {
    pub(super) plan: Plan,
    pub(super) width: u32,
    /// Mean and standard deviation of every dimension of the embeddings, f32. `None` if embeddings are not
    /// standardised, or if the statistics come from a checkpoint.
    pub(super) statistics: Option<[Tensor; 2]>,
    /// The dimensions of a code that are kept. `None` if all are kept, or if the filter comes from a checkpoint.
    pub(super) filter: Option<Filter>,
    contents: Option<Contents>,
    blocks: Arc<dyn Blocks>,
}

/// The findings that rank 0 broadcasts. Floating-point numbers are sent as bits, because text could round them.
#[derive(Serialize, Deserialize)]
struct SurveyFindings {
    skipped: BTreeMap<u32, Vec<u32>>,
    statistics: Option<[Vec<u64>; 2]>,
    kept: Option<Vec<u32>>,
    contents: Option<Contents>,
}

impl TrainingData {
    /// Opens the training rows. If `is_new` is true, the weights do not come from a checkpoint, so the statistics and
    /// the filter are computed. If the run resumes, `bookmark` comes from its checkpoint. Otherwise, `bookmark` is
    /// `None`.
    pub(super) fn open(
        config: &RunConfig,
        ranks: &Communicator,
        is_new: bool,
        bookmark: Option<&Bookmark>,
    ) -> Result<Self, TrainError> {
        let world = ranks.world().with_timeout(WATCHED_BY_LAUNCHER);
        let mut dataset = open_together("shards.train", &config.shards.train, config, &world)?;
        let width = checked_width(config, &dataset)?;
        let findings = find_on_rank_0(&world, || survey(config, &mut dataset, is_new, bookmark))?;
        dataset.expect_contents(findings.contents.clone())?;
        let mask = Mask::new(findings.skipped, dataset.block_rows())?;
        let options = PlanOptions::new(&config.shards, config.train.seed, config.train.global_batch);
        let weights = weights(config, &dataset, &mask, &world)?;
        let plan = Plan::weighted(DataLayout::of(&dataset), mask, options, weights)?;
        let dims = config.model.dims() as usize;
        let tensors =
            |[mean, deviation]: [Vec<u64>; 2]| Ok::<_, TrainError>([f32_tensor(mean)?, f32_tensor(deviation)?]);
        Ok(Self {
            plan,
            width,
            statistics: findings.statistics.map(tensors).transpose()?,
            filter: findings.kept.map(|kept| Filter::from_indices(&kept, dims)).transpose()?,
            contents: findings.contents,
            blocks: Arc::new(dataset),
        })
    }

    /// The bookmark that a checkpoint stores: the position in the data, and everything that determines the order of
    /// rows.
    pub(super) fn bookmark(&self, position: Position) -> Bookmark {
        Bookmark { contents: self.contents.clone(), ..self.plan.bookmark(position) }
    }

    /// Reads the slice of one batch that belongs to `share`.
    pub(super) fn one_batch(&self, position: Position, share: Share) -> Result<Batch, TrainError> {
        Ok(InlineBatches::new(&*self.blocks, self.plan.clone(), position, share)?.next()?)
    }

    /// Starts to read this rank's slices of the batches, beginning at `position`. The returned text says where rows are
    /// cached.
    pub(super) fn batches(
        &self,
        config: &RunConfig,
        ranks: &Communicator,
        position: Position,
    ) -> Result<(Batches, String), TrainError> {
        let device = ranks.world().device();
        let room = Room::measure(device, ranks.layout().world())?;
        let (cache, summary) = Cache::choose(config.shards.cache, self.plan.layout(), device, room)?;
        let options = BatchOptions::new(&config.shards, cache, device);
        let batches = Batches::new(Arc::clone(&self.blocks), self.plan.clone(), position, share(ranks), &options)?;
        Ok((batches, summary))
    }
}

/// This rank's share of each batch. The ranks of a replica have the same share.
pub(super) fn share(ranks: &Communicator) -> Share {
    Share { worker: ranks.data().rank(), workers: ranks.data().size() }
}

fn checked_width(config: &RunConfig, dataset: &Dataset) -> Result<u32, TrainError> {
    let width = u32::try_from(dataset.width()).unwrap_or(u32::MAX);
    match config.model.embedding_width.value() {
        Some(wanted) if wanted != width => Err(TrainError::Config(format!(
            "model.embedding_width is {wanted}, but the embeddings of {} have {width} numbers; set \
             model.embedding_width = \"auto\"",
            config.shards.train
        ))),
        _ => Ok(width),
    }
}

/// Opens the validation rows on every rank of `group`. The returned mask marks the rows to skip.
pub(super) fn open_validation(config: &RunConfig, group: &Group) -> Result<(Dataset, Mask), TrainError> {
    let group = group.with_timeout(WATCHED_BY_LAUNCHER);
    let dataset = open_together("shards.validation", &config.shards.validation, config, &group)?;
    let skipped = find_on_rank_0(&group, || Ok(Mask::for_config(&dataset, &config.shards)?.into_skipped()))?;
    let mask = Mask::new(skipped, dataset.block_rows())?;
    Ok((dataset, mask))
}

/// Opens the data set at `location` on every rank of `world`. Rank 0 lists the files, reads the footers and broadcasts
/// the result. `field` is the configuration field that the location comes from.
fn open_together(field: &str, location: &str, config: &RunConfig, world: &Group) -> Result<Dataset, TrainError> {
    let read = || DatasetIndex::read(location, &config.shards).map_err(|error| error.of_field(field));
    let index = match world.rank() {
        0 => Some(read()?.to_bytes()?),
        _ => None,
    };
    let index = DatasetIndex::from_bytes(&broadcast_bytes(world, index)?)?;
    Ok(Dataset::from_index(&index, &config.shards)?)
}

/// Scans the training rows. Only rank 0 calls this function.
fn survey(
    config: &RunConfig,
    dataset: &mut Dataset,
    is_new: bool,
    bookmark: Option<&Bookmark>,
) -> Result<SurveyFindings, TrainError> {
    let Survey { mask, statistics, contents } = match bookmark {
        Some(bookmark) => Survey::resume(dataset, &config.shards, bookmark, &config.shards.train)?,
        None => Survey::begin(dataset, &config.shards)?,
    };
    if let Some(summary) = mask.describe(dataset) {
        tracing::warn!("{summary}");
    }
    let statistics = statistics.filter(|_| is_new && config.model.standardise).map(|found| statistics_bits(&found));
    let kept =
        (is_new && config.model.low_pass_dims > 0).then(|| kept_dimensions(config, dataset, &mask)).transpose()?;
    Ok(SurveyFindings { skipped: mask.into_skipped(), statistics, kept, contents })
}

/// The weights of the training rows on every rank. Rank 0 reads the coordinates. `None` if `shards.density_alpha` is 0.
fn weights(
    config: &RunConfig,
    dataset: &Dataset,
    mask: &Mask,
    world: &Group,
) -> Result<Option<RowWeights>, TrainError> {
    let config = &config.shards;
    if config.density_alpha == 0.0 {
        return Ok(None);
    }
    let computed = match world.rank() {
        0 => RowWeights::for_config(dataset, mask, config)?,
        _ => None,
    };
    let bytes = broadcast_bytes(world, computed.map(|weights| weights.to_bytes()))?;
    Ok(Some(RowWeights::from_bytes(&bytes, config)))
}

/// Decodes f64 values from their bit patterns and converts them to an f32 tensor.
fn f32_tensor(bits: Vec<u64>) -> Result<Tensor, TrainError> {
    let numbers: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_to_kind(Kind::Float)?)
}

/// The means and standard deviations as bit patterns. The deviation of a constant dimension becomes 1, so that the
/// standardised value is 0 instead of NaN.
fn statistics_bits(found: &Statistics) -> [Vec<u64>; 2] {
    let deviations = found.standard_deviation.iter().map(|deviation| if *deviation > 0.0 { *deviation } else { 1.0 });
    [found.mean.iter().map(|mean| mean.to_bits()).collect(), deviations.map(f64::to_bits).collect()]
}

/// The code dimensions with the largest variance over the training rows. Only two sums per dimension are kept, so that
/// memory does not grow with the data.
fn kept_dimensions(config: &RunConfig, dataset: &Dataset, mask: &Mask) -> Result<Vec<u32>, TrainError> {
    let basis = Basis::new(config.model.degree)?;
    let (mut rows, mut count) = (BlockRows::default(), 0_u64);
    let (mut sums, mut squares) = (vec![0.0; basis.dims()], vec![0.0; basis.dims()]);
    for block in 0..dataset.block_rows().len() as u32 {
        dataset.read_usable_coordinates(mask, block, &mut rows)?;
        for place in places(&rows.latitudes, &rows.longitudes).map_err(ShddError::from)? {
            let code = basis.encode_f64(&[UnitVector::from(place)]);
            for ((value, sum), square) in code.iter().zip(&mut sums).zip(&mut squares) {
                *sum += value;
                *square += value * value;
            }
            count += 1;
        }
    }
    let variance = |(sum, square): (&f64, &f64)| (square / count as f64 - (sum / count as f64).powi(2)).max(0.0);
    let variances: Vec<f64> = sums.iter().zip(&squares).map(variance).collect();
    Ok(Filter::choose(&variances, config.model.low_pass_dims as usize)?.indices())
}

/// Runs `find` on rank 0 and returns its result on every rank.
fn find_on_rank_0<Found: Serialize + DeserializeOwned>(
    world: &Group,
    find: impl FnOnce() -> Result<Found, TrainError>,
) -> Result<Found, TrainError> {
    let found = match world.rank() {
        0 => Some(serde_json::to_vec(&find()?).map_err(internal)?),
        _ => None,
    };
    serde_json::from_slice(&broadcast_bytes(world, found)?).map_err(internal)
}

/// Broadcasts `bytes` from rank 0, and returns them on every rank. `bytes` is `None` on all other ranks.
fn broadcast_bytes(world: &Group, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, TrainError> {
    let device = world.device();
    let length = bytes.as_ref().map_or(0, Vec::len) as i64;
    let mut length = Tensor::f_from_slice(&[length])?.f_to_device(device)?;
    world.broadcast(&mut length, 0)?;
    let mut tensor = match bytes {
        Some(bytes) => Tensor::f_from_slice(&bytes)?.f_to_device(device)?,
        None => Tensor::f_empty([length.f_int64_value(&[0])?], (Kind::Uint8, device))?,
    };
    world.broadcast(&mut tensor, 0)?;
    Ok(Vec::<u8>::try_from(tensor.f_to_device(Device::Cpu)?)?)
}

fn internal(error: serde_json::Error) -> TrainError {
    ShardsError::Internal(error.to_string()).into()
}
