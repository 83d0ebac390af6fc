//! Tests that the scores of retrieval are scaled cosines for every head, and that the scores of an image do not depend
//! on the other images of the batch.

mod hybrid;
mod prior;

use std::path::Path;
use std::sync::Arc;

use arrow_array::types::Float64Type;
use arrow_array::{ArrayRef, Float64Array, ListArray, RecordBatch};
use locdiff::geoclip::{Embedder, FEATURE_WIDTH, Geoclip};
use locdiff::infer::retrieval_data;
use locdiff::retrieval::{
    DataFacts, DataHead, Exclusion, Gallery, Hybrid, ImageSamples, QueryHead, RetrievalError, Retriever, Scored,
    Surroundings, Voters, check_head, knn_place, locate, try_settings,
};
use locdiff::shards::{Blocks as _, Dataset, ImageHead, Mask, PROJECTION_SEED, WriterOptions, projection};
use locdiff::shdd::uniform_points;
use locdiff_core::config::{HybridMode, RetrievalConfig, RetrievalHead, ShardsConfig};
use locdiff_core::exit_code::HasExitCode;
use locdiff_core::geo::{Km, Place, UnitVector};
use locdiff_core::random::{Draw, Philox, Stream};
use locdiff_core::tuning::Trials;
use parquet::arrow::ArrowWriter;
use tch::{Device, Kind, Tensor};

use crate::geoclip::support::folder;

const WIDTH: usize = 24;
/// Retrieval without a vote.
fn plain() -> Voters {
    Voters { neighbours: 1, points: 1, consensus: Hybrid::without_locdiff(1.0, 1.0, 1.0) }
}

fn normals(seed: u64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    let mut values = vec![0.0_f32; count];
    let draw = Draw { stream: Stream::Test(3), step: 0, first_sample: 0, elements: count };
    Philox::new(seed).fill_normal(draw, &mut values).expect("the counters are in range");
    Tensor::from_slice(&values).view(shape)
}

fn points(count: usize) -> Vec<UnitVector> {
    uniform_points(9, 0, 0, count).expect("the counters are in range")
}

/// A gallery of random embeddings in f16, the type in which shards store embeddings. A gallery of 9000 points fills
/// more than two tiles.
fn gallery(count: usize) -> Gallery {
    let embeddings = normals(1, &[count as i64, WIDTH as i64]).to_kind(Kind::Half);
    Gallery::of_embeddings("test".into(), points(count), embeddings).expect("the gallery is valid")
}

fn rows(tensor: &Tensor) -> Vec<Vec<f64>> {
    let width = *tensor.size().last().expect("the tensor has a dimension") as usize;
    let all =
        Vec::<f64>::try_from(tensor.to_kind(Kind::Double).contiguous().view([-1])).expect("the tensor holds numbers");
    all.chunks_exact(width).map(<[f64]>::to_vec).collect()
}

fn cosine(one: &[f64], other: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(one, other) / (dot(one, one) * dot(other, other)).sqrt()
}

