//! Tests of evaluations that `eval` must refuse, and of the error messages.

use std::path::Path;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::stage;
use crate::small_shards;
use crate::stage::{Stage, Worker};

#[test]
fn missing_run_and_invalid_flags_are_explained() {
    let stage = Stage::new(Worker::Real);
    stage
        .run("--device cpu eval")
        .exits_with(ExitCode::NoData)
        .stderr_has("no runs in checkpoints")
        .stderr_has("train");
    stage
        .run("--device cpu eval --suite nonsense")
        .exits_with(ExitCode::Usage)
        .stderr_has("main")
        .stderr_has("perturbation");
    let ran = stage.run("--device cpu eval --tune --predictions x.csv");
    ran.exits_with(ExitCode::Usage).stderr_has("--predictions");
    let ran = stage.run("--device cpu eval --predictions x.csv --suite perturbation");
    ran.exits_with(ExitCode::Usage).stderr_has("--predictions").stderr_has("--suite");
    let help = stage.run("eval --help");
    assert!(help.stdout.contains("- generalizability:"), "{}", help.stdout);
}

#[test]
fn flags_that_a_suite_ignores_are_refused_by_name() {
    let stage = Stage::new(Worker::Real);
    for (line, want) in [
        ("main --runs a", "leave out --runs"),
        ("generative --grids 1000", "leave out --grids"),
        ("generalizability --hybrid --tune", "leave out --hybrid and --tune"),
        ("losses --runs a --exclude-km 1", "leave out --exclude-km"),
        ("degree --runs a --run b", "leave out --run"),
        ("gallery-bias --hybrid", "leave out --hybrid"),
        ("perturbation --run a", "leave out --run"),
        ("time --tune", "leave out --tune"),
        ("degree", "name them with --runs A,B,..."),
        ("losses --runs a,,b", "a value is required for '--runs"),
        ("generalizability --grids 5", "wanted 100 to 10000000"),
    ] {
        stage.run(&format!("--device cpu eval --suite {line}")).exits_with(ExitCode::Usage).stderr_has(want);
    }
    stage.run("eval --runs a,b").exits_with(ExitCode::Usage).stderr_has("--suite <NAME>");
}

#[test]
fn mismatched_data_and_settings_are_refused_with_the_reason() {
    let stage = stage();
    let ran = stage.run("--set shards.test=shards/nowhere eval");
    ran.exits_with(ExitCode::NoData).stderr_has("no shards at shards/nowhere (shards.test); shards/ has: test, train");
    std::fs::create_dir(stage.path().join("shards/empty")).expect("the parent folder exists");
    stage.run("--set shards.test=shards/empty eval").exits_with(ExitCode::NoData).stderr_has("shards/empty");
    std::fs::write(stage.path().join("narrow.csv"), "id,lat,lon\na,1,2\nb,3,4\n").expect("the test folder is writable");
    let mut narrow = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    narrow.extend(format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }").bytes());
    narrow.extend([1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|number| number.to_le_bytes()));
    std::fs::write(stage.path().join("narrow.npy"), narrow).expect("the test folder is writable");
    let build = "--device cpu shards build --table narrow.csv --embeddings narrow.npy --out shards/narrow";
    stage.run(build).exits_with(ExitCode::Success);
    let ran = stage.run("--set shards.test=shards/narrow eval");
    ran.exits_with(ExitCode::BadData).stderr_has("embeddings have 2 numbers").stderr_has("step-00000040 needs 12");
    let ran = stage.run("--set eval.guidance=1 --set diffusion.condition_drop=0.1 eval");
    ran.exits_with(ExitCode::Config).stderr_has("step-00000040 was trained with diffusion.condition_drop = 0");
    let ran = stage.run("--set eval.sampler_steps=500 --set diffusion.timesteps=1000 eval");
    ran.exits_with(ExitCode::Config).stderr_has("eval.sampler_steps is 500").stderr_has("diffusion.timesteps = 200");
    // 150 points are enough for the configured degree, 5, but too few for the degree of the checkpoint, 8.
    let ran = stage.run("--set model.degree=5 --set eval.refine=true --set eval.grid_points=150 eval");
    ran.exits_with(ExitCode::Config)
        .stderr_has("eval.grid_points is 150")
        .stderr_has("model.degree = 8")
        .stderr_has("at least 324");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/shards/bad_no_rows.parquet");
    let ran = stage.run(&format!("--set shards.test={} eval", golden.display()));
    ran.exits_with(ExitCode::NoData).stderr_has("bad_no_rows.parquet").stderr_has("no rows");
    let ran = stage.run("--set retrieval.head=linear eval --hybrid");
    ran.exits_with(ExitCode::Config)
        .stderr_has("retrieval.head = \"linear\" cannot be used with shards/test")
        .stderr_has("knn");
}

