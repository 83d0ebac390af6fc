//! Histograms of the weights. The values are counted on the device, and only their bounds and the counts are copied to
//! the host.
//!
//! With tensor parallelism, a rank counts only the pieces that it holds.

use locdiff_core::tensorboard::Histogram;
use tch::{Device, Kind, TchError, Tensor};

use crate::model::Parameter;

/// The number of buckets, as in TensorBoard's own histograms.
const BUCKETS: i64 = 30;
/// Number of values that are counted at once. This bounds the memory for the bucket indices.
const VALUES_TOGETHER: i64 = 1 << 22;

/// A histogram of each parameter. Values that are not finite are not counted. A parameter that has no finite values is
/// left out.
pub(super) fn histograms<'a>(
    parameters: impl Iterator<Item = &'a Parameter>,
) -> Result<Vec<(String, Histogram)>, TchError> {
    let _without_gradients = tch::no_grad_guard();
    let flat = |parameter: &Parameter| parameter.tensor.f_detach()?.f_to_kind(Kind::Float)?.f_reshape([-1]);
    let (mut tags, mut tensors) = (Vec::new(), Vec::new());
    for parameter in parameters {
        tags.push(format!("weights/{}", parameter.name));
        tensors.push(flat(parameter)?);
    }
    let found = of_tensors(&tensors)?;
    Ok(tags.into_iter().zip(found).filter_map(|(tag, found)| Some((tag, found?))).collect())
}

/// Histograms of flat f32 tensors; `None` for a tensor without finite values. Waits for the device several times per
/// tensor.
fn of_tensors(tensors: &[Tensor]) -> Result<Vec<Option<Histogram>>, TchError> {
    let bounds = tensors.iter().map(bounds).collect::<Result<Vec<_>, _>>()?;
    let bounds = on_host(&bounds)?;
    let mut counts = Vec::with_capacity(tensors.len());
    for (tensor, bounds) in tensors.iter().zip(bounds.chunks_exact(2)) {
        counts.push(counts_of(tensor, [bounds[0], bounds[1]])?);
    }
    let counts = on_host(&counts)?;
    let rows = bounds.chunks_exact(2).zip(counts.chunks_exact(BUCKETS as usize));
    let histogram = |(bounds, counts): (&[f64], &[f64])| {
        let counts: Vec<u64> = counts.iter().map(|count| *count as u64).collect();
        (bounds[0] <= bounds[1]).then(|| Histogram::even(bounds[0], bounds[1], &counts))
    };
    Ok(rows.map(histogram).collect())
}

/// The smallest and the largest finite value; ∞ and −∞ if no value is finite.
fn bounds(values: &Tensor) -> Result<Tensor, TchError> {
    if values.numel() == 0 {
        return Tensor::f_from_slice(&[f64::INFINITY, f64::NEG_INFINITY])?.f_to_device(values.device());
    }
    let replace_nonfinite = |other: f64| values.f_nan_to_num(other, other, other);
    let lowest = replace_nonfinite(f64::INFINITY)?.f_min()?;
    let highest = replace_nonfinite(f64::NEG_INFINITY)?.f_max()?;
    Tensor::f_stack(&[lowest, highest], 0)?.f_to_kind(Kind::Double)
}

/// Counts the values in each of [`BUCKETS`] equal buckets from `lowest` to `highest`. Values that are not finite are in
/// no bucket.
fn counts_of(values: &Tensor, [lowest, highest]: [f64; 2]) -> Result<Tensor, TchError> {
    let mut counts = Tensor::f_zeros([BUCKETS], (Kind::Int64, values.device()))?;
    // If the range is so narrow that the scale overflows f32, all values go into the first bucket.
    let scale = BUCKETS as f64 / (highest - lowest);
    let scale = if scale <= f64::from(f32::MAX) { scale } else { 0.0 };
    for chunk in values.f_split(VALUES_TOGETHER, 0)? {
        let places = chunk.f_sub_scalar(lowest)?.f_mul_scalar(scale)?.f_floor()?.f_clamp(0.0, (BUCKETS - 1) as f64)?;
        let beyond = chunk.f_isfinite()?.f_logical_not()?;
        let places = places.f_masked_fill(&beyond, BUCKETS as f64)?.f_to_kind(Kind::Int64)?;
        counts = counts.f_add(&places.f_bincount(None::<Tensor>, BUCKETS + 1)?.f_narrow(0, 0, BUCKETS)?)?;
    }
    Ok(counts)
}

