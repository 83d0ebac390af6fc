//! Tests of `predict --prior`.

use std::collections::BTreeMap;
use std::process::Stdio;

use arrow_array::cast::AsArray as _;
use arrow_array::types::{Float32Type, UInt8Type, UInt64Type};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::geo::{Degrees, Healpix, Km, Place, UnitVector};
use nix::sys::signal::Signal;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use super::super::support::stage;
use crate::small_shards;
use crate::stage::{Stage, eventually, signal, wait};

const WORLD: [f64; 4] = [-180.0, -90.0, 180.0, 90.0];

/// Writes a prior of one box: west, south, east, north.
fn write_box(stage: &Stage, name: &str, [west, south, east, north]: [f64; 4]) {
    let ring = json!([[west, south], [east, south], [east, north], [west, north], [west, south]]);
    write(stage, name, &json!({"type": "Polygon", "coordinates": [ring]}));
}

fn write(stage: &Stage, name: &str, prior: &Value) {
    std::fs::write(stage.path().join(name), prior.to_string()).expect("the test folder is writable");
}

/// Runs `predict` with these flags, and returns the file that it wrote.
#[track_caller]
fn predict(stage: &Stage, flags: &str) -> String {
    stage.run(&format!("{flags} --overwrite --out out.csv")).exits_with(ExitCode::Success);
    std::fs::read_to_string(stage.path().join("out.csv")).expect("the file was written")
}

/// All places of a CSV file that was written with `--samples`, row by row: the answer, the alternatives, the samples.
fn rows(text: &str) -> Vec<Vec<[f64; 2]>> {
    let row = |line: &str| {
        let number = |text: &str| text.parse::<f64>().expect("a coordinate is a number");
        let cells: Vec<&str> = line.splitn(7, ',').collect();
        assert_eq!((cells[3], cells[4]), ("", ""), "there is a radius: {line}");
        let mut found = vec![[number(cells[1]), number(cells[2])]];
        let lists = cells[6].replace("\"\"", "\"").replace("\"[", "[").replace("]\"", "]");
        let lists: Vec<Value> = serde_json::Deserializer::from_str(&lists.replacen("],[", "]\n[", 1))
            .into_iter::<Value>()
            .map(|list| list.expect("a list is valid JSON"))
            .collect();
        let both = |one: &Value, other: &Value| [one, other].map(|value| value.as_f64().expect("a coordinate"));
        found.extend(lists[0].as_array().into_iter().flatten().map(|one| both(&one["lat"], &one["lon"])));
        found.extend(lists[1].as_array().into_iter().flatten().map(|one| both(&one[0], &one[1])));
        found
    };
    text.lines().skip(1).map(row).collect()
}

fn vector([latitude, longitude]: [f64; 2]) -> UnitVector {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid").into()
}

/// Whether a place lies in a box, up to the rounding of the file.
fn is_in([latitude, longitude]: [f64; 2], [west, south, east, north]: [f64; 4]) -> bool {
    let slack = 1e-7;
    let is_east = if west <= east {
        (west - slack..=east + slack).contains(&longitude)
    } else {
        longitude >= west - slack || longitude <= east + slack
    };
    is_east && (south - slack..=north + slack).contains(&latitude)
}