#[test]
fn gallery_with_a_bad_row_is_refused_and_the_row_is_named() {
    let stage = stage();
    for (name, row, want) in [("nan", "NaN,7", "row 1"), ("far", "91,7", "row 1"), ("text", "here,7", "row 1")] {
        let path = stage.path().join(format!("{name}.csv"));
        std::fs::write(&path, format!("lat,lon\n1,2\n{row}\n")).expect("the test folder is writable");
        let ran = stage.run(&format!("--set eval.anchors=gallery --set retrieval.gallery={name}.csv eval"));
        ran.exits_with(ExitCode::BadData).stderr_has(&format!("{name}.csv")).stderr_has(want);
    }
    // The names of gallery points are ignored, so they may be empty.
    std::fs::write(stage.path().join("nameless.csv"), "name,lat,lon\na,1,2\n,3,4\n").expect("the folder is writable");
    let ran = stage.run("--set eval.anchors=gallery --set retrieval.gallery=nameless.csv eval");
    ran.exits_with(ExitCode::Success);
}

#[test]
fn checkpoint_without_averaged_weights_is_refused() {
    let stage = stage();
    let path = stage.path().join("checkpoints/small/step-00000040/manifest.json");
    let bytes = std::fs::read(&path).expect("the checkpoint has a manifest");
    let mut manifest: Value = serde_json::from_slice(&bytes).expect("the manifest is valid JSON");
    let files = manifest["files"].as_array_mut().expect("a manifest lists files");
    files.retain(|file| !file["name"].as_str().is_some_and(|name| name.starts_with("ema")));
    std::fs::write(&path, manifest.to_string()).expect("the test folder is writable");
    let ran = stage.run("eval");
    ran.exits_with(ExitCode::BadData)
        .stderr_has("step-00000040 has no averaged weights")
        .stderr_has("ema-00-of-01.safetensors");
}

