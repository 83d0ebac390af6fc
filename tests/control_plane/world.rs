//! Tests of `geoclip import`, `shards simulate` and `shards grid` with the real binaries and GeoCLIP's real weights.

use locdiff_core::exit_code::ExitCode;

use crate::nodes::{bytes, with_a_killed_node};
use crate::stage::{Stage, Worker, wheel};

#[test]
fn weights_are_imported_and_photos_simulated() {
    let stage = Stage::new(Worker::Real);
    let simulate = "shards simulate --rows 300 --views 2 --seed 5 --out out --json --device cpu";
    stage.run(simulate).exits_with(ExitCode::NoData).stderr_has("locdiff-launch geoclip import --out shards/geoclip");
    assert!(!stage.path().join("out").exists());

    let import = format!("geoclip import --json --device cpu --wheel {}", wheel().display());
    let imported = stage.run(&import);
    assert_eq!(imported.exits_with(ExitCode::Success).json()["out"], "shards/geoclip");
    assert_eq!(imported.json()["written"], true);
    let again = stage.run(&import);
    again.exits_with(ExitCode::Success).stderr_has("shards/geoclip already has these weights");
    assert_eq!(again.json()["written"], false);
    let gallery = stage.path().join("shards/geoclip/gallery.csv");
    let whole = std::fs::read_to_string(&gallery).expect("the gallery was imported");
    std::fs::write(&gallery, &whole[1..]).expect("the test folder is writable");
    stage.run(&import).exits_with(ExitCode::Exists).stderr_has("--overwrite");
    std::fs::write(&gallery, whole).expect("the test folder is writable");
    std::fs::write(stage.path().join("bad.whl"), "PK").expect("the test folder is writable");
    stage
        .run("geoclip import --out other --wheel bad.whl --device cpu")
        .exits_with(ExitCode::Corrupt)
        .stderr_has("sha256");
    assert!(!stage.path().join("other").exists());

    let ran = stage.run(simulate);
    let made = ran.exits_with(ExitCode::Success).json();
    assert_eq!((&made["ok"], &made["rows"], &made["views"]), (&true.into(), &300.into(), &2.into()), "{made}");
    assert!(stage.path().join("out/manifest.json").exists());
    stage.run(simulate).exits_with(ExitCode::Exists).stderr_has("out exists");
}

#[test]
fn import_without_network_suggests_a_local_wheel() {
    let stage = Stage::new(Worker::None);
    let ran = stage.command("geoclip import").env("PIP_NO_INDEX", "1").env("PIP_CONFIG_FILE", "/dev/null").output();
    let ran = crate::stage::Ran::from(ran.expect("the launcher can be started"));
    ran.exits_with(ExitCode::NoData).stderr_has("cannot download geoclip==1.3.0: pip says: ").stderr_has("--wheel");
}

#[test]
fn grid_covers_the_land_beside_the_places_of_a_list() {
    let stage = Stage::new(Worker::None);
    stage.run("shards grid --out grid.csv").exits_with(ExitCode::NoData).stderr_has("locdiff-launch geoclip import");
    std::fs::write(stage.path().join("list.csv"), "id,lat,lon\na,0.5,-30\n").expect("the test folder is writable");
    let grid = "shards grid --coordinates list.csv --spacing-km 200 --out grid.csv --json";
    let made = stage.run(grid).exits_with(ExitCode::Success).json();
    // Land covers 149 million km², and each point stands for 40,000 km².
    let points = made["grid_points"].as_u64().expect("the number of points is reported");
    assert!((3500..3950).contains(&points), "{points} points on land, wanted about 3,725");
    let places = locdiff_core::tables::read_places(&stage.path().join("grid.csv")).expect("the file is a gallery");
    assert_eq!((places.len() as u64, places[0].longitude().0), (points + 1, -30.0));
    stage.run(grid).exits_with(ExitCode::Exists).stderr_has("--overwrite");
    stage.run("shards grid --spacing-km 1 --out x").exits_with(ExitCode::Usage).stderr_has("wanted a number from 5 to");
    stage.run("shards simulate --cells 1 --out x").exits_with(ExitCode::Usage).stderr_has("--part");
}

/// Each node simulates some of the files. The files that node 0 has simulated are kept.
#[test]
fn node_killed_during_a_simulation_changes_no_byte() {
    let stage = Stage::with_geoclip();
    let settings = "--device cpu --json shards simulate --rows 4500 --rows-per-file 1024 --seed 5";
    stage.run(&format!("--workers 2 {settings} --out one")).exits_with(ExitCode::Success);
    for (comes_back, out) in [(true, "two"), (false, "three")] {
        let line = format!("--workers 1 --set supervise.node_patience_s=4 {settings} --out {out}");
        let log = with_a_killed_node(&stage, &line, comes_back);
        assert!(log.contains("3 files are simulated already"), "{log}");
        let [got, want] = [out, "one"].map(|folder| {
            let manifest = std::fs::read(stage.path().join(folder).join("manifest.json")).expect("it has a manifest");
            (bytes(&stage.path().join(folder)), manifest)
        });
        assert!(got == want && got.0.len() == 5, "{out}: {:?}", got.0.keys());
    }
    let left = std::fs::read_dir(stage.path()).expect("the folder exists").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("pieces")), "{left:?}");
}