#[test]
fn retrieval_logits_are_mean_cosines_of_the_views() {
    let (count, images, views) = (9000, 150, 3);
    let gallery = gallery(count);
    let embeddings = normals(2, &[images, views, WIDTH as i64]);
    let queries = QueryHead::knn(40.0, Device::Cpu).queries(&embeddings).expect("the embeddings are valid");
    let wanted: Vec<Vec<u32>> =
        (0..images as u32).map(|image| (image..9000).step_by(501 + image as usize).collect()).collect();
    let retriever = Retriever::new(&gallery, Device::Cpu, 2).expect("the gallery fits in memory");
    let scored = retriever.score(&queries, &wanted, 3, None).expect("the inputs are valid");
    let points = rows(&normals(1, &[count as i64, WIDTH as i64]).to_kind(Kind::Half));
    for (image, (scored, wanted)) in scored.iter().zip(&wanted).enumerate() {
        let views = rows(&embeddings.get(image as i64));
        let logit = |point: usize| {
            40.0 * views.iter().map(|view| cosine(view, &points[point])).sum::<f64>() / views.len() as f64
        };
        assert_eq!(scored.logits.len(), wanted.len());
        for (got, point) in scored.logits.iter().zip(wanted) {
            // A logit is 40 times a sum of 24 products, computed in f32.
            assert!(
                (f64::from(*got) - logit(*point as usize)).abs() < 1e-4,
                "image {image}: the logit of point {point} is {got}, wanted {}",
                logit(*point as usize)
            );
        }
        let mut all: Vec<(usize, f64)> = (0..count).map(|point| (point, logit(point))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        for ((point, _), (want, _)) in scored.best.iter().zip(&all) {
            assert!(
                (logit(*point as usize) - logit(*want)).abs() < 1e-4,
                "image {image}: point {point} was found instead of {want}"
            );
        }
        assert_eq!(scored.best.len(), 3);
    }
}

#[test]
fn excluded_points_are_never_found() {
    let (gallery, images) = (gallery(9000), 150);
    let points = gallery.points();
    let queries = QueryHead::knn(40.0, Device::Cpu).queries(&normals(2, &[images, 1, WIDTH as i64]));
    let queries = queries.expect("the embeddings are valid");
    let retriever = Retriever::new(&gallery, Device::Cpu, 2).expect("the gallery fits in memory");
    let everything: Vec<Vec<u32>> = vec![(0..9000).collect(); images as usize];
    let open = retriever.score(&queries, &everything, 1, None).expect("the inputs are valid");
    // Each photo is taken at the gallery point that it would retrieve. Some of these points are in the last tile, which
    // is padded.
    let truths: Vec<UnitVector> = open.iter().map(|scored| points[scored.best[0].0 as usize]).collect();
    let excluded = Exclusion { radius: Km(3000.0), truths: &truths };
    let scored = retriever.score(&queries, &everything, 3, Some(excluded)).expect("the inputs are valid");
    for (image, (scored, open)) in scored.iter().zip(&open).enumerate() {
        let is_left = |(point, _): &(u32, f32)| points[*point as usize].distance(truths[image]) > Km(3000.0);
        let mut left: Vec<(u32, f32)> = (0..).zip(open.logits.iter().copied()).filter(is_left).collect();
        assert!((7000..9000).contains(&left.len()), "image {image}: {} points are left", left.len());
        left.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        assert_eq!(scored.best, left[..3], "image {image}");
    }
    let images: Vec<ImageSamples> = truths
        .iter()
        .map(|truth| ImageSamples {
            aggregate: *truth,
            samples: vec![*truth],
            weights: Vec::new(),
            expected: Vec::new(),
        })
        .collect();
    let hybrid = |radius_km| Hybrid { mode: HybridMode::AnySample, ..Hybrid::without_locdiff(radius_km, 1.0, 1.0) };
    let surroundings = Surroundings::default();
    let gallery = (&retriever, &surroundings);
    for (radius_km, is_found) in [(2999.0, false), (4000.0, true)] {
        let found = locate(gallery, &queries, &images, &hybrid(radius_km), plain(), Some(excluded));
        for (found, truth) in found.expect("the inputs are valid").iter().zip(&truths) {
            assert!(found.retrieval.distance(*truth) > Km(3000.0), "retrieval found a point that was left out");
            assert_eq!(found.hybrid.map(|place| place.distance(*truth) > Km(3000.0)), is_found.then_some(true));
        }
        let setting = Hybrid { density_weight: 1.0, ..Hybrid::without_locdiff(radius_km, 1.0, 1.0) };
        let trials = Trials { consensus: vec![plain().consensus], hybrid: vec![setting] };
        let errors = try_settings(gallery, &queries, &images, &truths, &trials, plain(), Some(excluded.radius));
        for errors in errors.expect("the inputs are valid") {
            let all = [errors.retrieval_km, errors.consensus_km[0], errors.settings_km[0]];
            assert!(all.iter().all(|km| *km > 3000.0), "{errors:?}");
        }
    }
    let all = Exclusion { radius: Km(21_000.0), ..excluded };
    let error = locate(gallery, &queries, &images, &hybrid(10.0), plain(), Some(all)).expect_err("no points are left");
    assert!(matches!(error, RetrievalError::AllExcluded { row: 0, .. }), "{error}");
}

#[test]
fn retrieval_scores_do_not_depend_on_other_images_order_or_threads() {
    let gallery = gallery(9000);
    let embeddings = normals(2, &[300, 2, WIDTH as i64]);
    let wanted: Vec<Vec<u32>> = (0..300).map(|image| vec![image, 4095, 4096, 8999]).collect();
    let score = |chosen: &[i64], threads: usize| -> Vec<Scored> {
        let chosen_embeddings = embeddings.index_select(0, &Tensor::from_slice(chosen));
        let queries = QueryHead::knn(40.0, Device::Cpu).queries(&chosen_embeddings).expect("the embeddings are valid");
        let wanted: Vec<Vec<u32>> = chosen.iter().map(|image| wanted[*image as usize].clone()).collect();
        Retriever::new(&gallery, Device::Cpu, threads)
            .expect("the gallery fits in memory")
            .score(&queries, &wanted, 2, None)
            .expect("the inputs are valid")
    };
    let all: Vec<i64> = (0..300).collect();
    let together = score(&all, 1);
    assert!(together == score(&all, 3), "the number of threads changed bits of the scores");
    let backwards: Vec<i64> = all.iter().rev().copied().collect();
    assert!(
        together == score(&backwards, 2).into_iter().rev().collect::<Vec<_>>(),
        "the order of the images changed bits of the scores"
    );
    assert_eq!(score(&[157], 1)[0], together[157], "the other images changed bits of the scores");
}

/// Uses GeoCLIP's real weights. Also checks that the gallery's embeddings are cached on disk, so that opening the
/// gallery again embeds nothing.
#[test]
fn retrieval_with_geoclip_finds_the_place_of_a_photo() {
    let config = RetrievalConfig { geoclip: folder().display().to_string(), ..RetrievalConfig::default() };
    let geoclip = Geoclip::open(Path::new(&config.geoclip)).expect("the folder has real weights");
    let embedder = Embedder::new(geoclip.location_encoder(Device::Cpu).expect("the weights have an encoder"), 2);
    let gallery = Gallery::open(&config, &geoclip, &embedder, |_, _| ()).expect("the gallery is valid");
    let again = Gallery::open(&config, &geoclip, &embedder, |_, _| {
        panic!("the embeddings were computed again, so they were not cached")
    })
    .expect("the gallery is valid");
    assert_eq!(gallery.points(), again.points());
    let shown = [17_usize, 2000, 4095];
    let places: Vec<_> = shown.iter().map(|point| geoclip.places()[*point]).collect();
    let looks = Tensor::from_slice(&embedder.embed(&places).expect("the places can be embedded")).view([3, 1, 512]);
    let projection = projection(PROJECTION_SEED).expect("the projection can be computed");
    let photos = looks.matmul(&projection.tr());
    let head = QueryHead::linear(&geoclip, &projection, Device::Cpu).expect("the weights have a head");
    assert!((head.factor() - 39.687).abs() < 1e-3, "{}", head.factor());
    let queries = head.queries(&photos).expect("the embeddings are valid");
    let retriever = Retriever::new(&again, Device::Cpu, 2).expect("the gallery fits in memory");
    for (scored, point) in
        retriever.score(&queries, &vec![Vec::new(); 3], 1, None).expect("the inputs are valid").iter().zip(shown)
    {
        assert_eq!(again.points()[scored.best[0].0 as usize], again.points()[point], "the wrong point is best");
        assert!((f64::from(scored.best[0].1) - head.factor()).abs() < 1e-3, "the cosine is not 1");
    }
    // With GeoCLIP's image head, the logit of a photo with ten crops is the mean of the crops' logits.
    let crops = normals(5, &[2, 10, FEATURE_WIDTH as i64]) * 10.0;
    let queries = QueryHead::geoclip(&geoclip, Device::Cpu)
        .expect("the weights have a head")
        .queries(&crops)
        .expect("the embeddings are valid");
    let own = geoclip.image_head(Device::Cpu).expect("the weights have a head");
    for image in 0..2 {
        let encoded = own.encode(&crops.get(image)).expect("the input has the right shape");
        let unit = &encoded / encoded.norm_scalaropt_dim(2.0, [1].as_slice(), true);
        let mean = unit.matmul(&looks.get(0).tr()).mean(Kind::Float).double_value(&[]) * own.logit_factor();
        let got = queries.get(image).dot(&looks.get(0).view([-1])).double_value(&[]);
        assert!((got - mean).abs() < 1e-4, "the logit is {got}, wanted the mean {mean}");
    }
}

#[test]
fn retrieval_among_training_photos_weighs_all_given_neighbours() {
    let found = points(4);
    let near = found[3].displace(locdiff_core::geo::Degrees(0.0), Km(2.0)).expect("the displacement is finite");
    let places = [found[0], found[3], near, found[2]];
    let best = [(0, 10.0), (1, 9.9), (2, 9.9), (3, 5.0)];
    assert_eq!(knn_place(&places, &best[..1]), Some(0));
    assert_eq!(knn_place(&places, &best), Some(1), "one neighbour outweighed two neighbours in another town");
    assert_eq!(knn_place(&places, &[]), None);
    let gallery =
        Gallery::of_embeddings("test".into(), places.to_vec(), normals(1, &[4, 8])).expect("the gallery is valid");
    let retriever = Retriever::new(&gallery, Device::Cpu, 1).expect("the gallery fits in memory");
    let queries = QueryHead::knn(40.0, Device::Cpu).queries(&normals(1, &[4, 1, 8])).expect("the embeddings are valid");
    let images: Vec<ImageSamples> = places
        .iter()
        .map(|place| ImageSamples {
            aggregate: place.antipode(),
            samples: vec![place.antipode()],
            weights: Vec::new(),
            expected: Vec::new(),
        })
        .collect();
    let hybrid = Hybrid { mode: HybridMode::AnySample, ..Hybrid::without_locdiff(1.0, 1.0, 1.0) };
    let gallery = (&retriever, &Surroundings::default());
    let located = locate(gallery, &queries, &images, &hybrid, plain(), None).expect("the inputs are valid");
    for (located, place) in located.iter().zip(&places) {
        assert_eq!(located.retrieval, *place, "a photo did not retrieve itself");
        assert_eq!(
            (located.hybrid, located.hybrid_or(*place)),
            (None, *place),
            "a gallery point was in range, wanted none"
        );
    }
}

#[test]
fn retrieval_refuses_zero_and_non_finite_embeddings() {
    let with_zero_row = |row: usize| {
        let embeddings = normals(1, &[5, 8]);
        let _ = embeddings.get(row as i64).zero_();
        embeddings
    };
    let error = Gallery::of_embeddings("here".into(), points(5), with_zero_row(3)).expect_err("the input is invalid");
    assert_eq!((error.exit_code().code(), error.to_string().contains("gallery point 3")), (20, true), "{error}");
    let error =
        Gallery::of_embeddings("here".into(), Vec::new(), normals(1, &[0, 8])).expect_err("the input is invalid");
    assert_eq!(error.to_string(), "here: no gallery points, wanted at least 1");
    let error =
        QueryHead::knn(1.0, Device::Cpu).queries(&with_zero_row(2).unsqueeze(1)).expect_err("the input is invalid");
    assert!(error.to_string().contains("image 2"), "{error}");
    let broken = normals(1, &[2, 1, 8]) * f64::NAN;
    assert!(QueryHead::knn(1.0, Device::Cpu).queries(&broken).is_err());
}

#[test]
fn retrieval_heads_that_do_not_fit_the_data_are_refused() {
    let facts = |width: usize, image_head: DataHead, mean_length: Option<f64>| DataFacts {
        location: "shards/x".into(),
        width,
        image_head,
        mean_length,
        place_rank: None,
    };
    let fits = |head, facts: &DataFacts| check_head(head, facts).is_ok();
    use RetrievalHead::{Geoclip, Knn, Linear};
    assert!(fits(Geoclip, &facts(768, DataHead::Geoclip, Some(14.0))));
    assert!(fits(Geoclip, &facts(768, DataHead::Unknown, None)));
    assert!(fits(Linear, &facts(768, DataHead::Linear, Some(1.0))));
    assert!(fits(Knn, &facts(5, DataHead::Unknown, None)));
    for (head, facts, message) in [
        (Geoclip, facts(768, DataHead::Linear, None), "photos are simulated"),
        (Geoclip, facts(768, DataHead::Trained, None), "cannot use these embeddings (world 2)"),
        (Linear, facts(768, DataHead::Trained, None), "retrieval.head = \"knn\""),
        (Geoclip, facts(512, DataHead::Unknown, None), "width 512, but GeoCLIP's image head takes width 768"),
        (Geoclip, facts(768, DataHead::Unknown, Some(1.001)), "mean length 1.001"),
        (Linear, facts(768, DataHead::Geoclip, None), "manifest says that the embeddings are CLIP features"),
        (Linear, facts(768, DataHead::Unknown, None), "no manifest says that the photos are simulated"),
        (Linear, facts(512, DataHead::Linear, None), "width 512"),
    ] {
        let error = check_head(head, &facts).expect_err("the head cannot be used");
        assert_eq!(error.exit_code().code(), 10);
        assert!(error.to_string().contains(message) && error.to_string().contains("shards/x"), "{error}");
    }
}

#[test]
fn automatic_head_fits_the_data_and_the_reason_is_given() {
    use RetrievalHead::{Geoclip, Knn, Linear};
    for (width, image_head, mean_length, place_rank, has_geoclip, want, reason) in [
        (768, DataHead::Linear, 1.0, None, true, Linear, "simulated"),
        (768, DataHead::Trained, 1.0, None, true, Knn, "world 2"),
        (768, DataHead::Trained, 14.0, None, false, Knn, "world 2"),
        (768, DataHead::Geoclip, 14.0, None, true, Geoclip, "manifest"),
        (768, DataHead::Unknown, 14.0, Some(0.04), true, Geoclip, "GeoCLIP recognises the places"),
        (768, DataHead::Unknown, 14.0, Some(0.48), true, Knn, "ranks the true place at 48 % on average"),
        (768, DataHead::Unknown, 14.0, None, true, Knn, "too few photos"),
        (768, DataHead::Unknown, 1.001, None, true, Knn, "normalised"),
        (768, DataHead::Unknown, 14.0, None, false, Knn, "geoclip import"),
        (768, DataHead::Linear, 1.0, None, false, Knn, "geoclip import"),
        (512, DataHead::Unknown, 1.0, None, true, Knn, "the embeddings have 512 numbers, and GeoCLIP's have 768"),
    ] {
        let mean_length = Some(mean_length);
        let facts = DataFacts { location: "shards/x".into(), width, image_head, mean_length, place_rank };
        let (head, text) = facts.fitting_head(has_geoclip);
        assert!(head == want && text.contains(reason), "{facts:?}: {head:?}, because {text}");
        check_head(head, &facts).expect("the chosen head can be used");
    }
}

fn with_head(head: RetrievalHead) -> RetrievalConfig {
    RetrievalConfig { head, ..RetrievalConfig::default() }
}

/// The manifest of a folder states the origin of its files. A file that is opened alone, by a glob or through a link
/// has the same origin.
#[test]
fn files_given_one_by_one_have_the_origin_of_their_folder() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("simulated");
    crate::shards::support::write(&folder);
    let config = ShardsConfig::default();
    let open = |location: &str| Dataset::open(location, &config).expect("the data can be opened");
    let whole = open(&folder.display().to_string());
    let origin = whole.origin().expect("the manifest states an origin");
    assert_eq!((origin.source.as_str(), origin.image_head), ("sixty-four rows", ImageHead::Linear));
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("the folder exists")
        .map(|entry| entry.expect("the entry is readable").path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "parquet"));
    std::os::unix::fs::symlink(&files[0], scratch.path().join("link.parquet")).expect("the link can be created");
    let named = [format!("{}/*.parquet", folder.display()), files[0].display().to_string()];
    for location in named.iter().chain([&format!("{}/link.parquet", scratch.path().display())]) {
        let found = open(location);
        assert_eq!(found.origin(), Some(origin), "{location}");
        // If a location names files instead of their folder, training treats them as data without a manifest.
        assert!(found.manifest().is_none() && found.fingerprint() != whole.fingerprint(), "{location}");
        let facts = retrieval_data::data_facts(location, &found, &Mask::none(), RetrievalHead::Linear)
            .expect("the data is readable");
        assert_eq!(facts.image_head, DataHead::Linear, "{location}");
    }
    // A file that the manifest does not list has no origin. A `manifest.json` that this program did not write is
    // ignored.
    std::fs::copy(&files[0], folder.join("other.parquet")).expect("the file can be copied");
    assert_eq!(open(&folder.join("other.parquet").display().to_string()).origin(), None);
    std::fs::write(folder.join("manifest.json"), "{}").expect("the file can be written");
    assert_eq!(open(&named[0]).origin(), None);
}

