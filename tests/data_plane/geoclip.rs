//! GeoCLIP against its own outputs, with its real weights, and its files against damage.

use std::path::Path;

use locdiff::geo::{Degrees, Place};
use locdiff::geoclip::{self, EMBEDDING_WIDTH, Embedder, Gallery, Geoclip, GeoclipError};
use locdiff_launch::exit_code::ExitCode;
use tch::{Device, Kind, Tensor};

use crate::geoclip_support::{folder, wheel};

fn golden(name: &str) -> Tensor {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/geoclip.safetensors");
    let all = Tensor::read_safetensors(path).expect("the golden file");
    all.into_iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("no golden {name}")).1
}

fn difference_max(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    (got - want).abs().max().double_value(&[])
}

#[test]
fn geoclip_gives_its_own_published_outputs() {
    let geoclip = Geoclip::open(&folder()).expect("real weights");
    let devices = if tch::Cuda::is_available() { vec![Device::Cpu, Device::Cuda(0)] } else { vec![Device::Cpu] };
    for device in devices {
        let encoder = geoclip.location_encoder(device).expect("an encoder");
        for name in ["probe", "gallery"] {
            let want = golden(&format!("{name}_out"));
            let got = encoder.encode(&golden(&format!("{name}_latlon"))).expect("encoded").to_device(Device::Cpu);
            let difference = difference_max(&got, &want);
            println!("{name} on {device:?}: {difference:e} of at most {}", want.abs().max().double_value(&[]));
            // On a GPU another order of rounding, magnified by the frequencies of the finest capsule.
            assert!(difference < if device.is_cuda() { 1e-3 } else { 1e-5 }, "{name}: {difference:e}");
        }
        let head = geoclip.image_head(device).expect("a head");
        let got = head.encode(&golden("image_in").to_device(device)).expect("encoded").to_device(Device::Cpu);
        let difference = difference_max(&got, &golden("image_out"));
        assert!(difference < 1e-5, "image head: {difference:e}");
        assert!((head.logit_factor() - golden("logit_scale").double_value(&[0]).exp()).abs() < 1e-4);
    }
}
