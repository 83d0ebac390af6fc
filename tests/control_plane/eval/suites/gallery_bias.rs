//! Tests of `eval --suite gallery-bias`, which counts gallery points near test places.

use locdiff_core::exit_code::ExitCode;
use locdiff_core::geo::{Place, fibonacci_grid};
use serde_json::Value;

use crate::small_shards;
use crate::stage::{Stage, Worker};

/// The computed percentages for the points `points` within 1 km, for 1, 10, 50 and 100 points.
fn percents(result: &Value, points: &str, key: &str) -> Vec<f64> {
    let rows = result["rows"].as_array().expect("the result has rows").iter();
    let own = rows.filter(|row| row["points"] == points && row["radius_km"] == 1.0 && row["source"] == "computed");
    own.map(|row| row[key].as_f64().expect("a computed row has all percentages")).collect()
}

#[test]
fn gallery_points_near_test_places_are_counted_in_both_ways() {
    let stage = Stage::new(Worker::Real);
    let write = |name: &str, text: &str| std::fs::write(stage.path().join(name), text).expect("the folder is writable");
    write("truth.csv", "path,lat,lon\na,0,0\nb,0,0\nc,10,10\nd,50,50\n");
    write("gallery.csv", &format!("lat,lon\n{}{}", "0,0.001\n".repeat(10), "10,10\n".repeat(11)));
    let suite = "--json --device cpu --set retrieval.gallery=gallery.csv";
    let ran = stage.run(&format!("{suite} --set eval.truth=truth.csv eval --suite gallery-bias"));
    let found = ran.exits_with(ExitCode::Success).json();
    assert_eq!(percents(&found, "gallery", "percent_at_least"), [75.0, 75.0, 0.0, 0.0]);
    assert_eq!(percents(&found, "gallery", "percent_more_than"), [75.0, 25.0, 0.0, 0.0]);
    assert_eq!(percents(&found, "gallery", "percent"), [75.0, 25.0, 0.0, 0.0]);
    assert_eq!(percents(&found, "grid", "percent_at_least"), [0.0; 4]);
    let place = Place::from(fibonacci_grid(21)[7]);
    write("grid.csv", &format!("path,lat,lon\na,{},{}\nb,0,0\n", place.latitude().0, place.longitude().0));
    let grid = stage.run(&format!("{suite} --set eval.truth=grid.csv eval --suite gallery-bias"));
    let grid = grid.exits_with(ExitCode::Success).json();
    assert_eq!(percents(&grid, "grid", "percent_at_least"), [50.0, 0.0, 0.0, 0.0]);
    assert_eq!(found["data"]["gallery_points"], 21);
    ran.stderr_has("4 photos of truth.csv").stderr_has("more than");

    // Without a truth file, a worker reads the places of the test shards.
    small_shards::build(&stage, "test", 1000..1150, 1, true);
    let ran = stage.run(&format!("{suite} --set shards.test=shards/test eval --suite gallery-bias"));
    assert_eq!(ran.exits_with(ExitCode::Success).json()["data"]["rows"], 150);

    write("gallery.csv", "lat,lon\n");
    let ran = stage.run(&format!("{suite} --set eval.truth=truth.csv eval --suite gallery-bias"));
    ran.exits_with(ExitCode::BadData).stderr_has("gallery.csv").stderr_has("has no rows");
    write("empty.csv", "path,lat,lon\n");
    let ran = stage.run(&format!("{suite} --set eval.truth=empty.csv eval --suite gallery-bias"));
    ran.exits_with(ExitCode::BadData).stderr_has("empty.csv").stderr_has("has no rows");
    let ran = stage.run(&format!("{suite} --set eval.truth=truth.csv eval --suite gallery-bias --exclude-km 1"));
    ran.exits_with(ExitCode::Usage).stderr_has("--exclude-km");
    let ran = stage.run("--device cpu --set eval.truth=truth.csv eval --suite gallery-bias");
    ran.exits_with(ExitCode::NoData).stderr_has("geoclip import");
    let ran = stage.run("--device cpu --set retrieval.gallery=none.csv eval --suite gallery-bias");
    ran.exits_with(ExitCode::Io).stderr_has("retrieval.gallery: no file at none.csv");
}
