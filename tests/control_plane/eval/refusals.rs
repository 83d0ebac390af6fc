//! What cannot be evaluated, and what is said of it.

use std::path::Path;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::stage;
use crate::small_shards;
use crate::stage::{Stage, Worker};

#[test]
fn no_run_and_no_suite_are_named() {
    let stage = Stage::new(Worker::Real);
    stage.run("--device cpu eval").ends_with(ExitCode::NoData).says("no runs in checkpoints").says("train");
    stage.run("--device cpu eval --suite nonsense").ends_with(ExitCode::Usage).says("main").says("perturbation");
    let ran = stage.run("--device cpu eval --tune --predictions x.csv");
    ran.ends_with(ExitCode::Usage).says("--predictions");
    let ran = stage.run("--device cpu eval --predictions x.csv --suite perturbation");
    ran.ends_with(ExitCode::Usage).says("--predictions").says("--suite");
    let help = stage.run("eval --help");
    assert!(help.stdout.contains("main or perturbation") && !help.stdout.contains("gallery-bias"), "{}", help.stdout);
}

#[test]
fn data_that_do_not_fit_are_refused_with_the_reason() {
    let stage = stage();
    let ran = stage.run("--set shards.test=shards/nowhere eval");
    ran.ends_with(ExitCode::NoData).says("shards/nowhere").says("shards simulate");
    std::fs::create_dir(stage.path().join("shards/empty")).expect("made");
    stage.run("--set shards.test=shards/empty eval").ends_with(ExitCode::NoData).says("shards/empty");
    std::fs::write(stage.path().join("narrow.csv"), "id,lat,lon\na,1,2\nb,3,4\n").expect("written");
    let mut narrow = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    narrow.extend(format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }").bytes());
    narrow.extend([1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|number| number.to_le_bytes()));
    std::fs::write(stage.path().join("narrow.npy"), narrow).expect("written");
    let build = "--device cpu shards build --table narrow.csv --embeddings narrow.npy --out shards/narrow";
    stage.run(build).ends_with(ExitCode::Success);
    let ran = stage.run("--set shards.test=shards/narrow eval");
    ran.ends_with(ExitCode::BadData).says("embeddings have 2 numbers").says("trained on 12");
    let ran = stage.run("--set eval.guidance=1 --set diffusion.condition_drop=0.1 eval");
    ran.ends_with(ExitCode::Config).says("step-00000040 was trained with diffusion.condition_drop = 0");
    let ran = stage.run("--set eval.sampler_steps=500 --set diffusion.timesteps=1000 eval");
    ran.ends_with(ExitCode::Config).says("eval.sampler_steps is 500").says("diffusion.timesteps = 200");
    // Enough for the degree that is configured, too few for that of the checkpoint.
    let ran = stage.run("--set model.degree=5 --set eval.refine=true --set eval.grid_points=150 eval");
    ran.ends_with(ExitCode::Config).says("eval.grid_points is 150").says("model.degree is 8").says("at least 324");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/shards/bad_no_rows.parquet");
    let ran = stage.run(&format!("--set shards.test={} eval", golden.display()));
    ran.ends_with(ExitCode::NoData).says("bad_no_rows.parquet").says("no rows");
    let ran = stage.run("--set retrieval.head=linear eval --hybrid");
    ran.ends_with(ExitCode::Config).says("retrieval.head = \"linear\" does not fit shards/test").says("knn");
}

#[test]
fn gallery_with_a_bad_row_is_refused_and_the_row_named() {
    let stage = stage();
    for (name, row, want) in [("nan", "NaN,7", "row 1"), ("far", "91,7", "row 1"), ("text", "here,7", "row 1")] {
        let path = stage.path().join(format!("{name}.csv"));
        std::fs::write(&path, format!("lat,lon\n1,2\n{row}\n")).expect("written");
        let ran = stage.run(&format!("--set eval.anchors=gallery --set retrieval.gallery={name}.csv eval"));
        ran.ends_with(ExitCode::BadData).says(&format!("{name}.csv")).says(want);
    }
    // What the points of a gallery are called, or that they are not, does not matter.
    std::fs::write(stage.path().join("nameless.csv"), "name,lat,lon\na,1,2\n,3,4\n").expect("written");
    let ran = stage.run("--set eval.anchors=gallery --set retrieval.gallery=nameless.csv eval");
    ran.ends_with(ExitCode::Success);
}