/// Without a prior, with a prior that is the same everywhere, and with regions of several sizes; one and more workers;
/// LocDiff and LocDiff-H; with and without refinement.
#[test]
fn answers_lie_in_the_prior_and_an_even_prior_changes_nothing() {
    let stage = stage();
    write_box(&stage, "world.geojson", WORLD);
    // Large, across the date line, smaller than a cell of a density, and without any training photo.
    let regions =
        [[-20.0, 30.0, 60.0, 75.0], [160.0, -50.0, -150.0, 10.0], [7.0, 46.0, 7.01, 46.01], [0.0, -90.0, 90.0, -86.0]];
    for (number, region) in regions.iter().enumerate() {
        write_box(&stage, &format!("{number}.geojson"), *region);
    }
    for (flags, tried) in [
        ("predict shards/test --samples", &[0, 1, 2, 3][..]),
        ("predict shards/test --samples --hybrid", &[1, 2]),
        ("--set eval.refine=true predict shards/test --samples", &[1, 2]),
    ] {
        let without = predict(&stage, flags);
        assert_eq!(without, predict(&stage, &format!("{flags} --prior world.geojson")), "{flags}");
        for number in tried {
            let region = regions[*number];
            let first = predict(&stage, &format!("{flags} --prior {number}.geojson"));
            assert_ne!(first, without);
            for row in rows(&first) {
                assert!(row.iter().all(|place| is_in(*place, region)), "{flags}: {row:?} is not in {region:?}");
            }
        }
    }
    let flags = "predict shards/test --samples --hybrid --prior 1.geojson";
    let first = predict(&stage, flags);
    for workers in [2, 4] {
        assert_eq!(predict(&stage, &format!("--workers {workers} {flags}")), first, "{workers} workers");
    }
    // In any company, an answer is the same.
    small_shards::build(&stage, "alone", 1010..1013, 1, false);
    small_shards::build(&stage, "many", 1000..1100, 1, false);
    let [alone, many] =
        ["alone", "many"].map(|name| predict(&stage, &format!("predict shards/{name} --prior 1.geojson")));
    assert_eq!(alone.lines().skip(1).collect::<Vec<_>>(), many.lines().skip(11).take(3).collect::<Vec<_>>());
}

#[test]
fn prior_moves_answers_to_where_the_density_and_the_prior_are_large() {
    let stage = stage();
    small_shards::build(&stage, "many", 1000..1100, 1, false);
    let answers = |flags: &str| -> Vec<UnitVector> {
        let text = predict(&stage, &format!("predict shards/many --samples {flags}"));
        rows(&text).iter().map(|row| vector(row[0])).collect()
    };
    let without = answers("");
    // Half of the sphere, and the other half: one of them has the answer, and the other moves it.
    write_box(&stage, "east.geojson", [0.0, -90.0, 180.0, 90.0]);
    write_box(&stage, "west.geojson", [-180.0, -90.0, 0.0, 90.0]);
    let halves = ["east", "west"].map(|half| answers(&format!("--prior {half}.geojson")));
    let mut kept = 0;
    for (row, own) in without.iter().enumerate() {
        let longitude = Place::from(*own).longitude().0;
        let [same, other] = [longitude < 0.0, longitude >= 0.0].map(|is_west| &halves[usize::from(is_west)][row]);
        kept += usize::from(own.distance(*same).0 < 1500.0);
        // An answer on the meridian that both halves have may stay.
        let is_in_both = longitude.abs() < 1e-6 || longitude.abs() > 180.0 - 1e-6;
        assert!(is_in_both || own.distance(*other).0 > 0.0, "row {row}: the answer stayed where the prior is 0");
    }
    assert!(kept >= 80, "only {kept} of 100 answers stayed");
    // Of two boxes, the much heavier one has the answers.
    let features = [(1.0, [-60.0, -40.0, -20.0, 0.0]), (1e-12, [20.0, 0.0, 60.0, 40.0])].map(|(weight, bounds)| {
        let [west, south, east, north]: [f64; 4] = bounds;
        let ring = json!([[west, south], [east, south], [east, north], [west, north], [west, south]]);
        let geometry = json!({"type": "Polygon", "coordinates": [ring]});
        json!({"type": "Feature", "properties": {"weight": weight}, "geometry": geometry})
    });
    write(&stage, "two.geojson", &json!({"type": "FeatureCollection", "features": features}));
    let heavy = answers("--prior two.geojson").iter().filter(|place| Place::from(**place).longitude().0 < 0.0).count();
    assert_eq!(heavy, 100);
    // Around a track, the answers are near it: most of a prior's mass lies within two widths.
    let track = json!({"type": "LineString", "coordinates": [[-120, 40], [-90, 35], [-60, 0], [-65, -40]]});
    let feature = json!({"type": "Feature", "properties": {"width_km": 30}, "geometry": track});
    write(&stage, "track.geojson", &feature);
    let line: Vec<UnitVector> = [[40.0, -120.0], [35.0, -90.0], [0.0, -60.0], [-40.0, -65.0]].map(vector).to_vec();
    let near = |place: &UnitVector, km: f64| {
        line.windows(2).any(|pair| {
            (0..=300).any(|step| {
                let share = f64::from(step) / 300.0;
                let on = std::array::from_fn(|axis| (1.0 - share) * pair[0].xyz()[axis] + share * pair[1].xyz()[axis]);
                UnitVector::new(on).expect("the points are no antipodes").distance(*place) < Km(km)
            })
        })
    };
    let found = answers("--prior track.geojson");
    assert!(found.iter().all(|place| near(place, 185.0)), "an answer is more than six widths from the track");
    let close = found.iter().filter(|place| near(place, 65.0)).count();
    assert!(close >= 90, "only {close} of 100 answers are within two widths of the track");
}