/// Copies all tensors to the host at once, as f64, which represents counts exactly.
fn on_host(tensors: &[Tensor]) -> Result<Vec<f64>, TchError> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    Vec::try_from(Tensor::f_cat(tensors, 0)?.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> Option<Histogram> {
        of_tensors(&[Tensor::from_slice(values)]).expect("the tensors are f32").remove(0)
    }

    fn counted(histogram: &Histogram) -> f64 {
        histogram.rows().iter().map(|row| row[2]).sum()
    }

    #[test]
    fn every_value_is_counted_once_in_its_bucket() {
        let values: Vec<f32> = (0..9_000_000_u32).map(|index| (index % 3001) as f32 / 3000.0 - 0.25).collect();
        let histogram = of(&values).expect("the values are finite");
        assert_eq!(counted(&histogram), values.len() as f64);
        assert_eq!((histogram.rows()[0][0], histogram.rows()[29][1]), (-0.25, 0.75));
        for [left, right, count] in histogram.rows() {
            let here =
                values.iter().map(|value| f64::from(*value)).filter(|value| left <= value && value < right).count();
            // A value on the edge of a bucket may be rounded into the next bucket. A bucket has two edges, and each of
            // the 3001 different values occurs about 2999 times, so a count may be off by 6000.
            assert!(
                (count - here as f64).abs() <= 6000.0,
                "bucket {left} to {right} has {count} values, wanted {here}"
            );
        }
    }

    #[test]
    fn values_that_are_not_finite_are_left_out() {
        let histogram = of(&[f32::NAN, 1.0, f32::INFINITY, -1.0, f32::NEG_INFINITY, 0.5]).expect("some are finite");
        assert_eq!((histogram.rows()[0][0], histogram.rows()[29][1], counted(&histogram)), (-1.0, 1.0, 3.0));
        assert_eq!(of(&[f32::NAN, f32::INFINITY]), None);
        assert_eq!(of(&[]), None);
        assert_eq!(
            counted(&of(&[0.0, 1e-40]).expect("the values are finite")),
            2.0,
            "values were lost, because the inverse of their range overflows f32"
        );
        let extreme = of(&[f32::MIN, f32::MAX, 0.0]).expect("the values are finite");
        assert_eq!(counted(&extreme), 3.0);
    }

    #[test]
    fn constant_weights_are_all_in_the_last_bucket() {
        let histogram = of(&[0.0; 1000]).expect("the values are finite");
        assert_eq!(histogram.rows()[29], [0.0, 0.0, 1000.0]);
        assert_eq!(counted(&histogram), 1000.0);
        // Two tensors in one call give two separate histograms.
        let both = of_tensors(&[Tensor::from_slice(&[2.0_f32]), Tensor::from_slice(&[1.0_f32, 3.0])])
            .expect("the tensors are f32");
        assert_eq!(both.iter().flatten().map(counted).collect::<Vec<_>>(), [1.0, 2.0]);
    }

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    fn gpu_and_cpu_histograms_are_equal() {
        let values: Vec<f32> =
            (0..5_000_000_u32).map(|index| (index.wrapping_mul(2_654_435) as f32 * 1e-7).sin()).collect();
        let tensors =
            [Tensor::from_slice(&values), Tensor::from_slice(&[f32::NAN, 0.5]), Tensor::from_slice(&[f32::NAN])];
        let on_gpu = tensors.each_ref().map(|tensor| tensor.to_device(Device::Cuda(0)));
        assert_eq!(
            of_tensors(&on_gpu).expect("the tensors are f32"),
            of_tensors(&tensors).expect("the tensors are f32")
        );
    }
}
