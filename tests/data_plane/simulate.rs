//! `shards simulate` with GeoCLIP's real weights. The tests check that the bytes are reproducible, that the simulated
//! photos have the specified statistics, and that coordinate files are read.

mod cells;
mod world2;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use locdiff::geoclip::{EMBEDDING_WIDTH, Embedder, GalleryEmbeddings, Geoclip};
use locdiff::shards::{Manifest, PROJECTION_SEED, ShardsError, projection};
use locdiff::simulate::{Photo, Simulation, Source, World1, join_pieces, simulate, simulate_pieces};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{PieceFolders, SimulatedWorld};
use tch::{Device, Kind, Tensor};

use crate::geoclip::support::folder;
use crate::shards::read_back::read_views;

fn simulation(rows: u64) -> Simulation {
    Simulation {
        world: SimulatedWorld::One,
        rows: Some(rows),
        seed: 7,
        views: 1,
        coordinates: None,
        cells: None,
        geoclip: folder(),
        overwrite: false,
        rows_per_file: None,
        device: Device::Cpu,
        threads: 2,
        chunk_rows: None,
    }
}

fn bytes_of(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(folder)
        .expect("the folder exists")
        .map(|entry| entry.expect("the folder can be listed").path());
    files
        .map(|path| {
            (path.file_name().expect("the file has a name").into(), std::fs::read(&path).expect("the file can be read"))
        })
        .collect()
}

#[test]
fn simulated_bytes_depend_only_on_the_seed() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let make = |name: &str, simulation: &Simulation| {
        let out = scratch.path().join(name);
        simulate(simulation, &out).expect("the options are valid");
        bytes_of(&out)
    };
    let plain = Simulation { views: 2, ..simulation(150) };
    let want = make("plain", &plain);
    // The chunk size determines which places share a tile of 128 rows and how full the last tile of a chunk is. The
    // chunk size and the number of threads determine which thread processes each tile. Neither number may change
    // the bytes.
    for (chunk_rows, threads) in [(77, 1), (149, 3)] {
        let other = Simulation { chunk_rows: Some(chunk_rows), threads, ..plain.clone() };
        assert!(make(&format!("chunk{chunk_rows}"), &other) == want, "chunks of {chunk_rows} rows change the bytes");
    }
    assert!(make("seed", &Simulation { seed: 8, ..plain.clone() }) != want, "another seed gives the same bytes");
    let out = scratch.path().join("plain");
    let error = simulate(&plain, &out).expect_err("the folder already exists");
    assert_eq!(
        (error.exit_code(), bytes_of(&out) == want),
        (ExitCode::Exists, true),
        "the existing folder was changed, or the exit code is wrong for: {error}"
    );
    simulate(&Simulation { overwrite: true, ..simulation(5) }, &out).expect("the folder may be replaced");
    assert!(bytes_of(&out) != want);
}

#[test]
fn pieces_of_several_workers_join_to_the_bytes_of_one_worker() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let place = |name: &str| scratch.path().join(name);
    let options = Simulation { rows_per_file: Some(1024), ..simulation(3500) };
    simulate(&options, &place("one")).expect("the options are valid");
    let first = PieceFolders { earlier: BTreeMap::new(), others: place("first") };
    let rows = simulate_pieces(&options, &first, &place("joined"), (1, 3)).expect("the options are valid");
    assert_eq!(rows, 1024);
    // A second attempt by fewer workers leaves out the piece of the first attempt.
    let second = PieceFolders { earlier: BTreeMap::from([(1, first.piece(1))]), others: place("second") };
    let rows = [0, 1]
        .map(|rank| simulate_pieces(&options, &second, &place("joined"), (rank, 2)).expect("the options are valid"));
    assert_eq!(rows, [1024 + 428, 1024]);
    let joined = join_pieces(&options, &second, &place("joined")).expect("all pieces are there");
    assert_eq!((joined.rows, joined.files.len()), (3500, 4));
    assert!(bytes_of(&place("joined")) == bytes_of(&place("one")), "the bytes differ");

    let fewer = Simulation { rows: Some(3400), ..options.clone() };
    let error = join_pieces(&fewer, &second, &place("other")).expect_err("the last piece has too many rows");
    assert!(error.to_string().contains("piece-00003") && !place("other").exists(), "{error}");

    let damaged = second.piece(2).join("part-00000.parquet");
    let mut bytes = std::fs::read(&damaged).expect("the file can be read");
    bytes[100_000] ^= 1;
    std::fs::write(&damaged, bytes).expect("the file can be written");
    let error = join_pieces(&options, &second, &place("other")).expect_err("a piece is damaged");
    assert_eq!(error.exit_code(), ExitCode::Corrupt, "{error}");
    assert!(error.to_string().contains("piece-00002") && !place("other").exists(), "{error}");
}

