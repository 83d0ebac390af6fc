//! World 2 gives the embeddings that an independent script computes from its specification, and its photos have the
//! specified statistics.

use std::collections::HashMap;
use std::path::Path;

use locdiff::geoclip::Geoclip;
use locdiff::simulate::{Simulation, Source, World2, simulate};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::protocol::{ImageHead, SimulatedWorld};
use tch::{Device, Tensor};

use super::{assert_scale_statistics, bytes_of, simulation};
use crate::geoclip::support::folder;
use crate::shards::read_back::read_views;

fn golden() -> HashMap<String, Tensor> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/world2.safetensors");
    Tensor::read_safetensors(path).expect("the golden file is readable").into_iter().collect()
}

fn in_world_2(rows: u64) -> Simulation {
    Simulation { world: SimulatedWorld::Two, ..simulation(rows) }
}

#[test]
fn world_2_gives_the_embeddings_of_its_specification() {
    let (golden, geoclip) = (golden(), Geoclip::open(&folder()).expect("the folder has GeoCLIP weights"));
    let pairs: Vec<f64> = golden["places"].flatten(0, -1).try_into().expect("the tensor holds f64 numbers");
    let place = |pair: &[f64]| Place::new(Degrees(pair[0]), Degrees(pair[1])).expect("the coordinates are valid");
    let places: Vec<Place> = pairs.chunks_exact(2).map(place).collect();
    let world = World2::new(11, geoclip.places(), Some(&places));
    for (index, place) in places.iter().enumerate() {
        let photo = world.photo(index as u64);
        assert_eq!(photo.place, *place);
        for (number, source) in photo.sources.iter().enumerate() {
            let got = match source {
                Source::Gallery(index) => geoclip.places()[*index],
                Source::Place(place) => *place,
            };
            let [latitude, longitude, weight] = [
                golden["sources"].double_value(&[index as i64, number as i64, 0]),
                golden["sources"].double_value(&[index as i64, number as i64, 1]),
                golden["weights"].double_value(&[index as i64, number as i64]),
            ];
            let want = Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid");
            assert!(
                got.distance(want).0 < 1e-6 && (photo.weights[number] - weight).abs() < 1e-12,
                "source {number} of photo {index} is {got:?}, wanted {want:?}"
            );
        }
    }
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let (list, out) = (scratch.path().join("places.csv"), scratch.path().join("out"));
    let lines: String = pairs.chunks_exact(2).map(|pair| format!("{},{}\n", pair[0], pair[1])).collect();
    std::fs::write(&list, format!("lat,lon\n{lines}")).expect("the file can be written");
    let options = Simulation { seed: 11, views: 16, coordinates: Some(list), rows: None, ..in_world_2(1) };
    let devices = if tch::Cuda::is_available() { vec![Device::Cpu, Device::Cuda(0)] } else { vec![Device::Cpu] };
    for device in devices {
        let manifest =
            simulate(&Simulation { device, overwrite: true, ..options.clone() }, &out).expect("the options are valid");
        assert_eq!(manifest.image_head, ImageHead::Trained);
        assert!(
            manifest.source.starts_with("simulated: world 2, seed 11, places of places.csv"),
            "{}",
            manifest.source
        );
        let views = read_views(&out, &manifest);
        for (number, view) in [0_i64, 15].into_iter().enumerate() {
            let want = golden["embeddings"].select(1, number as i64);
            // float16 has 11 significant bits. The rest of the tolerance is for GeoCLIP's high frequencies, which
            // magnify differences in rounding.
            let excess = (&views[view as usize] - &want).abs() - &want.abs() / 2048.0;
            let excess = excess.max().double_value(&[]);
            assert!(excess < 1e-3, "view {view} on {device:?} differs by {excess} more than by rounding to float16");
        }
    }
}

#[test]
fn photos_of_world_2_depend_only_on_the_seed_and_have_the_specified_statistics() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let make = |name: &str, simulation: &Simulation| {
        let out = scratch.path().join(name);
        simulate(simulation, &out).expect("the options are valid");
        bytes_of(&out)
    };
    let plain = Simulation { views: 2, ..in_world_2(150) };
    let want = make("plain", &plain);
    let other = Simulation { chunk_rows: Some(77), threads: 1, ..plain.clone() };
    assert!(make("chunks", &other) == want, "the chunk size or the number of threads changes the bytes");
    assert!(make("seed", &Simulation { seed: 8, ..plain }) != want, "another seed gives the same bytes");
    let error = simulate(&Simulation { views: 17, ..in_world_2(5) }, &scratch.path().join("many"))
        .expect_err("world 2 has at most 16 views");
    assert_eq!(
        (error.exit_code(), error.to_string().as_str()),
        (ExitCode::Usage, "--views is 17, wanted 1 to 16 in world 2")
    );

    let geoclip = Geoclip::open(&folder()).expect("the folder has GeoCLIP weights");
    let world = World2::new(7, geoclip.places(), None);
    let photos: Vec<_> = (0..20_000).map(|index| world.photo(index)).collect();
    assert_scale_statistics(&photos, [0.15, 0.03, 0.09, 0.28, 0.20, 0.25]);
    for (index, photo) in photos.iter().enumerate() {
        let Source::Place(own) = photo.sources[0] else {
            panic!("the first source of photo {index} is in the gallery")
        };
        let own_km = own.distance(photo.place).0;
        assert!((0.049..=(photo.scale_km / 4.0).max(0.05) + 1e-3).contains(&own_km), "photo {index}: {own_km} km");
        let is_of_class = |source: &Source| !matches!(source, Source::Gallery(point) if point % 12 != index % 12);
        assert!(photo.sources.len() == 6 && photo.sources.iter().all(is_of_class), "photo {index}: {photo:?}");
    }
    // The first photo of a gallery place is taken there, the second within 1 km.
    let spots = geoclip.places().len();
    assert_eq!(photos[17].place, geoclip.places()[17]);
    assert!((1e-6..=1.0).contains(&photos[17].place.distance(photos[17 + spots].place).0));
}