#[test]
fn settings_are_never_tuned_on_test_data() {
    let stage = stage();
    stage.run("eval --tune").exits_with(ExitCode::NoData).stderr_has("shards.validation");
    let ran = stage.run("--set shards.validation=shards/test eval --tune");
    ran.exits_with(ExitCode::BadData).stderr_has("have 150 photos in common");
    // A copy of the test shards under another name holds the same photos.
    small_shards::build(&stage, "copy", 1000..1150, 2, true);
    let ran = stage.run("--set shards.validation=shards/copy eval --tune");
    ran.exits_with(ExitCode::BadData).stderr_has("have 150 photos in common");
    // The same photos with a third view are found too, although the means over all views differ.
    small_shards::build(&stage, "more", 1000..1150, 3, true);
    let ran = stage.run("--set shards.mean_views=3 --set shards.validation=shards/more eval --tune");
    ran.exits_with(ExitCode::BadData).stderr_has("have 150 photos in common");
    // A glob that names the test shards is refused too, and so are shards that share only one photo with the test
    // shards.
    let ran = stage.run("--set shards.validation=shards/test/*.parquet eval --tune");
    ran.exits_with(ExitCode::BadData).stderr_has("have 150 photos in common");
    small_shards::build(&stage, "overlap", 1149..1250, 2, true);
    let ran = stage.run("--workers 2 --set shards.validation=shards/overlap eval --tune");
    ran.exits_with(ExitCode::BadData).stderr_has("have 1 photos in common");
    small_shards::build(&stage, "validation", 2000..2100, 2, true);
    let ran = stage.run("--json --workers 2 --set shards.validation=shards/validation eval --tune");
    ran.exits_with(ExitCode::Success);
    let path = stage.path().join("checkpoints/small/eval/tuned.toml");
    let tuned = std::fs::read_to_string(path).expect("`eval --tune` wrote the settings");
    assert!(
        tuned.starts_with("# tuned on 100 photos from shards/validation")
            && tuned.contains("\n# LocDiff-H, cross-validated ")
            && tuned.contains("[retrieval]\nhead = \"knn\""),
        "{tuned}"
    );
    let ran = stage.run("--json eval --hybrid");
    ran.exits_with(ExitCode::Success).stderr_has("  checkpoints/small/eval/tuned.toml\n  tuned on 100 photos");
    let setting = tuned.lines().nth(1).and_then(|line| line.strip_prefix("# ")).expect("the setting is in a comment");
    let unwrapped = ran.stderr.replace("\n    ", " ");
    assert!(unwrapped.contains(setting) && !unwrapped.contains("cross-validated"), "{}", ran.stderr);
    let path = stage.path().join("checkpoints/small/eval/report.txt");
    let report = std::fs::read_to_string(path).expect("`eval` wrote a report");
    for line in tuned.lines().filter(|line| line.contains(" = ")) {
        assert!(report.lines().any(|found| found == line), "{line} is not in the report");
    }
    // Settings that were tuned with another prior are not used, and a tuning with that prior leaves them alone.
    let ran = stage.run("--json --set eval.prior=even eval --hybrid");
    let said = ran.exits_with(ExitCode::Success).stderr.replace("\n  ", " ");
    assert!(said.contains("has not tuned this model with eval.prior = \"even\""), "{said}");
    let line = "--json --set shards.validation=shards/validation --set eval.prior=even eval --tune --hybrid";
    stage.run(line).exits_with(ExitCode::Success);
    let folder = stage.path().join("checkpoints/small/eval");
    assert_eq!(std::fs::read_to_string(folder.join("tuned.toml")).expect("the settings are kept"), tuned);
    assert!(folder.join("tuned-even.toml").exists());
    let ran = stage.run("--json --set eval.prior=even eval --hybrid");
    ran.exits_with(ExitCode::Success).stderr_has("  checkpoints/small/eval/tuned-even.toml\n  tuned on 100 photos");
    // Settings from the command line override tuned settings, both when `tuned.toml` is read and when `eval --tune`
    // chooses new settings.
    for flags in ["eval --hybrid", "--set shards.validation=shards/validation eval --tune --hybrid"] {
        stage.run(&format!("--json --set retrieval.radius_km=77 {flags}")).exits_with(ExitCode::Success);
        let path = stage.path().join("checkpoints/small/eval/report.txt");
        let report = std::fs::read_to_string(path).expect("`eval` wrote a report");
        assert!(report.contains("\nradius_km = 77.0\n"), "{flags}: {report}");
    }
    // Only settings with this value were tried.
    let tuned_again = std::fs::read_to_string(stage.path().join("checkpoints/small/eval/tuned.toml"));
    assert!(tuned_again.expect("`eval --tune` wrote the settings").contains("\nradius_km = 77.0\n"));
    // A mode from the command line keeps its own settings.
    let line = "--json --set retrieval.mode=any-sample --set shards.validation=shards/validation eval --tune --hybrid";
    stage.run(line).exits_with(ExitCode::Success);
    let report = std::fs::read_to_string(stage.path().join("checkpoints/small/eval/report.txt"));
    let report = report.expect("`eval` wrote a report");
    assert!(report.contains("\nmode = \"any-sample\"\n") && report.contains("\nradius_km = 2000.0\n"), "{report}");
    // Settings of a version in which they had another meaning are not used.
    let path = stage.path().join("checkpoints/small/eval/tuned.toml");
    let old = "[retrieval]\nhead = \"knn\"\nmode = \"fusion\"\nradius_km = 10.0\ndensity_weight = 8.0\n";
    let kept = std::fs::read_to_string(&path).expect("`eval --tune` wrote the settings");
    std::fs::write(&path, old).expect("the test folder is writable");
    let ran = stage.run("--json eval --hybrid");
    ran.exits_with(ExitCode::Success).stderr_has("because the tuned ones are from an older");
    std::fs::write(&path, kept).expect("the test folder is writable");
    // Settings that were tuned for another head are not used.
    let ran = stage.run("--json --set retrieval.head=geoclip eval --hybrid");
    ran.exits_with(ExitCode::Config).stderr_has("because the tuned ones are for another");
    // With `retrieval.head=auto`, tuning ignores the head in `tuned.toml` and chooses a head itself.
    let path = stage.path().join("checkpoints/small/eval/tuned.toml");
    std::fs::write(&path, tuned.replace("knn", "geoclip")).expect("the test folder is writable");
    let line = "--json --set shards.validation=shards/validation --set retrieval.head=auto eval --tune --hybrid";
    stage.run(line).exits_with(ExitCode::Success);
    let tuned = std::fs::read_to_string(path).expect("`eval --tune` wrote the settings");
    assert!(tuned.contains("\nhead = \"knn\"\n"), "{tuned}");
    let config = stage.path().join("checkpoints/small/config.toml");
    std::fs::copy(config, stage.path().join("own.toml")).expect("the run has a configuration");
    let ran = stage.run("--json --run small --config own.toml eval --hybrid");
    ran.exits_with(ExitCode::Success).stderr_has("using the settings of --config, not ");
}