#[test]
fn gallery_embeddings_are_cached_and_a_damaged_cache_is_not_used() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    for name in ["geoclip.safetensors", "gallery.csv", "LICENSE", "manifest.json"] {
        std::fs::copy(folder().join(name), scratch.path().join(name)).expect("the file can be copied");
    }
    let geoclip = Geoclip::open(scratch.path()).expect("the folder has GeoCLIP weights");
    let embedder = Embedder::new(geoclip.location_encoder(Device::Cpu).expect("the weights are complete"), 2);
    let mut gallery = GalleryEmbeddings::open(&geoclip, &embedder);
    assert!(!gallery.is_whole());
    // Embedding gallery points one by one and out of order gives the same bits as embedding all of them at once.
    let few = [3000, 5, 4095];
    for index in few {
        gallery.ensure([index], &embedder).expect("the places are valid");
    }
    let alone: Vec<Vec<f32>> = few.iter().map(|index| gallery.embedding(*index).to_vec()).collect();
    let mut whole = GalleryEmbeddings::open(&geoclip, &embedder);
    whole.complete(&embedder, |_| ()).expect("the places are valid");
    for (index, alone) in few.iter().zip(&alone) {
        assert_eq!(
            whole.embedding(*index),
            &alone[..],
            "the embedding of gallery point {index} differs if it is embedded alone"
        );
    }
    let cache = scratch.path().join("gallery-cpu.f32");
    let kept = GalleryEmbeddings::open(&geoclip, &embedder);
    assert!(kept.is_whole() && (0..4096).all(|index| kept.embedding(index) == whole.embedding(index)));
    let mut bytes = std::fs::read(&cache).expect("the cache was written");
    bytes[1_000_000] ^= 1;
    std::fs::write(&cache, &bytes).expect("the file can be written");
    assert!(!GalleryEmbeddings::open(&geoclip, &embedder).is_whole(), "a cache with a flipped bit was used");
    std::fs::write(&cache, &bytes[..bytes.len() - 4]).expect("the file can be written");
    assert!(!GalleryEmbeddings::open(&geoclip, &embedder).is_whole(), "a truncated cache was used");
}

/// The cosine similarity of each row of `a` with the same row of `b`.
fn cosines(a: &Tensor, b: &Tensor) -> Vec<f64> {
    Vec::try_from(Tensor::cosine_similarity(a, b, 1, 1e-9).to_kind(Kind::Double)).expect("the tensor holds f64 numbers")
}

/// Asserts that scales fall into bins with the specified probabilities and are log-uniform within a bin. Each count may
/// differ from its expected value by up to four standard deviations.
fn assert_scale_statistics(photos: &[Photo], probabilities: [f64; 6]) {
    let edges_km = [0.05, 1.0, 25.0, 200.0, 750.0, 2500.0, 20_000.0_f64];
    let draws = photos.len() as f64;
    let within =
        |low: f64, high: f64| photos.iter().filter(|photo| (low..high).contains(&photo.scale_km)).count() as f64;
    for (bin, probability) in probabilities.into_iter().enumerate() {
        let (low, high) = (edges_km[bin], edges_km[bin + 1]);
        let near = |count: f64, probability: f64| {
            let deviation = (draws * probability * (1.0 - probability)).sqrt();
            assert!(
                (count - draws * probability).abs() < 4.0 * deviation,
                "bin {bin}: {count} of {draws} scales, wanted a share of {probability}"
            );
        };
        near(within(low, high), probability);
        near(within(low, (low * high).sqrt()), probability / 2.0);
    }
}