#[test]
fn mean_length_is_measured_if_there_is_no_manifest() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    for (name, length) in [("unit", 1.0), ("long", 12.0)] {
        let folder = scratch.path().join(name);
        let options = WriterOptions { image_head: ImageHead::None, ..crate::shards::support::options() };
        let change = |_: &mut Vec<f64>, _: &mut Vec<f64>, first: &mut Vec<half::f16>| {
            first.iter_mut().enumerate().for_each(|(at, value)| {
                let is_first = at % crate::shards::support::WIDTH == 0;
                *value = half::f16::from_f64(if is_first { length } else { 0.0 });
            });
        };
        crate::shards::support::write_with(&folder, options, change).expect("the file can be written");
        for location in [folder.display().to_string(), format!("{}/*.parquet", folder.display())] {
            let dataset = Dataset::open(&location, &ShardsConfig::default()).expect("the data can be opened");
            let facts = retrieval_data::data_facts(&location, &dataset, &Mask::none(), RetrievalHead::Geoclip);
            let found = facts
                .expect("the data is readable")
                .mean_length
                .expect("the manifest has the mean length, or the length is measured");
            assert!((found - length).abs() < 1e-6, "{location}: the mean length is {found}, wanted {length}");
        }
    }
}

/// Tests the function with which evaluation opens a gallery. Here the gallery consists of the training photos, which
/// are shards on disk.
#[test]
fn retrieval_opens_training_photos_as_a_gallery() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("train");
    crate::shards::support::write(&folder);
    let shards = ShardsConfig { train: folder.display().to_string(), ..ShardsConfig::default() };
    let dataset = Dataset::open(&shards.train, &shards).expect("the data can be opened");
    let config = with_head(RetrievalHead::Knn);
    let facts =
        retrieval_data::data_facts(&shards.train, &dataset, &Mask::none(), config.head).expect("the data is readable");
    assert_eq!((facts.width, facts.mean_length.is_some()), (crate::shards::support::WIDTH, true));
    let open_in = |config: &RetrievalConfig, facts: &DataFacts, bytes_max: u64| {
        retrieval_data::open(config, &shards, (facts, bytes_max), Device::Cpu, 1, |_, _| ())
    };
    let open = |config: &RetrievalConfig, facts: &DataFacts| open_in(config, facts, u64::MAX);
    let (gallery, head) = open(&config, &facts).expect("the gallery is valid");
    let error = open_in(&config, &facts, 100).expect_err("the training photos need more than 100 bytes");
    assert!(error.to_string().contains("GB of memory in every worker"), "{error}");
    assert_eq!((gallery.points().len() as u64, head.factor()), (dataset.rows(), config.knn_scale));
    let error = open(&config, &DataFacts { width: 7, ..facts.clone() }).expect_err("the widths differ");
    assert!(error.to_string().contains("width 7") && error.to_string().contains("the same encoder"), "{error}");
    let error = open(&with_head(RetrievalHead::Geoclip), &facts).expect_err("the embeddings are not CLIP features");
    assert_eq!(error.exit_code().code(), 10, "{error}");
}

