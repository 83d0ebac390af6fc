//! Pictures of the quick evaluation: answers on a map, and the density of one sample while it is denoised.
// Letters in tensor names: s sampler steps, n points of the map, d dimensions of the code.

use locdiff_core::draw::{Answer, Frame, Picture, density_strip, field_points, spread};
use locdiff_core::geo::UnitVector;
use tch::{Device, Kind, Tensor};

use crate::diffusion::CODE_SCALE;
use crate::shdd::{Codes, Points};
use crate::train::error::TrainError;

/// The maximum number of maps in the picture of one sample.
const FRAMES: usize = 8;
/// Number of points of the map that are encoded at once.
const POINTS_TOGETHER: usize = 2048;

/// The data for the pictures, from the rows of this rank.
#[derive(Debug)]
pub(in crate::train) struct PictureData {
    /// True places and answers of this rank's first rows.
    pub(in crate::train) answers: Vec<Answer>,
    /// The chain of the first sample of the first row, as timesteps and scaled codes `[1, d]`: the noise at which the
    /// chain starts, then the prediction x̂_0 of each sampler step.
    pub(in crate::train) chain: Vec<(usize, Tensor)>,
}

/// Draws the density of the first sample on up to [`FRAMES`] maps, from the noise to the last sampler step. Returns
/// `None` if this rank located no rows.
///
/// The density at a point is p ∝ exp(x · Y), where x is the noise or the prediction x̂_0, and Y is the code of the
/// point. The KL loss uses the same density.
pub(in crate::train) fn density(codes: &Codes, seen: &PictureData) -> Result<Option<Picture>, TrainError> {
    let (Some(first), false) = (seen.answers.first(), seen.chain.is_empty()) else { return Ok(None) };
    let _without_gradients = tch::no_grad_guard();
    let chosen: Vec<&(usize, Tensor)> = spread(seen.chain.len(), FRAMES).map(|step| &seen.chain[step]).collect();
    let predicted: Vec<&Tensor> = chosen.iter().map(|(_, predicted)| predicted).collect();
    let predicted_sd = Tensor::f_cat(&predicted, 0)?.f_to_kind(Kind::Float)?.f_div_scalar(CODE_SCALE)?;
    let scores = scores(codes, &predicted_sd, &field_points())?;
    let frames: Vec<Frame> = chosen
        .iter()
        .zip(scores)
        .map(|((timestep, _), log_density)| Frame { timestep: *timestep, log_density })
        .collect();
    Ok(Some(density_strip(&frames, first.truth)))
}

/// The dot products x · Y for every row x of `predicted_sd` and every point, where Y is the code of the point.
fn scores(codes: &Codes, predicted_sd: &Tensor, points: &[UnitVector]) -> Result<Vec<Vec<f32>>, TrainError> {
    let mut tiles = Vec::new();
    for tile in points.chunks(POINTS_TOGETHER) {
        tiles.push(predicted_sd.f_matmul(&codes.encode(&Points::Host(tile.to_vec()))?.f_tr()?)?);
    }
    let scores_sn = Tensor::f_cat(&tiles, 1)?.f_to_device(Device::Cpu)?;
    Ok(Vec::<Vec<f32>>::try_from(scores_sn)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn density_of_a_clean_code_is_highest_at_its_place() {
        let codes = Codes::new(10, None, Device::Cpu, 1).expect("the degree is valid");
        let points = field_points();
        let place = points[points.len() / 3];
        let predicted = codes.encode(&Points::Host(vec![place])).expect("the point is valid") * CODE_SCALE;
        let found = scores(&codes, &predicted.f_div_scalar(CODE_SCALE).expect("the divisor is a number"), &points)
            .expect("the code has the right width");
        let best =
            found[0].iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1)).expect("the map has points").0;
        assert_eq!(points[best], place);
        let seen = PictureData {
            answers: vec![Answer { truth: place, answer: place }],
            chain: vec![(9, predicted.copy()), (0, predicted)],
        };
        let picture = density(&codes, &seen).expect("the codes have the right width").expect("there is one answer");
        assert_eq!((picture.width, picture.height), (806, 200));
        assert!(
            density(&codes, &PictureData { answers: Vec::new(), chain: Vec::new() })
                .expect("drawing nothing cannot fail")
                .is_none()
        );
    }
}
