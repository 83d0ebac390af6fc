//! Tests of the retrieval heads with GeoCLIP's real weights. CLIP features need GeoCLIP's own head, and simulated
//! photos need the linear head. The results are the same whether shards are named by folder or by glob.

use std::fmt::Write as _;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::{read, row, train};
use crate::small_shards;
use crate::stage::Stage;

/// Length of a CLIP feature vector.
const WIDTH: usize = 768;

/// A stage with a model trained on simulated photos, simulated photos to test it on, and a gallery with the places of
/// the test photos.
fn stage() -> Stage {
    let stage = Stage::with_geoclip();
    for (name, rows, seed) in [("train", 256, 5), ("test", 96, 6)] {
        let line = format!("shards simulate --rows {rows} --views 1 --seed {seed} --out shards/{name} --device cpu");
        stage.run(&line).exits_with(ExitCode::Success);
    }
    let more = "--set train.steps=4 --set eval.after_train=false --set retrieval.head=linear --set retrieval.gallery=gallery.csv";
    train(&stage, more).exits_with(ExitCode::Success);
    stage.run("--json eval").exits_with(ExitCode::Success);
    std::fs::write(stage.path().join("gallery.csv"), read(&stage, "truth.csv")).expect("the test folder is writable");
    stage
}

#[test]
fn simulated_photos_use_only_their_own_head_by_folder_or_glob() {
    let stage = stage();
    let mut first = None;
    for location in ["shards/test", "shards/test/*.parquet"] {
        let ran = stage.run(&format!("--json --set shards.test={location} eval --hybrid"));
        let found = ran.exits_with(ExitCode::Success).stderr_has("96 simulated photos").json();
        let rows = found["rows"].as_array().expect("the result has rows");
        assert!(rows.iter().all(|row| row["simulated"] == true), "a row is not marked as simulated: {found}");
        // Each photo was simulated from the embedding of its place, and the gallery contains this place. The
        // gallery has 96 places, so random answers would be right in about 1 % of the rows.
        let accuracy = row(&found, "retrieval")["acc_1km"].as_f64().expect("the accuracy is a number");
        assert!(accuracy > 10.0, "only {accuracy} % of the places were found, wanted more than 10 %");
        let answers = read(&stage, "predictions-retrieval.csv");
        assert_eq!(&answers, first.get_or_insert_with(|| answers.clone()), "{location}");
        let ran = stage.run(&format!("--set retrieval.head=geoclip --set shards.test={location} eval --hybrid"));
        ran.exits_with(ExitCode::Config)
            .stderr_has("its photos are simulated")
            .stderr_has("retrieval.head = \"linear\"");
    }
    // With a grid instead of the gallery, retrieval cannot find the places.
    let found = stage.run("--json eval --suite generalizability --grids 300").exits_with(ExitCode::Success).json();
    let rows = found["rows"].as_array().expect("the result has rows").iter();
    let own: Vec<_> = rows.filter(|row| row["source"] == "computed").collect();
    let what = |row: &Value| format!("{} {} {}", row["method"], row["gallery"], row["points"]);
    let want = ["retrieval", "locdiff"].map(|method| {
        [("gallery", 96), ("grid", 300)].map(|(name, points)| format!("\"{method}\" \"{name}\" {points}"))
    });
    assert_eq!(own.iter().map(|row| what(row)).collect::<Vec<_>>(), want.concat(), "{found}");
    let [gallery, grid] = [own[0], own[1]].map(|row| row["acc_1km"].as_f64().expect("the accuracy is a number"));
    assert!(gallery > 10.0 && grid == 0.0, "{found}");
    assert_eq!(found["differences"][0]["acc_1km"].as_f64(), Some(grid - gallery), "{found}");
}

#[test]
fn neighbour_count_does_not_affect_gallery_retrieval() {
    let stage = stage();
    // The gallery points are so close together that several neighbours would outvote the best point.
    let mut gallery = String::from("lat,lon\n");
    for line in read(&stage, "truth.csv").lines().skip(1) {
        let numbers: Vec<f64> =
            line.split(',').skip(1).map(|number| number.parse().expect("a coordinate is a number")).collect();
        for (north, east) in [(0.0, 0.0), (0.3, 0.0), (-0.3, 0.0), (0.0, 0.3), (0.0, -0.3)] {
            let (latitude, longitude) =
                ((numbers[0] + north).clamp(-90.0, 90.0), (numbers[1] + east).clamp(-180.0, 180.0));
            writeln!(gallery, "{latitude},{longitude}").expect("writing to a string cannot fail");
        }
    }
    std::fs::write(stage.path().join("dense.csv"), gallery).expect("the test folder is writable");
    let answers = |neighbours: u32| {
        let set = format!("--set retrieval.gallery=dense.csv --set retrieval.knn_neighbours={neighbours}");
        stage.run(&format!("{set} eval --hybrid")).exits_with(ExitCode::Success);
        read(&stage, "predictions-retrieval.csv")
    };
    assert_eq!(answers(1), answers(32));
}