#[test]
fn checkpoint_without_averaged_weights_is_refused() {
    let stage = stage();
    let path = stage.path().join("checkpoints/small/step-00000040/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).expect("a manifest")).expect("JSON");
    let files = manifest["files"].as_array_mut().expect("files");
    files.retain(|file| !file["name"].as_str().is_some_and(|name| name.starts_with("ema")));
    std::fs::write(&path, manifest.to_string()).expect("written");
    let ran = stage.run("eval");
    ran.ends_with(ExitCode::BadData).says("step-00000040 has no averaged weights").says("ema-00-of-01.safetensors");
}

#[test]
fn settings_are_never_chosen_on_what_they_are_tested_on() {
    let stage = stage();
    stage.run("eval --tune").ends_with(ExitCode::NoData).says("shards.validation");
    let ran = stage.run("--set shards.validation=shards/test eval --tune");
    ran.ends_with(ExitCode::BadData).says("hold 150 photos in common");
    // A copy under another name is the same data.
    small_shards::build(&stage, "copy", 1000..1150, 2, true);
    let ran = stage.run("--set shards.validation=shards/copy eval --tune");
    ran.ends_with(ExitCode::BadData).says("hold 150 photos in common");
    // Its files are, and so are shards with one of its photos.
    let ran = stage.run("--set shards.validation=shards/test/*.parquet eval --tune");
    ran.ends_with(ExitCode::BadData).says("hold 150 photos in common");
    small_shards::build(&stage, "overlap", 1149..1250, 2, true);
    let ran = stage.run("--workers 2 --set shards.validation=shards/overlap eval --tune");
    ran.ends_with(ExitCode::BadData).says("hold 1 photos in common");
    small_shards::build(&stage, "validation", 2000..2100, 2, true);
    let ran = stage.run("--json --workers 2 --set shards.validation=shards/validation eval --tune");
    ran.ends_with(ExitCode::Success);
    let tuned = std::fs::read_to_string(stage.path().join("checkpoints/small/eval/tuned.toml")).expect("settings");
    assert!(
        tuned.starts_with("# tuned on 100 photos of shards/validation") && tuned.contains("[retrieval]"),
        "{tuned}"
    );
    let ran = stage.run("--json eval --hybrid");
    ran.ends_with(ExitCode::Success).says("settings of checkpoints/small/eval/tuned.toml (tuned on 100 photos");
    let report = std::fs::read_to_string(stage.path().join("checkpoints/small/eval/report.txt")).expect("a report");
    for line in tuned.lines().filter(|line| line.contains(" = ")) {
        assert!(report.lines().any(|said| said == line), "{line} is not in the report");
    }
    // What the command line says stays, beside a file of settings and while they are chosen.
    for flags in ["eval --hybrid", "--set shards.validation=shards/validation eval --tune --hybrid"] {
        stage.run(&format!("--json --set retrieval.radius_km=77 {flags}")).ends_with(ExitCode::Success);
        let report = std::fs::read_to_string(stage.path().join("checkpoints/small/eval/report.txt")).expect("a report");
        assert!(report.contains("\nradius_km = 77.0\n"), "{flags}: {report}");
    }
    std::fs::copy(stage.path().join("checkpoints/small/config.toml"), stage.path().join("own.toml")).expect("copied");
    let ran = stage.run("--json --run small --config own.toml eval --hybrid");
    ran.ends_with(ExitCode::Success).says("tuned.toml is not used with it");
}
