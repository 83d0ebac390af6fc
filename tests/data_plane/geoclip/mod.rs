//! With the real weights, this program's GeoCLIP gives the same outputs as the published package. Damaged files are
//! refused.

pub(crate) mod support;

use std::path::Path;

use locdiff::geoclip::{self, EMBEDDING_WIDTH, Embedder, Geoclip, GeoclipError};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use tch::{Device, Tensor};

use crate::geoclip::support::{folder, wheel};

fn golden(name: &str) -> Tensor {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/geoclip.safetensors");
    let all = Tensor::read_safetensors(path).expect("the golden file is readable");
    all.into_iter().find(|(other, _)| other == name).unwrap_or_else(|| panic!("the golden file has no tensor {name}")).1
}

fn difference_max(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    (got - want).abs().max().double_value(&[])
}

#[test]
fn geoclip_reproduces_its_published_outputs() {
    let geoclip = Geoclip::open(&folder()).expect("the folder has real weights");
    let devices = if tch::Cuda::is_available() { vec![Device::Cpu, Device::Cuda(0)] } else { vec![Device::Cpu] };
    for device in devices {
        let encoder = geoclip.location_encoder(device).expect("the weights have an encoder");
        for name in ["probe", "gallery"] {
            let want = golden(&format!("{name}_out"));
            let got = encoder
                .encode(&golden(&format!("{name}_latlon")))
                .expect("the input has the right shape")
                .to_device(Device::Cpu);
            let difference = difference_max(&got, &want);
            println!(
                "{name} on {device:?}: off by {difference:e}, values up to {}",
                want.abs().max().double_value(&[])
            );
            // A GPU adds numbers in a different order than a CPU. The high frequencies of GeoCLIP's finest capsule
            // magnify the different rounding errors.
            assert!(
                difference < if device.is_cuda() { 1e-3 } else { 1e-5 },
                "{name} on {device:?} differs by {difference:e}"
            );
        }
        let head = geoclip.image_head(device).expect("the weights have a head");
        let got = head
            .encode(&golden("image_in").to_device(device))
            .expect("the input has the right shape")
            .to_device(Device::Cpu);
        let difference = difference_max(&got, &golden("image_out"));
        assert!(difference < 1e-5, "the image head on {device:?} differs by {difference:e}");
        assert!((head.logit_factor() - golden("logit_scale").double_value(&[0]).exp()).abs() < 1e-4);
    }
}

#[test]
fn embedding_does_not_depend_on_its_batch() {
    let geoclip = Geoclip::open(&folder()).expect("the folder has real weights");
    let places = &geoclip.places()[..700];
    let embedder =
        |threads| Embedder::new(geoclip.location_encoder(Device::Cpu).expect("the weights have an encoder"), threads);
    let together = embedder(2).embed(places).expect("the places can be embedded");
    let reversed: Vec<_> = places.iter().rev().copied().collect();
    let reversed = embedder(1).embed(&reversed).expect("the places can be embedded");
    let rows = |values: &[f32]| values.chunks_exact(EMBEDDING_WIDTH).map(<[f32]>::to_vec).collect::<Vec<_>>();
    assert!(
        rows(&together) == rows(&reversed).into_iter().rev().collect::<Vec<_>>(),
        "the order of the places changed bits of the embeddings"
    );
    let alone = embedder(2).embed(&places[300..301]).expect("the places can be embedded");
    assert!(
        alone == together[300 * EMBEDDING_WIDTH..301 * EMBEDDING_WIDTH],
        "the other places of the batch changed bits of the embeddings"
    );
    assert!(embedder(2).embed(&[]).expect("there is nothing to embed").is_empty());
}

#[test]
fn damaged_wheels_and_folders_are_refused() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let out = scratch.path().join("out");
    let bad = scratch.path().join("bad.whl");
    let bytes = std::fs::read(wheel()).expect("the wheel is readable");
    for (what, damaged) in
        [("cut", bytes[..bytes.len() / 2].to_vec()), ("flipped", [&[bytes[0] ^ 1], &bytes[1..]].concat())]
    {
        std::fs::write(&bad, damaged).expect("the file can be written");
        let error = geoclip::import(&bad, &out, false).expect_err(what);
        assert_eq!(error.exit_code(), ExitCode::Corrupt, "{error}");
        assert!(error.to_string().contains("bad.whl: sha256 is "), "{error}");
    }
    let error = geoclip::import(&scratch.path().join("none.whl"), &out, false).expect_err("the wheel is missing");
    assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
    assert!(!out.exists());
    let (manifest, is_written) = geoclip::import(&wheel(), &out, false).expect("the wheel is intact");
    assert!(is_written);
    // The folder already has these weights, so nothing is written. A damaged folder is refused.
    let again = geoclip::import(&wheel(), &out, false).expect("the folder is intact");
    assert_eq!(again, (manifest, false));
    let licence = std::fs::read(out.join("LICENSE")).expect("the file is readable");
    std::fs::write(out.join("LICENSE"), &licence[1..]).expect("the file can be written");
    assert!(matches!(geoclip::import(&wheel(), &out, false), Err(GeoclipError::Exists(_))));
    geoclip::import(&wheel(), &out, true).expect("`--overwrite` replaces a folder of weights");
    assert_eq!(Geoclip::open(&out).expect("all checksums match").places().len(), 100_000);
    let left: Vec<_> = std::fs::read_dir(scratch.path())
        .expect("the folder is readable")
        .map(|entry| entry.expect("the entry is readable").file_name())
        .collect();
    assert_eq!(left.len(), 2, "wanted only the wheel and the folder, found {left:?}");
    let weights = out.join("geoclip.safetensors");
    let mut bytes = std::fs::read(&weights).expect("the file is readable");
    bytes[20_000_000] ^= 1;
    std::fs::write(&weights, bytes).expect("the file can be written");
    let error = Geoclip::open(&out).expect_err("a bit was flipped");
    assert!(
        error.exit_code() == ExitCode::Corrupt
            && error.to_string().contains("geoclip.safetensors: the xxh3 checksum is "),
        "{error}"
    );
    std::fs::remove_file(&weights).expect("the file exists");
    let error = Geoclip::open(&out).expect_err("a file is missing");
    assert!(error.exit_code() == ExitCode::NoData && error.to_string().contains("geoclip import"), "{error}");
}