/// Asserts that the first look-alike of a photo with scale r lies at distance 1.2 r √u, where u is uniform in 0..1. The
/// squared distance is then uniform, with mean 0.72 r² and standard deviation 0.416 r². Look-alikes that a nearby
/// gallery point has replaced are left out. Only photos with scales below 400 m are used, because such replacements are
/// rare among them.
fn assert_displacement_statistics(photos: &[Photo]) {
    let squares: Vec<f64> = photos
        .iter()
        .filter(|photo| photo.scale_km < 0.4)
        .filter_map(|photo| match photo.sources[1] {
            Source::Place(place) => Some((place.distance(photo.place).0 / photo.scale_km).powi(2)),
            Source::Gallery(_) => None,
        })
        .collect();
    let (count, mean) = (squares.len() as f64, squares.iter().sum::<f64>() / squares.len() as f64);
    assert!(
        count > 400.0 && (mean - 0.72).abs() < 4.0 * 0.416 / count.sqrt(),
        "the mean of {count} squared distances is {mean}, wanted 0.72"
    );
    assert!(squares.iter().all(|square| *square <= 1.44 + 1e-6));
}

#[test]
fn simulated_world_has_the_specified_statistics() {
    let geoclip = Geoclip::open(&folder()).expect("the folder has GeoCLIP weights");
    let world = World1::new(7, geoclip.places(), None);
    let draws = 20_000_u64;
    let candidates = world.candidates(0).expect("the index is in range");
    let photos: Vec<_> =
        (0..draws).map(|index| world.photo(index, &candidates).expect("the index is in range")).collect();
    assert_scale_statistics(&photos, [0.06, 0.10, 0.16, 0.24, 0.22, 0.22]);
    let weight = |power: i32| photos.iter().map(|photo| photo.weights[2].powi(power)).sum::<f64>() / draws as f64;
    // Each of the five weights, drawn from Dirichlet(1, 1, 1, 1, 1), has mean 1/5 and mean square 1/15.
    assert!(
        (weight(1) - 0.2).abs() < 0.005 && (weight(2) - 1.0 / 15.0).abs() < 0.004,
        "a weight has mean {} and mean square {}, wanted 1/5 and 1/15",
        weight(1),
        weight(2)
    );
    assert_displacement_statistics(&photos);
    let mut farthest = 0.0;
    for photo in &photos {
        assert!((photo.weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        for (number, source) in photo.sources.iter().copied().enumerate() {
            let (place, reach) = match source {
                Source::Gallery(index) => (geoclip.places()[index], 1.6),
                Source::Place(place) => (place, 1.2),
            };
            if number > 0 && matches!(source, Source::Gallery(_)) {
                farthest = f64::max(farthest, place.distance(photo.place).0 / photo.scale_km);
            }
            let half_turn_km = 20_015.2;
            assert!(place.distance(photo.place).0 <= (reach * photo.scale_km).min(half_turn_km) + 1e-6);
        }
    }
    assert!(farthest > 1.55, "the farthest gallery point used is {farthest} scales away, wanted more than 1.55");
    // The first photo of a gallery place lies exactly on the place. Later photos of the same place lie within 1 km of
    // it.
    let spots = geoclip.places().len() as u64;
    let (first, second) = (&photos[17], &photos[17 + spots as usize]);
    assert!(matches!(first.sources[0], Source::Gallery(17)) && first.place == geoclip.places()[17]);
    assert!((1e-6..=1.0).contains(&first.place.distance(second.place).0));
    // With a coordinate file, every photo lies exactly on a place of the file.
    let list = &geoclip.places()[..3];
    let listed = World1::new(7, geoclip.places(), Some(list));
    let again = [1, 4].map(|index| listed.photo(index, &candidates).expect("the index is in range"));
    assert!(again.iter().all(|photo| photo.place == list[1]) && again[0].weights != again[1].weights);

    // After projection by Q, the embedding of a photo has unit length. The smaller the scale of the photo, the closer
    // its embedding is to the embedding of its place.
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let out = scratch.path().join("out");
    let manifest = simulate(&Simulation { views: 2, ..simulation(800) }, &out).expect("the options are valid");
    assert_eq!((manifest.rows, manifest.views, manifest.width), (800, 2, 768));
    let views = read_views(&out, &manifest);
    let q = projection(PROJECTION_SEED).expect("the seed is valid");
    let identity = (q.tr().matmul(&q) - Tensor::eye(512, (Kind::Float, Device::Cpu))).abs().max().double_value(&[]);
    assert!(identity < 1e-6, "QᵀQ differs from the identity by {identity:e}");
    let projected: Vec<Tensor> = views.iter().map(|view| view.matmul(&q)).collect();
    let norms = projected[0].norm_scalaropt_dim(2.0, [1].as_slice(), false) - 1.0;
    // The 768 numbers of an embedding are stored as float16, which has 11 significant bits.
    assert!(norms.abs().max().double_value(&[]) < 1e-3);
    let embedder = Embedder::new(geoclip.location_encoder(Device::Cpu).expect("the weights are complete"), 2);
    let own = embedder
        .embed(&photos[..800].iter().map(|photo| photo.place).collect::<Vec<_>>())
        .expect("the places are valid");
    let own = Tensor::from_slice(&own).view([800, EMBEDDING_WIDTH as i64]);
    let cosine = cosines(&projected[0], &own);
    let mean = |low: f64, high: f64| {
        let of: Vec<f64> =
            (0..800).filter(|row| (low..high).contains(&photos[*row].scale_km)).map(|row| cosine[row]).collect();
        of.iter().sum::<f64>() / of.len() as f64
    };
    let [near, middle, far] = [mean(0.05, 25.0), mean(25.0, 750.0), mean(750.0, 20_000.0)];
    println!(
        "mean cosine between a photo and its place, by the scale of the photo: {near:.3} below 25 km, {middle:.3} up to \
         750 km, {far:.3} above"
    );
    assert!(
        near > middle + 0.02 && middle > far + 0.02 && near < 0.9,
        "the mean cosines {near}, {middle} and {far} do not fall with the scale"
    );
    let between = cosines(&projected[0], &projected[1]);
    let between = between.iter().sum::<f64>() / between.len() as f64;
    // Each view adds its own noise of length 0.8 to a signal of length 1. If two views mixed their sources with the
    // same weights, their cosine would be 1 / (1 + 0.8²) = 0.61. Their weights differ a little, so the cosine is lower.
    assert!((0.5..0.62).contains(&between), "two views have a mean cosine of {between}, wanted 0.5 to 0.62");
}

#[test]
fn coordinate_files_are_read_and_errors_name_file_and_row() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let file = |name: &str, bytes: &[u8]| {
        let path = scratch.path().join(name);
        std::fs::write(&path, bytes).expect("the file can be written");
        path
    };
    let run = |path: PathBuf, rows: Option<u64>| -> Result<(Manifest, PathBuf), ShardsError> {
        let out = tempfile::tempdir_in(scratch.path()).expect("a temporary folder can be created").path().to_owned();
        let simulation = Simulation { rows, coordinates: Some(path), ..simulation(1) };
        simulate(&simulation, &out).map(|manifest| (manifest, out))
    };
    let npy = |kind: &str, shape: &str, data: &[u8]| {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
        let padded = format!("{header:<117}\n");
        [b"\x93NUMPY\x01\x00", &(padded.len() as u16).to_le_bytes()[..], padded.as_bytes(), data].concat()
    };
    let pairs = [10.5_f64, -20.25, -33.75, 151.5];
    let csv = file("a.csv", b"path,Longitude,x,LATITUDE\np1,-20.25,,10.5\np2,151.5,\"a, b\",-33.75\n");
    let f64s: Vec<u8> = pairs.iter().flat_map(|value| value.to_le_bytes()).collect();
    let f32s: Vec<u8> = pairs.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
    let (manifest, out) = run(csv, None).expect("the options are valid");
    assert_eq!(manifest.rows, 2);
    let want = read_views(&out, &manifest);
    for (name, bytes) in [("b.npy", npy("<f8", "(2, 2)", &f64s)), ("c.npy", npy("<f4", "(2, 2)", &f32s))] {
        let (manifest, out) = run(file(name, &bytes), None).expect("the options are valid");
        assert!(read_views(&out, &manifest)[0].equal(&want[0]), "{name} and the CSV file give different embeddings");
    }
    assert_eq!(run(file("d.npy", &npy("<f4", "(2, 2)", &f32s)), Some(5)).expect("the options are valid").0.rows, 5);

    const MISSING: &str = "no column for longitude; found: lat, east; accepted: lon, lng, long, longitude";
    let corrupt = ExitCode::Corrupt;
    let nan: Vec<u8> = [0.0_f64, f64::NAN].iter().flat_map(|value| value.to_le_bytes()).collect();
    for (name, bytes, code, parts) in [
        ("e.csv", b"lat,lon\n1,2\n91,3\n".to_vec(), ExitCode::BadData, ["e.csv: row 1", "latitude is 91"]),
        ("f.csv", b"lat,lon\n1,200\n".to_vec(), ExitCode::BadData, ["f.csv: row 0", "longitude is 200"]),
        ("g.csv", b"lat,lon\n1,2\n1,x\n".to_vec(), ExitCode::BadData, ["g.csv: row 1", "`lon` is `x`"]),
        ("h.csv", b"lat,lon\n1,2\n1\n".to_vec(), ExitCode::BadData, ["h.csv: row 1", "1 field"]),
        ("i.csv", b"lat,east\n1,2\n".to_vec(), ExitCode::BadData, ["i.csv", MISSING]),
        ("j.csv", b"lat,lon\n".to_vec(), ExitCode::BadData, ["j.csv", "has no rows"]),
        ("k.npy", npy("<f8", "(2, 3)", &[0; 48]), ExitCode::BadData, ["k.npy", "N x 2"]),
        ("l.npy", npy("<i8", "(2, 2)", &[0; 32]), ExitCode::BadData, ["l.npy", "`<i8`"]),
        ("m.npy", npy("<f8", "(2, 2)", &f64s[..31]), corrupt, ["m.npy", "cut short"]),
        ("n.npy", npy("<f8", "(18446744073709551615, 2)", &f64s), corrupt, ["n.npy", "cut short"]),
        ("o.npy", npy("<f8", "(1, 2)", &nan), ExitCode::BadData, ["o.npy: row 0", "longitude is NaN"]),
        ("p.npy", b"\x93NUM".to_vec(), corrupt, ["p.npy", "cut short"]),
    ] {
        let error = run(file(name, &bytes), None).expect_err(name);
        let text = error.to_string();
        assert!(
            error.exit_code() == code && parts.iter().all(|part| text.contains(part)),
            "{name}: wrong error or exit code: {text}"
        );
    }
    let error = run(scratch.path().join("none.csv"), None).expect_err("the file does not exist");
    assert_eq!(error.exit_code(), ExitCode::Io, "wrong exit code for: {error}");
    let missing = Simulation { geoclip: scratch.path().join("nowhere"), ..simulation(1) };
    let error = simulate(&missing, &scratch.path().join("never")).expect_err("the folder has no weights");
    assert!(
        error.exit_code() == ExitCode::NoData && error.to_string().contains("locdiff-launch geoclip import"),
        "wrong error or exit code: {error}"
    );
    assert!(!scratch.path().join("never").exists());
}