/// Writes a Parquet file without a manifest: one photo at each of `points`, with the features `features_ne`.
fn write_photos(path: &Path, points: &[UnitVector], features_ne: &Tensor) {
    let places: Vec<Place> = points.iter().copied().map(Place::from).collect();
    let degrees = |value: fn(&Place) -> f64| Arc::new(Float64Array::from_iter_values(places.iter().map(value)));
    let features = rows(features_ne).into_iter().map(|row| Some(row.into_iter().map(Some).collect::<Vec<_>>()));
    let columns: [(&str, ArrayRef); 3] = [
        ("latitude", degrees(|place| place.latitude().0)),
        ("longitude", degrees(|place| place.longitude().0)),
        ("clip", Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(features))),
    ];
    let batch = RecordBatch::try_from_iter(columns).expect("the columns have equal lengths");
    let file = std::fs::File::create(path).expect("the file can be created");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("the schema is valid");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be written");
}

/// Features that GeoCLIP's image head maps close to the embeddings of `points`. They are computed by inverting both
/// layers of the head. Between the layers, negative values become 0, because the head's ReLU cannot produce them.
fn features_of(geoclip: &Geoclip, points: &[UnitVector]) -> Tensor {
    let places: Vec<Place> = points.iter().copied().map(Place::from).collect();
    let encoder = geoclip.location_encoder(Device::Cpu).expect("the weights are valid");
    let embeddings = Embedder::new(encoder, 1).embed(&places).expect("the places are valid");
    let targets_nw = Tensor::from_slice(&embeddings).view([points.len() as i64, -1]);
    let weights = Tensor::read_safetensors(geoclip.folder().join("geoclip.safetensors")).expect("the weights exist");
    let tensor = |name: &str| {
        let found = weights.iter().find(|(found, _)| found == name);
        found.unwrap_or_else(|| panic!("there is no tensor {name}")).1.shallow_clone()
    };
    let invert = |outputs: &Tensor, layer: &str| {
        let shifted = outputs - tensor(&format!("image.{layer}.bias"));
        shifted.matmul(&tensor(&format!("image.{layer}.weight")).pinverse(1e-3).tr())
    };
    invert(&invert(&(targets_nw * 20.0), "2").relu(), "0")
}

