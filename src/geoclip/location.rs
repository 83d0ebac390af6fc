//! GeoCLIP's location encoder: the sum of three networks ("capsules"), one per scale.
//!
//! ```text
//! v = equal_earth(latitude, longitude)
//! features = [cos 2π B v, sin 2π B v]
//! capsule = head(relu(W3 relu(W2 relu(W1 features))))
//! embedding = capsule_0 + capsule_1 + capsule_2
//! ```
//!
//! Each capsule has different frequencies and layers. The frequencies B are a 256 x 2 matrix of normally distributed
//! numbers, whose standard deviation is 1 in the first capsule, 16 in the second and 256 in the third. W1, W2 and W3
//! are linear layers with 1024 outputs, and `head` is a linear layer with 512 outputs.
//!
//! The weights are frozen, so no gradients are computed. Everything is computed in f32, because TF32 would change the
//! features of the finest scale.
// Letters in tensor names: n places, f frequencies, w embedding width.

use std::collections::HashMap;
use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use super::EMBEDDING_WIDTH;
use super::error::GeoclipError;
use super::projection::equal_earth;

const CAPSULES: usize = 3;
const FREQUENCIES: i64 = 256;
const HIDDEN: i64 = 1024;
/// For each linear layer, its name, number of inputs and number of outputs. The numbers in the names have gaps, because
/// GeoCLIP also numbers the ReLUs between the layers.
const LAYERS: [(&str, i64, i64); 4] = [
    ("capsule.1", 2 * FREQUENCIES, HIDDEN),
    ("capsule.3", HIDDEN, HIDDEN),
    ("capsule.5", HIDDEN, HIDDEN),
    ("head.0", HIDDEN, EMBEDDING_WIDTH as i64),
];

/// Weights nearer to 0 than this are set to 0, also those of the image head. Up to 4 % of the weights of a layer of the
/// location encoder are nearer to 0 than the smallest normal f32, and with such numbers a CPU computes several times
/// slower. Without them, the embeddings of GeoCLIP's gallery are the same to the bit.
const NEGLIGIBLE: f64 = 1e-30;

/// Maps places into GeoCLIP's embedding space.
#[derive(Debug)]
pub struct LocationEncoder {
    capsules: Vec<Capsule>,
    device: Device,
}

#[derive(Debug)]
struct Capsule {
    frequencies_2f: Tensor,
    layers: Vec<Linear>,
}

#[derive(Debug)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// Creates a layer from the tensors `{name}.weight` and `{name}.bias`.
    pub(super) fn take(
        tensors: &HashMap<String, Tensor>,
        name: &str,
        inputs: i64,
        outputs: i64,
        device: Device,
    ) -> Result<Self, GeoclipError> {
        let weight = take(tensors, &format!("{name}.weight"), &[outputs, inputs], device)?;
        let weight = weight.f_masked_fill(&weight.f_abs()?.f_lt(NEGLIGIBLE)?, 0.0)?;
        Ok(Self { weight, bias: take(tensors, &format!("{name}.bias"), &[outputs], device)? })
    }

    pub(super) fn forward(&self, inputs: &Tensor) -> Result<Tensor, GeoclipError> {
        Ok(inputs.f_linear(&self.weight, Some(&self.bias))?)
    }

    fn share(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), bias: self.bias.shallow_clone() }
    }
}

/// The tensor with this name as f32 on `device`; an error if the tensor is missing or does not have the shape `want`.
pub(super) fn take(
    tensors: &HashMap<String, Tensor>,
    name: &str,
    want: &[i64],
    device: Device,
) -> Result<Tensor, GeoclipError> {
    let found = tensors.get(name);
    let got = found.map(Tensor::size).unwrap_or_default();
    match found {
        Some(tensor) if got == want => Ok(tensor.f_detach()?.f_to_device(device)?.f_to_kind(Kind::Float)?),
        _ => Err(GeoclipError::Shape { name: name.to_owned(), got, want: want.to_vec() }),
    }
}

