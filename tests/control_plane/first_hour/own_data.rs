//! Tests of data that users bring: Parquet files with common column names, and paths that do not lead to shards.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::types::Float64Type;
use arrow_array::{ArrayRef, Float64Array, ListArray, RecordBatch, StringArray};
use locdiff_core::exit_code::ExitCode;
use parquet::arrow::ArrowWriter;

use crate::small_shards::{embedding, place};
use crate::stage::{Stage, Worker};

/// Settings for a model that trains in about a second. All other settings are those of the demo.
const SMALL: &str = "--device cpu --workers 2 --run mine --set model.degree=8 --set loss.anchors=64 --set train.global_batch=64 \
    --set train.steps=8 --set train.warmup_steps=0 --set eval.samples=2 --set eval.sampler_steps=2 \
    --set shards.train=photos/train.parquet --set shards.validation=photos/validation.parquet --set shards.test=photos/test.parquet";

/// Writes `photos/{name}.parquet` as pandas would. `path` gives the file name of each photo.
fn write(stage: &Stage, name: &str, rows: Range<usize>, path: impl Fn(usize) -> String) {
    let degrees = |degree: fn((f64, f64)) -> f64| -> ArrayRef {
        Arc::new(rows.clone().map(|row| degree(place(row))).collect::<Float64Array>())
    };
    let clip =
        rows.clone().map(|row| Some(embedding(row, 0).map(|number| Some(f64::from(number))).collect::<Vec<_>>()));
    let columns: [(&str, ArrayRef); 4] = [
        ("image_path", Arc::new(StringArray::from_iter_values(rows.clone().map(path)))),
        ("latitude", degrees(|place| place.0)),
        ("longitude", degrees(|place| place.1)),
        ("clip", Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(clip))),
    ];
    let batch = RecordBatch::try_from_iter(columns).expect("the columns have equal lengths");
    let folder = stage.path().join("photos");
    std::fs::create_dir_all(&folder).expect("the test folder is writable");
    let file = File::create(folder.join(format!("{name}.parquet"))).expect("the test folder is writable");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("the schema is valid");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be written");
}

#[test]
fn parquet_with_common_column_names_leads_to_a_table_without_configuration() {
    let stage = Stage::new(Worker::Real);
    let path = |row: usize| format!("img/{row}.jpg");
    for (name, rows) in [("train", 0..256), ("validation", 2000..2064), ("test", 1000..1080)] {
        write(&stage, name, rows, path);
    }
    let ran = stage.run("--device cpu shards inspect photos/train.parquet");
    ran.exits_with(ExitCode::Success);
    let columns = "columns       embedding = clip, id = image_path, latitude = latitude";
    assert!(ran.stdout.contains(columns), "{}", ran.stdout);

    let reason = "retrieval head: knn, because the embeddings have 12 numbers, and GeoCLIP's have 768";
    let ran = stage.run(&format!("{SMALL} --json train"));
    let evaluated = ran.exits_with(ExitCode::Success).stderr_has(reason).json()["eval"].clone();
    assert_eq!(evaluated["rows"].as_array().map(Vec::len), Some(4), "{evaluated}");
    let ran = stage.run("--run mine --device cpu eval --hybrid");
    ran.exits_with(ExitCode::Success);
    let shown = ran.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(shown.contains("with the retrieval head knn, checkpoint at step 8"), "{shown}");
    // The gallery consists of the places of the training photos.
    assert!(shown.contains("LocDiff chooses among 256 places"), "{shown}");
    for method in ["nearest training photos", "LocDiff (L = 8)", "LocDiff-H (L = 8)"] {
        assert!(ran.stdout.contains(method), "{}", ran.stdout);
    }
    let read = |name: &str| std::fs::read_to_string(stage.path().join("checkpoints/mine/eval").join(name));
    let truth = read("truth.csv").expect("`eval` writes `truth.csv`");
    assert!(truth.lines().nth(1).is_some_and(|line| line.starts_with("img/1000.jpg,")), "{truth}");
    assert_eq!(stage.run("--run mine --device cpu --json eval --hybrid").json()["data"]["head"], "knn");

    // If file names repeat, they cannot identify photos, so the row numbers are the identifiers.
    write(&stage, "test", 1000..1080, |row| format!("img/{}.jpg", row / 2));
    let warning = "duplicate identifier \"img/500.jpg\"";
    for line in ["shards verify photos/test.parquet", "--run mine eval"] {
        let ran = stage.run(&format!("--device cpu {line}"));
        ran.exits_with(ExitCode::Success).stderr_has(warning).stderr_has("row numbers are the identifiers");
    }
    let truth = read("truth.csv").expect("`eval` writes `truth.csv`");
    assert!(truth.lines().nth(1).is_some_and(|line| line.starts_with("0,")), "{truth}");
    let ran = stage.run("--device cpu --set shards.id_column=image_path shards verify photos/test.parquet");
    ran.exits_with(ExitCode::BadData).stderr_has(warning);
}

