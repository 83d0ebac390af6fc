//! `docs/examples/load_export.py` rebuilds the network from an export. The rebuilt network gives the same output as the
//! network in this program.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, d for the dimensions
//! of a code, and e for the embedding.

use std::collections::BTreeMap;
use std::path::Path;

use locdiff::checkpoint::{self, EMA, STATE, piece_name, write_json, write_tensors};
use locdiff::model::{Architecture, CsUnet, Placement, Timesteps};
use locdiff_core::config::{Precision, RunConfig};
use locdiff_core::files::Files;
use locdiff_core::protocol::{ExportJob, PartsWritten, RunParts, partial_name, step_name};
use locdiff_core::random::Philox;
use locdiff_launch::run_folder::RunFolder;
use tch::{Device, Kind, Tensor};

use super::export::state;
use crate::model::support::{named, normals, relative};
use crate::python_support::run_python;

const BATCH: i64 = 7;
const EMBEDDING: u32 = 24;
const STEP: u64 = 1500;

/// A network in which no weight is 0. It standardises the embeddings with random means and deviations.
fn network(config: &RunConfig) -> CsUnet {
    let architecture = Architecture::new(&config.model, EMBEDDING, config.diffusion.timesteps);
    let placement = Placement::on(Device::Cpu, Precision::F32);
    let mut network = CsUnet::new(architecture, placement, Philox::new(3)).expect("the architecture is valid");
    let perturbed = |(index, (name, tensor)): (usize, (String, Tensor))| {
        (name, tensor.detach() + normals(100 + index as i64, &tensor.size(), Kind::Float) * 0.05)
    };
    let weights: Vec<_> = named(&network).into_iter().enumerate().map(perturbed).collect();
    network.parameters_mut().load(&weights).expect("the sizes match");
    let width = [i64::from(EMBEDDING)];
    network
        .standardisation_mut()
        .set(&normals(1, &width, Kind::Float), &(normals(2, &width, Kind::Float).abs() + 0.5))
        .expect("the sizes match");
    network
}

/// Writes a checkpoint of the network and exports it.
fn export(network: &CsUnet, config: &RunConfig, home: &Path, out: &Path) {
    let files = Files::real();
    let mut run = RunFolder::open(files.clone(), home, "run", config).expect("the run folder can be opened").folder;
    let attempt = run.begin_attempt(1).expect("the run folder is writable");
    let partial = run.path().join(partial_name(STEP, attempt));
    files.create_folder(&partial).expect("the folder can be created");
    let averages: Vec<_> = named(network).into_iter().chain(network.standardisation().named()).collect();
    let written = vec![
        write_tensors(&files, &partial, &piece_name(EMA, 0, 1), &averages, &BTreeMap::new())
            .expect("the file can be written"),
        write_json(&files, &partial, STATE, &state(config)).expect("the file can be written"),
    ];
    let parts = PartsWritten { step: STEP, attempt, files: written, score: None };
    run.commit(attempt, STEP, &[parts]).expect("all parts were written");
    let checkpoint = run.path().join(step_name(STEP));
    let job = ExportJob { checkpoint, run: RunParts::default(), out: out.to_owned(), overwrite: false };
    checkpoint::export(&files, &job).expect("the checkpoint is whole");
}

fn assert_python_agrees(config: &RunConfig) {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let [file, codes, times, images, predicted] =
        ["export.safetensors", "codes.npy", "timesteps.npy", "embeddings.npy", "predicted.npy"]
            .map(|name| folder.path().join(name));
    let network = network(config);
    export(&network, config, folder.path(), &file);
    let x_bd = normals(11, &[BATCH, network.architecture().dims], Kind::Float);
    let t_b = Tensor::from_slice(&[0_i64, 199, 3, 3, 77, 150, 12]);
    let image_be = normals(12, &[BATCH, i64::from(EMBEDDING)], Kind::Float) * 2.0;
    for (tensor, path) in [(&x_bd, &codes), (&t_b, &times), (&image_be, &images)] {
        tensor.write_npy(path).expect("the file can be written");
    }
    let printed = run_python("docs/examples/load_export.py", &[&file, &codes, &times, &images, &predicted]);
    let want = format!("degree {}, step 1500, written by version {}\n", config.model.degree, locdiff_core::VERSION);
    assert_eq!(printed, want);

    let (time, image) = (
        network.time_table().expect("the network has timesteps"),
        network.prepare(&image_be, None).expect("the embeddings have the right width"),
    );
    let want =
        network.forward(&x_bd, Timesteps::Each(&t_b), &time, &image, None).expect("the inputs have the right shapes");
    let got = Tensor::read_npy(&predicted).expect("the script wrote its output");
    // Rust and Python both compute in f32, but they add numbers in different orders.
    let difference = relative(&got, &want);
    println!("degree {}: Python's output differs by {difference:e} of the norm", config.model.degree);
    assert!(difference <= 1e-4, "Python's output differs by {difference:e} of the norm, wanted at most 1e-4");
}

#[test]
fn python_example_reproduces_our_output() {
    let mut config = RunConfig::default();
    config.model.degree = 7;
    assert_python_agrees(&config);
    config.model.bottleneck = 20;
    config.model.width_factor = 0.5;
    assert_python_agrees(&config);
}