#[test]
fn head_of_unknown_photos_depends_on_whether_geoclip_recognises_their_places() {
    use RetrievalHead::{Geoclip as GeoclipHead, Knn};
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let weights = folder();
    let geoclip = Geoclip::open(&weights).expect("the weights are valid");
    let config = RetrievalConfig { geoclip: weights.display().to_string(), ..with_head(RetrievalHead::Auto) };
    let (many, few, same) = (points(96), points(15), vec![points(1)[0]; 96]);
    let foreign = normals(4, &[96, FEATURE_WIDTH as i64]);
    let write = |name: &str, places: &[UnitVector], features: &Tensor| {
        let path = scratch.path().join(name);
        write_photos(&path, places, features);
        path.display().to_string()
    };
    let clip = write("clip.parquet", &many, &features_of(&geoclip, &many));
    let other = write("foreign.parquet", &many, &foreign);
    let one_place = write("one-place.parquet", &same, &features_of(&geoclip, &same));
    let too_few = write("few.parquet", &few, &features_of(&geoclip, &few));
    let missing = "missing.parquet".to_owned();
    // The training photos decide which head is chosen. If they cannot be read, the photos to evaluate decide.
    for (train, evaluated, want) in [
        (&clip, &clip, GeoclipHead),
        (&other, &other, Knn),
        (&clip, &other, GeoclipHead),
        (&other, &clip, Knn),
        (&missing, &clip, GeoclipHead),
        (&missing, &other, Knn),
        // If all photos show the same place, nothing can be recognised.
        (&one_place, &one_place, Knn),
        (&too_few, &too_few, Knn),
    ] {
        let shards = ShardsConfig { train: train.clone(), ..ShardsConfig::default() };
        let dataset = Dataset::open(evaluated, &shards).expect("the file is valid");
        let head = retrieval_data::chosen_head(&config, &shards, evaluated, (&dataset, &Mask::none()), false);
        assert_eq!(head.expect("the file is readable"), want, "{train}, {evaluated}");
    }
}