#[test]
fn another_prior_is_refused_when_a_prediction_is_resumed_and_the_same_contents_are_not() {
    let stage = stage();
    small_shards::build(&stage, "many", 1000..2500, 1, false);
    write_box(&stage, "a.geojson", [-20.0, 30.0, 60.0, 75.0]);
    write_box(&stage, "b.geojson", [-20.0, 30.0, 60.0, 74.0]);
    std::fs::copy(stage.path().join("a.geojson"), stage.path().join("same.geojson")).expect("the file can be copied");
    stage.run("predict shards/many --prior a.geojson --out whole.csv").exits_with(ExitCode::Success);
    let mut command = stage.command("predict shards/many --prior a.geojson --out out.csv");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can start");
    let partial = stage.path().join("out.csv.partial");
    eventually("a piece is complete", || partial.join("piece-00000000").exists());
    signal(child.id(), Signal::SIGKILL);
    wait(&mut child);
    assert!(!stage.path().join("out.csv").exists(), "the prediction ended before it was killed");
    for other in ["--prior b.geojson", ""] {
        let ran = stage.run(&format!("predict shards/many {other} --out out.csv"));
        ran.exits_with(ExitCode::Exists).stderr_has("another value of `prior`");
    }
    let ran = stage.run("predict shards/many --prior same.geojson --out out.csv");
    assert!(ran.exits_with(ExitCode::Success).stdout.contains("resuming: "), "{}", ran.stdout);
    let [whole, resumed] = ["whole.csv", "out.csv"].map(|name| std::fs::read(stage.path().join(name)));
    assert!(whole.expect("the file was written") == resumed.expect("the file was written"), "the answers differ");
    assert!(!partial.exists());
}

#[test]
fn bad_priors_and_settings_are_refused_before_anything_is_written() {
    let stage = stage();
    let refused = |flags: &str, code: ExitCode, words: &str| {
        stage.run(&format!("{flags} --out a.csv")).exits_with(code).stderr_has(words);
        assert!(!stage.path().join("a.csv.partial").exists(), "{flags}: a refused command left a folder");
    };
    write(&stage, "swapped.geojson", &json!({"type": "Point", "coordinates": [35.6, 139.7]}));
    write_box(&stage, "good.geojson", [0.0, 0.0, 10.0, 10.0]);
    std::fs::write(stage.path().join("empty.geojson"), "").expect("the test folder is writable");
    let predict = "predict shards/test --prior";
    refused(
        &format!("{predict} swapped.geojson"),
        ExitCode::BadData,
        "--prior: swapped.geojson: feature 0: geometry.coordinates: latitude is 139.7, wanted -90 to 90; GeoJSON",
    );
    refused(&format!("{predict} empty.geojson"), ExitCode::BadData, "empty.geojson: the file is empty");
    refused(
        &format!("{predict} godo.geojson"),
        ExitCode::Io,
        "--prior: no file at godo.geojson; did you mean good.geo",
    );
    refused(&format!("{predict} shards"), ExitCode::Io, "shards is a folder");
    refused(
        &format!("--set eval.neighbourhood_km=50 {predict} good.geojson"),
        ExitCode::Config,
        "eval.neighbourhood_km",
    );
    refused(&format!("--set eval.aggregator=mixture {predict} good.geojson"), ExitCode::Config, "posterior-medoid");
}