#[test]
fn wrong_data_is_explained_with_the_way_out() {
    let stage = Stage::new(Worker::Real);
    write(&stage, "train", 0..64, |row| row.to_string());
    std::fs::write(stage.path().join("photos/train.csv"), "id,lat,lon\na,1,2\n").expect("the folder is writable");
    let ran = stage.run("--device cpu --set shards.train=photos/train.csv train");
    ran.exits_with(ExitCode::BadData)
        .stderr_has("photos/train.csv (shards.train) is a table, not shards")
        .stderr_has("`locdiff-launch shards build --table photos/train.csv --embeddings FILE.npy --out DIR`");
    let only = "--device cpu --set shards.train=photos/train.parquet";
    let ran = stage.run(&format!("{only} --set shards.validation=photos/vali.parquet train"));
    ran.exits_with(ExitCode::NoData)
        .stderr_has("no shards at photos/vali.parquet (shards.validation); photos/ has: train.parquet");
    let ran = stage.run("--device cpu --set shards.embedding_column=vector shards inspect photos/train.parquet");
    ran.exits_with(ExitCode::BadData).stderr_has("column `vector`: not found; the file has image_path, latitude");
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/shards/bad_latitude.parquet");
    let ran = stage.run(&format!("--device cpu shards inspect {}", golden.display()));
    ran.exits_with(ExitCode::BadData)
        .stderr_has("latitude 91, wanted -90 to 90; set shards.on_bad_rows = \"skip\" to leave out such rows");
}

#[test]
fn table_is_split_without_a_worker_and_existing_parts_are_kept() {
    let stage = Stage::new(Worker::None);
    let line = |row: usize| format!("{row},{}.5,{}.5,someone-{}\n", row / 20, row % 20, row / 2);
    let table: String = (0..1000).map(line).collect();
    std::fs::write(stage.path().join("photos.csv"), format!("id,lat,lon,owner\n{table}"))
        .expect("the folder is writable");
    let split = |more: &str| stage.run(&format!("--json shards split photos.csv --out parts {more}"));
    let ran = split("--parts train=0.7,test=0.3 --seed 5");
    ran.exits_with(ExitCode::Success)
        .stderr_has("parts/train.csv: ")
        .stderr_has("because their author (column `owner`)");
    let json = ran.json();
    let count = |part: usize| json["parts"][part]["rows"].as_u64().expect("a part has a number of rows") as usize;
    assert_eq!(count(0) + count(1) + json["dropped"].as_u64().expect("a number") as usize, 1000);
    let text = std::fs::read_to_string(stage.path().join("parts/test.csv")).expect("the part was written");
    assert_eq!(text.lines().count(), count(1) + 1);
    assert!(text.lines().skip(1).all(|line| table.contains(&format!("{line}\n"))), "{text}");
    split("--parts train=0.7,test=0.3")
        .exits_with(ExitCode::Exists)
        .stderr_has("parts/train.csv exists; use --overwrite");
    split("--parts train=0.7,test=0.3 --seed 6 --overwrite").exits_with(ExitCode::Success);
    assert_ne!(std::fs::read_to_string(stage.path().join("parts/test.csv")).expect("the part was written"), text);
    for (more, code, part) in [
        ("--parts train=0.7,test=0.2", ExitCode::Usage, "--parts: the shares add up to 0.9000, wanted 1"),
        ("--parts train=0.5,train=0.5", ExitCode::Usage, "--parts: `train` is given twice"),
        ("--overwrite --author-column user", ExitCode::BadData, "no column `user` for the author; found: id, lat, lon"),
    ] {
        split(more).exits_with(code).stderr_has(part);
    }
    stage.run("shards split nothing.csv --out parts").exits_with(ExitCode::Io).stderr_has("no file at nothing.csv");
    let names: Vec<_> = std::fs::read_dir(stage.path().join("parts")).expect("the folder exists").flatten().collect();
    assert_eq!(names.len(), 2, "a temporary file is left: {names:?}");
}
