//! The file `images.json` of an evaluation: single photos with their samples, alternatives, and densities along the
//! denoising steps. docs/OPERATIONS.md specifies it.

use locdiff_core::answers::rounded;
use locdiff_core::geo::{Healpix, unique_cell};
use locdiff_core::protocol::{PredictedRow, ReportPhoto, StepDensity};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// Name of the file.
pub(in crate::verbs) const FILE: &str = "images.json";

/// The whole file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::verbs) struct PhotosFile {
    pub(super) images: Vec<PhotoDetail>,
}

/// A photo with everything that was sampled for it. Places are pairs of latitude and longitude.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PhotoDetail {
    pub(super) id: String,
    truth: Option<[f64; 2]>,
    answer: Option<[f64; 2]>,
    /// Share of the samples that are nearer to the answer than to any alternative.
    weight: Option<f64>,
    #[serde(default)]
    alternatives: Vec<OtherPlace>,
    #[serde(default)]
    samples: Vec<[f64; 2]>,
    #[serde(default)]
    steps: Vec<DensityAtStep>,
}

/// Another possible answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct OtherPlace {
    lat: f64,
    lon: f64,
    weight: f64,
}

/// The density at one denoising step.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct DensityAtStep {
    /// The diffusion timestep.
    t: u64,
    /// The number of each cell in the scheme of [`locdiff_core::geo::unique_cell`], and its probability.
    #[serde(deserialize_with = "known_cells")]
    cells: Vec<(u64, f64)>,
}

/// Reads cells, and refuses numbers that no cell has.
fn known_cells<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u64, f64)>, D::Error> {
    let (cells, finest) = (Vec::<(u64, f64)>::deserialize(from)?, Healpix::new(u32::MAX));
    let [first, last] = [unique_cell(0, 0), unique_cell(finest.order(), finest.cells() - 1)];
    match cells.iter().find(|(cell, _)| !(first..=last).contains(cell)) {
        Some((cell, _)) => Err(D::Error::custom(format!("no cell has the number {cell}, wanted {first} to {last}"))),
        None => Ok(cells),
    }
}

impl<'a> FromIterator<&'a ReportPhoto> for PhotosFile {
    fn from_iter<Photos: IntoIterator<Item = &'a ReportPhoto>>(photos: Photos) -> Self {
        Self { images: photos.into_iter().map(PhotoDetail::from).collect() }
    }
}

impl From<&ReportPhoto> for PhotoDetail {
    fn from(ReportPhoto { row, steps }: &ReportPhoto) -> Self {
        let PredictedRow { id, answer, weight, alternatives, samples, truth, .. } = row;
        let place = |degrees: [f64; 2]| degrees.map(rounded);
        let alternatives = alternatives.iter().map(|other| {
            let [lat, lon] = place(other.place);
            OtherPlace { lat, lon, weight: other.weight }
        });
        Self {
            id: id.clone(),
            truth: *truth,
            answer: Some(place(*answer)),
            weight: Some(*weight),
            alternatives: alternatives.collect(),
            samples: samples.iter().map(|sample| place(*sample)).collect(),
            steps: steps.iter().map(DensityAtStep::from).collect(),
        }
    }
}

impl From<&StepDensity> for DensityAtStep {
    /// Rounds probabilities to five digits, which keeps the file small.
    fn from(StepDensity { timestep, cells }: &StepDensity) -> Self {
        let rounded = |probability: f32| (f64::from(probability) * 1e5).round() / 1e5;
        Self { t: *timestep, cells: cells.iter().map(|(cell, probability)| (*cell, rounded(*probability))).collect() }
    }
}