/// The cells of each photo in a file of densities, with their probabilities.
fn densities(stage: &Stage, name: &str) -> BTreeMap<String, Vec<(u32, u64, f64)>> {
    let file = std::fs::File::open(stage.path().join(name)).expect("the file was written");
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
    let mut found: BTreeMap<String, Vec<(u32, u64, f64)>> = BTreeMap::new();
    for batch in reader.expect("the file is valid Parquet") {
        let batch = batch.expect("the file is valid Parquet");
        let (ids, orders) = (batch.column(0).as_string::<i32>(), batch.column(1).as_primitive::<UInt8Type>());
        let (cells, shares) =
            (batch.column(2).as_primitive::<UInt64Type>(), batch.column(3).as_primitive::<Float32Type>());
        for row in 0..batch.num_rows() {
            let cell = (u32::from(orders.value(row)), cells.value(row), f64::from(shares.value(row)));
            found.entry(ids.value(row).to_owned()).or_default().push(cell);
        }
    }
    found
}

#[test]
fn densities_are_multiplied_by_the_prior_and_radii_are_left_out() {
    let stage = stage();
    small_shards::build(&stage, "validation", 4000..4400, 1, false);
    stage.run("--set shards.validation=shards/validation eval --calibrate").exits_with(ExitCode::Success);
    let region = [-20.0, 30.0, 60.0, 75.0];
    write_box(&stage, "world.geojson", WORLD);
    write_box(&stage, "region.geojson", region);
    write_box(&stage, "tiny.geojson", [7.0, 46.0, 7.01, 46.01]);
    for name in ["none", "world", "region", "tiny"] {
        let prior = if name == "none" { String::new() } else { format!("--prior {name}.geojson") };
        let line = format!("--json predict shards/test {prior} --out {name}.csv --density {name}.parquet");
        let ran = stage.run(&line);
        assert_eq!(ran.exits_with(ExitCode::Success).json()["calibrated"], name == "none");
        if name != "none" {
            ran.stderr_has("the answers have no radii, because radii are measured without a prior");
        }
    }
    let [none, world, inside, tiny] =
        ["none", "world", "region", "tiny"].map(|name| densities(&stage, &format!("{name}.parquet")));
    for (id, own) in &none {
        for (one, other) in own.iter().zip(&world[id]) {
            assert!((one.0, one.1) == (other.0, other.1) && (one.2 - other.2).abs() < 1e-6, "{id}: {one:?}, {other:?}");
        }
        for found in [&inside[id], &tiny[id]] {
            let sum: f64 = found.iter().map(|(_, _, share)| share).sum();
            assert!((sum - 1.0).abs() < 1e-4, "{id}: the probabilities add up to {sum}");
        }
        let outside = |(order, cell, share): &&(u32, u64, f64)| {
            let centre = Place::from(Healpix::new(*order).centre(*cell));
            // A cell of the finest order is 7 degrees wide, so its centre may lie outside while a part of it is inside.
            let [west, south, east, north] = region;
            *share > 0.0
                && *order >= 3
                && !is_in(
                    [centre.latitude().0, centre.longitude().0],
                    [west - 12.0, south - 5.0, east + 12.0, north + 5.0],
                )
        };
        assert_eq!(inside[id].iter().find(outside), None, "{id}");
        // One cell of a density has all of a region that is smaller.
        assert_eq!(tiny[id].iter().filter(|(_, _, share)| *share > 0.0).count(), 1, "{id}");
    }
}
