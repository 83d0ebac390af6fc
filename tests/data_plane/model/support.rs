//! Helpers for the tests of the network, the diffusion process, the loss and the harmonics.

use std::path::Path;

use locdiff::diffusion::DiffusionError;
use locdiff::model::{CsUnet, ModelError};
use tch::{Device, Kind, Tensor};

/// The relative difference ‖got − want‖ / ‖want‖.
pub(crate) fn relative(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size(), "the shapes differ");
    let (got, want) = (got.detach().to_kind(Kind::Double), want.detach().to_kind(Kind::Double));
    (got - &want).norm().double_value(&[]) / want.norm().double_value(&[]).max(f64::MIN_POSITIVE)
}

pub(crate) fn assert_close(got: &Tensor, want: &Tensor, tolerance: f64, what: &str) {
    let difference = relative(got, want);
    assert!(difference <= tolerance, "{what}: the relative difference is {difference:e}, wanted at most {tolerance:e}");
}

/// Normally distributed random numbers. They depend only on the arguments.
pub(crate) fn normals(seed: i64, shape: &[i64], kind: Kind) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, (kind, Device::Cpu))
}

/// The name and the tensor of each parameter of a network, in the network's order. The tensors are shared, not copied.
pub(crate) fn named(network: &CsUnet) -> Vec<(String, Tensor)> {
    network.parameters().iter().map(|own| (own.name.clone(), own.tensor.shallow_clone())).collect()
}

/// The errors of a sampling chain.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChainError {
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// The tensors of a golden file, with their names.
pub(crate) struct Golden(Vec<(String, Tensor)>);

impl Golden {
    /// Reads the tensors that `tests/golden/make_reference.py` wrote.
    pub(crate) fn read() -> Self {
        Self::of("reference.safetensors")
    }

    /// Reads the tensors of a file in `tests/golden/`.
    pub(crate) fn of(file: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
        Self(Tensor::read_safetensors(path).expect("the repository contains the golden file"))
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        &self.0.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("the golden file has no tensor {name}")).1
    }

    /// The tensors whose names start with `prefix`, with the prefix removed.
    pub(crate) fn with_prefix(&self, prefix: &str) -> Vec<(String, Tensor)> {
        let named = self.0.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)));
        named.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect()
    }
}