#[test]
fn even_prior_changes_votes_and_the_number_of_workers_does_not() {
    let stage = stage();
    // Half of the places of the test photos have 20 more gallery points around them.
    let mut gallery = String::from("lat,lon\n");
    for (at, line) in read(&stage, "truth.csv").lines().skip(1).enumerate() {
        let numbers: Vec<f64> =
            line.split(',').skip(1).map(|number| number.parse().expect("a coordinate is a number")).collect();
        for step in 0..if at % 2 == 0 { 21 } else { 1 } {
            writeln!(gallery, "{},{}", (numbers[0] + 0.02 * f64::from(step)).min(90.0), numbers[1])
                .expect("writing to a string cannot fail");
        }
    }
    std::fs::write(stage.path().join("uneven.csv"), gallery).expect("the test folder is writable");
    let answers = |prior: &str, workers: u32| {
        // With small scales, many points have a say.
        let scales = "--set retrieval.consensus_scale=0.05 --set retrieval.scale=0.05";
        let gallery = "--set retrieval.gallery=uneven.csv --set retrieval.radius_km=50";
        let set = format!("--json --workers {workers} {gallery} {scales} --set eval.prior={prior}");
        let found = stage.run(&format!("{set} eval --hybrid")).exits_with(ExitCode::Success).json();
        assert_eq!(found["prior"], prior);
        ["retrieval", "retrieval-consensus", "locdiff-h"]
            .map(|method| read(&stage, &format!("predictions-{method}.csv")))
    };
    let (training, even) = (answers("training", 1), answers("even", 1));
    assert_eq!(training[0], even[0], "the prior changed plain retrieval");
    assert!(training[1] != even[1] && training[2] != even[2], "the prior changed no vote");
    assert_eq!(even, answers("even", 2), "the number of workers changed an answer");
}

#[test]
fn geoclip_head_takes_clip_features_and_refuses_normalised_ones() {
    let stage = stage();
    build(&stage, "clip", 10.0);
    build(&stage, "unit", 1.0);
    let head = "--json --set retrieval.head=geoclip";
    let mut first = None;
    for (folder, files) in [("shards/clip", "shards/unit"), ("shards/clip/*.parquet", "shards/unit/*.parquet")] {
        let ran = stage.run(&format!("{head} --set shards.test={folder} eval --hybrid"));
        // The feature vectors of these photos say nothing about their places.
        ran.exits_with(ExitCode::Success).stderr_has("GeoCLIP does not recognise the places of these photos");
        let found = ran.stderr_has("GeoCLIP retrieval").json();
        assert_eq!((&found["data"]["is_simulated"], &found["data"]["head"]), (&false.into(), &"geoclip".into()));
        let answers = read(&stage, "predictions-retrieval.csv");
        assert_eq!(&answers, first.get_or_insert_with(|| answers.clone()), "{folder}");
        let ran = stage.run(&format!("{head} --set shards.test={files} eval --hybrid"));
        ran.exits_with(ExitCode::Config).stderr_has("mean length 1.000").stderr_has("seem to be normalised");
    }
    let ran = stage.run("--json --set retrieval.head=auto --set shards.test=shards/clip eval --hybrid");
    let found = ran.exits_with(ExitCode::Success).stderr_has("retrieval head: knn, because GeoCLIP does not").json();
    assert_eq!(found["data"]["head"], "knn", "{found}");
    // Different photos must not all get the same answer.
    let answers = first.expect("at least one evaluation ran");
    let places: std::collections::HashSet<&str> =
        answers.lines().skip(1).filter_map(|line| Some(line.split_once(',')?.1)).collect();
    assert!(places.len() > 1, "all photos got the same answer: {answers}");
}

/// Builds the shards `shards/{name}` with feature vectors of norm `length`.
fn build(stage: &Stage, name: &str, length: f64) {
    let (mut table, mut numbers) = (String::from("id,lat,lon\n"), Vec::new());
    for row in 0..40_usize {
        let (latitude, longitude) = small_shards::place(row);
        writeln!(table, "clip-{row},{latitude},{longitude}").expect("writing to a string cannot fail");
        let raw: Vec<f64> = (0..WIDTH).map(|index| ((row * 7919 + index * 104_729) % 1009) as f64 - 504.0).collect();
        let scale = length / raw.iter().map(|value| value * value).sum::<f64>().sqrt();
        numbers.extend(raw.iter().map(|value| (value * scale) as f32));
    }
    std::fs::write(stage.path().join("clip.csv"), table).expect("the test folder is writable");
    std::fs::write(stage.path().join("clip.npy"), small_shards::npy(&numbers, WIDTH)).expect("the folder is writable");
    let line = format!("--device cpu shards build --table clip.csv --embeddings clip.npy --out shards/{name}");
    stage.run(&line).exits_with(ExitCode::Success);
}