impl LocationEncoder {
    /// Creates the encoder from the tensors whose names begin with `location.`.
    pub fn new(tensors: &HashMap<String, Tensor>, device: Device) -> Result<Self, GeoclipError> {
        let capsules = (0..CAPSULES).map(|index| Capsule::new(tensors, index, device)).collect::<Result<_, _>>()?;
        Ok(Self { capsules, device })
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Another handle to the same weights, for use in another thread.
    pub fn share(&self) -> Self {
        let capsules = self.capsules.iter().map(|capsule| Capsule {
            frequencies_2f: capsule.frequencies_2f.shallow_clone(),
            layers: capsule.layers.iter().map(Linear::share).collect(),
        });
        Self { capsules: capsules.collect(), device: self.device }
    }

    /// Encodes n places, given as latitudes and longitudes `[n, 2]` in degrees. The embeddings `[n, 512]` are not
    /// normalised.
    pub fn encode(&self, degrees_n2: &Tensor) -> Result<Tensor, GeoclipError> {
        tch::no_grad(|| {
            let angle_n2 = equal_earth(&degrees_n2.f_to_device(self.device)?)?.f_mul_scalar(TAU)?;
            let mut sum_nw: Option<Tensor> = None;
            for capsule in &self.capsules {
                let own_nw = capsule.forward(&angle_n2)?;
                sum_nw = Some(match sum_nw {
                    None => own_nw,
                    Some(sum_nw) => sum_nw.f_add(&own_nw)?,
                });
            }
            Ok(sum_nw.expect("the encoder has three capsules"))
        })
    }

    /// The output of [`Self::encode`], L2-normalised, for cosine similarity.
    pub fn embed(&self, degrees_n2: &Tensor) -> Result<Tensor, GeoclipError> {
        tch::no_grad(|| normalised(&self.encode(degrees_n2)?))
    }
}

/// L2-normalises each row.
fn normalised(rows_nw: &Tensor) -> Result<Tensor, GeoclipError> {
    let length_n1 = rows_nw.f_norm_scalaropt_dim(2.0, [1].as_slice(), true)?;
    Ok(rows_nw.f_div(&length_n1)?)
}

impl Capsule {
    fn new(tensors: &HashMap<String, Tensor>, index: usize, device: Device) -> Result<Self, GeoclipError> {
        let name = |part: &str| format!("location.LocEnc{index}.{part}");
        let frequencies = take(tensors, &name("capsule.0.b"), &[FREQUENCIES, 2], device)?;
        let layers = LAYERS
            .iter()
            .map(|(layer, inputs, outputs)| Linear::take(tensors, &name(layer), *inputs, *outputs, device))
            .collect::<Result<_, _>>()?;
        Ok(Self { frequencies_2f: frequencies.f_tr()?, layers })
    }

    fn forward(&self, angle_n2: &Tensor) -> Result<Tensor, GeoclipError> {
        let phase_nf = angle_n2.f_matmul(&self.frequencies_2f)?;
        let mut values = Tensor::f_cat(&[phase_nf.f_cos()?, phase_nf.f_sin()?], 1)?;
        let (head, hidden) = self.layers.split_last().expect("a capsule has four layers");
        for layer in hidden {
            values = layer.forward(&values)?.f_relu_()?;
        }
        head.forward(&values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negligible_weights_are_zero() {
        let weight = Tensor::from_slice(&[1e-40_f32, -1e-40, 1e-31, 1e-29, -0.5, f32::NAN]).view([1, 6]);
        let tensors =
            HashMap::from([("a.weight".to_owned(), weight), ("a.bias".to_owned(), Tensor::from_slice(&[0.0_f32]))]);
        let layer = Linear::take(&tensors, "a", 6, 1, Device::Cpu).expect("the shapes are right");
        let weights = Vec::<f32>::try_from(layer.weight.view([-1])).expect("the weights are f32");
        assert_eq!(weights[..5], [0.0, 0.0, 0.0, 1e-29, -0.5]);
        assert!(weights[5].is_nan());
    }
}
