//! Tests of reports: their content, hostile text in the files of a run, and the page in a browser.

use std::path::Path;

use locdiff_core::exit_code::ExitCode;
use locdiff_core::geo::{Degrees, Healpix, Place, UnitVector, order_and_cell};
use locdiff_core::tables::read_places;
use serde_json::{Value, json};

use super::support::{browse, folder, row, stage};
use crate::stage::{Stage, Worker};

/// Text that would be markup, code or the end of its element if it were not escaped.
const HOSTILE: &str = "</script><img src=x onerror=document.title='hacked'>|`<!--\u{2028}&lt;";

fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn write(folder: &Path, files: &[(&str, String)]) {
    std::fs::create_dir_all(folder.join("eval")).expect("the test folder is writable");
    for (name, text) in files {
        std::fs::write(folder.join(name), text).expect("the test folder is writable");
    }
}

/// Copies the files of a run, without its checkpoints and logs.
fn copy_run(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.join("eval")).expect("the test folder is writable");
    for folder in ["", "eval"] {
        for entry in std::fs::read_dir(from.join(folder)).expect("the run has a folder").flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), to.join(folder).join(entry.file_name())).expect("the file can be copied");
            }
        }
    }
}

#[test]
fn evaluation_leaves_a_report_and_several_runs_are_compared() {
    let stage = stage();
    let ran = stage.run("--json --device cpu eval --hybrid --suite main");
    let table = ran.exits_with(ExitCode::Success).json();
    ran.stderr_has("page:\n  checkpoints/small/eval/report.html");
    let found = read_json(&folder(&stage).join("report.json"));
    let published = |row: &&Value| row["source"] == "published";
    let rows = found["rows"].as_array().expect("the report has rows");
    let of_paper = table["rows"].as_array().expect("the table has rows").iter().filter(published).count();
    assert!(of_paper > 0 && rows.iter().filter(published).count() == of_paper, "published rows are missing");
    for method in ["retrieval", "locdiff", "locdiff-h"] {
        let want = row(&table, method);
        assert_eq!(row(&found, method)["acc_200km"], want["acc_200km"]);
        // The error curve passes through the numbers of the table, with the same intervals.
        let systems = found["systems"].as_array().expect("the report has systems");
        let system = systems.iter().find(|system| system["method"] == method).expect("the method has a curve");
        let km = found["curve_km"].as_array().expect("the curve has distances");
        let at = km.iter().position(|km| *km == 200.0).expect("the curve has the thresholds of the table");
        for (key, part) in [("acc_200km", "percent"), ("acc_200km_lo", "lo"), ("acc_200km_hi", "hi")] {
            let [got, want] = [&system[part][at], &want[key]].map(|value| value.as_f64().expect("it is a number"));
            assert!((got - want).abs() < 1e-3, "{method} {key}: {got} instead of {want}");
        }
        assert_eq!(system["answers"].as_array().map(Vec::len), Some(300), "not two numbers per photo");
    }
    assert_eq!(found["training"][0]["curves"]["loss/total"].as_array().map(Vec::is_empty), Some(false), "no curve");
    let markdown = std::fs::read_to_string(folder(&stage).join("report.md")).expect("the report has Markdown");
    assert!(markdown.contains("\n## Paired differences\n") && markdown.contains("\n| published: "), "{markdown}");

    // The verb writes the same files from the files of the evaluation alone.
    let page = folder(&stage).join("report.html");
    let before = std::fs::read(&page).expect("the report has a page");
    std::fs::remove_file(&page).expect("the test folder is writable");
    let ran = stage.run("--json report small");
    let (want, got) = (&table["rows"][0]["acc_25km"], &ran.exits_with(ExitCode::Success).json()["rows"][0]["acc_25km"]);
    assert_eq!(want, got);
    assert!(std::fs::read(&page).expect("the page was written again") == before, "the page differs");

    let other = stage.path().join("checkpoints/other");
    copy_run(&stage.path().join("checkpoints/small"), &other);
    let config = std::fs::read_to_string(other.join("config.toml")).expect("the run has a configuration");
    std::fs::write(other.join("config.toml"), config.replace("steps = 40", "steps = 41")).expect("it is writable");
    // In the other run, LocDiff-H gives the answers of retrieval.
    std::fs::copy(other.join("eval/predictions-retrieval.csv"), other.join("eval/predictions-locdiff-h.csv"))
        .expect("the file can be copied");
    stage.run("report small other").exits_with(ExitCode::Success);
    let both = read_json(&stage.path().join("report/report.json"));
    let compared = both["between_runs"].as_array().expect("the report compares the runs");
    let difference = |method: &str| {
        let row = compared.iter().find(|row| row["method"] == method).expect("both runs have the method");
        assert_eq!((&row["run"], &row["less"]), (&json!("other"), &json!("small")));
        row["geo_score"].as_f64().expect("it is a number")
    };
    let want =
        ["retrieval", "locdiff-h"].map(|method| row(&table, method)["geo_score"].as_f64().expect("it is a number"));
    assert_eq!(difference("locdiff"), 0.0);
    assert!((difference("locdiff-h") - (want[0] - want[1])).abs() < 1e-6, "{both}");
    assert_eq!(both["settings"], json!([{ "key": "train.steps", "values": ["40", "41"] }]));
    assert_eq!(both["photo_sets"].as_array().map(Vec::len), Some(1), "the runs located the same photos");
    stage.run("report small other").exits_with(ExitCode::Exists).stderr_has("report exists; use --overwrite");
    stage.run("report small other --overwrite").exits_with(ExitCode::Success);
    std::fs::remove_file(other.join("eval/table.json")).expect("the test folder is writable");
    stage
        .run("report small other --out both")
        .exits_with(ExitCode::NoData)
        .stderr_has("run checkpoints/other has not been");
    assert!(!stage.path().join("both").exists());
}

/// The cells of a density with their probabilities, which must cover the Earth once and add up to 1.
fn cells(step: &Value) -> Vec<(u64, f64)> {
    let cells = step["cells"].as_array().expect("a step has cells").iter();
    let cells: Vec<(u64, f64)> =
        cells.map(|cell| (cell[0].as_u64().expect("a number"), cell[1].as_f64().expect("a number"))).collect();
    let (mut next, mut sum) = (0, 0.0);
    for (unique, probability) in &cells {
        let (order, cell) = order_and_cell(*unique);
        assert_eq!(cell << (2 * (20 - order)), next, "cells overlap or leave a gap");
        (next, sum) = ((cell + 1) << (2 * (20 - order)), sum + probability);
    }
    assert_eq!(next, 12 << 40);
    assert!((sum - 1.0).abs() < 1e-3, "the probabilities add up to {sum}");
    cells
}

#[test]
fn report_photos_have_the_answers_of_the_evaluation_and_densities_that_narrow() {
    let stage = stage();
    let ran = stage.run("--device cpu --set eval.report_photos=7 eval --hybrid");
    ran.exits_with(ExitCode::Success);
    let eval = folder(&stage);
    let file = read_json(&eval.join("images.json"));
    let images = file["images"].as_array().expect("the file has a list");
    let places = |name: &str| read_places(&eval.join(name)).expect("the evaluation wrote the file");
    let (truth, answers) = (places("truth.csv"), places("predictions-locdiff-h.csv"));
    let (locdiff, samples) = (places("predictions-locdiff.csv"), places("samples.csv"));
    assert!(answers.iter().zip(&locdiff).any(|(one, other)| one != other), "LocDiff-H has the answers of LocDiff");
    // How much the first and the last densities differ from the even one, in nats, over all photos.
    let mut divergences = [0.0, 0.0];
    for (image, row) in images.iter().zip([0, 24, 49, 74, 99, 124, 149]) {
        let is = |value: &Value, place: &Place| *value == json!([place.latitude().0, place.longitude().0]);
        assert_eq!(image["id"], format!("photo-{}", 1000 + row));
        assert!(is(&image["truth"], &truth[row]) && is(&image["answer"], &answers[row]), "{row}: {image}");
        assert!(is(&image["samples"][0], &samples[row]), "{row}: {image}");
        let of_photo = image["samples"].as_array().expect("there are samples");
        assert_eq!(of_photo.len(), 4);
        let others = image["alternatives"].as_array().expect("there is a list").iter().map(|other| &other["weight"]);
        let weights = others.chain([&image["weight"]]).map(|weight| weight.as_f64().expect("a weight is a number"));
        assert!((weights.sum::<f64>() - 1.0).abs() < 1e-9, "{image}");
        let steps = image["steps"].as_array().expect("there are steps");
        assert_eq!(steps.iter().map(|step| &step["t"]).collect::<Vec<_>>(), [199, 133, 66, 0]);
        let densities: Vec<Vec<(u64, f64)>> = steps.iter().map(cells).collect();
        for (divergence, cells) in divergences.iter_mut().zip([&densities[0], &densities[3]]) {
            let of_cell = |(cell, part): &(u64, f64)| {
                part * (part.max(1e-9) * Healpix::new(order_and_cell(*cell).0).cells() as f64).ln()
            };
            *divergence += cells.iter().map(of_cell).sum::<f64>();
        }
        // The samples come from the last density.
        for sample in of_photo {
            let [lat, lon] = [&sample[0], &sample[1]].map(|degrees| Degrees(degrees.as_f64().expect("it is a number")));
            let place = UnitVector::from(Place::new(lat, lon).expect("a sample is a place"));
            let holds = |(unique, _): &&(u64, f64)| {
                let (order, cell) = order_and_cell(*unique);
                Healpix::new(order).cell_of(place) == cell
            };
            let (unique, part) = densities[3].iter().find(holds).expect("the cells cover the Earth");
            let times_even = part * Healpix::new(order_and_cell(*unique).0).cells() as f64;
            assert!(times_even > 2.0, "{row}: the density at a sample is only {times_even} times the even one");
        }
    }
    let [first, last] = divergences;
    assert!(0.0 < first && 1.5 * first < last, "the densities do not narrow: {divergences:?}");
    let shown = read_json(&eval.join("report.json"));
    assert_eq!(shown["images"].as_array().map(Vec::len), Some(7));

    stage.run("--device cpu --set eval.report_photos=0 eval").exits_with(ExitCode::Success);
    assert!(!eval.join("images.json").exists(), "the photos of an earlier evaluation are left");
    stage.run("--set eval.report_photos=101 eval").exits_with(ExitCode::Config).stderr_has("eval.report_photos");
}

/// A run with hostile text in every place. `photos` photos lie on the equator, and each answer is `error_degrees` away.
fn hostile_run(stage: &Stage, name: &str, photos: usize, error_degrees: f64) {
    let rows = |shift: f64| {
        let row = |at: usize| {
            let lon = at as f64 * 300.0 / photos as f64 - 150.0 + shift;
            format!("\"{at}{}\",0,{lon}\n", HOSTILE.replace('"', "\"\""))
        };
        (0..photos).fold("id,lat,lon\n".to_owned(), |text, at| text + &row(at))
    };
    let computed = json!({
        "method": "locdiff", "name": HOSTILE, "dataset": HOSTILE, "source": "computed", "acc_1km": 0.0, "acc_25km": 12.5,
        "acc_25km_lo": 10.0, "acc_25km_hi": 15.0,
    });
    let published = json!({ "method": HOSTILE, "dataset": HOSTILE, "source": "published", "acc_1km": 0.05 });
    let level = json!({ "level": 0.5, "share": 0.48, "lo": 0.4, "hi": 0.6 });
    let table = json!({
        "checkpoint": HOSTILE, "data": { "step": 7, "source": HOSTILE }, "rows": [computed, published],
        "calibration": { "rows": [level] },
    });
    let image = json!({
        "id": format!("0{HOSTILE}"), "samples": [[1.0, 2.0], [3.0, -170.0]],
        "alternatives": [{ "lat": 4.0, "lon": 5.0, "weight": 0.7 }],
        "steps": [{ "t": 199, "cells": [[4, 0.5], [13, 0.5]] }, { "t": 0, "cells": [[4, 0.0], [34, 1.0]] }],
    });
    write(
        &stage.path().join("checkpoints").join(name),
        &[
            ("config.toml", "[train]\nseed = 3\n".to_owned()),
            ("eval/truth.csv", rows(0.0)),
            ("eval/predictions-locdiff.csv", rows(error_degrees)),
            ("eval/table.json", table.to_string()),
            ("eval/images.json", json!({ "images": [image] }).to_string()),
        ],
    );
}

#[test]
fn hostile_text_stays_text_and_the_page_works_in_a_browser() {
    let stage = Stage::new(Worker::None);
    hostile_run(&stage, "<b>run&", 40, 1.0);
    stage.run("report <b>run&").exits_with(ExitCode::Success);
    let eval = stage.path().join("checkpoints/<b>run&/eval");
    let read = |name: &str| std::fs::read_to_string(eval.join(name)).expect("the report exists");
    let (page, markdown) = (read("report.html"), read("report.md"));
    assert!(!page.contains("<img") && !page.contains("<b>") && !page.contains("<!--") && !page.contains('\u{2028}'));
    assert_eq!(page.matches("</script>").count(), 3, "the page has more scripts than its own");
    assert!(!markdown.contains("<img") && !markdown.contains("</script>") && !markdown.contains("<b>"), "{markdown}");
    let table_lines = markdown.lines().filter(|line| line.starts_with("| ") && line.contains("published"));
    assert!(table_lines.clone().count() == 1 && table_lines.clone().all(|line| line.matches(" | ").count() == 7));

    let ready = "document.documentElement.dataset.ready + document.title + document.images.length";
    let shown = "document.querySelector('#world output').textContent";
    let tip = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent";
    let slider = "document.querySelector('#photo input[type=range]')";
    // Cells at the poles, at the equator and at the date line, large and small.
    let cells = [4, 7, 8, 10, 12, 15, 19, 47, 64, 127, 191, 200, 255, 16_384, 20_479, 30_000, 65_535, 50_000];
    let steps = json!([
        { "eval": ready },
        { "eval": "document.querySelectorAll('#error-curve .curve, #calibration-curve .curve').length" },
        { "eval": shown },
        // The middle of the map is at 0° N, 0° E, where photo 20 is.
        { "move": "#world canvas" },
        { "eval": tip },
        { "eval": "document.querySelector('#world label input[type=checkbox]').click() || 1" },
        { "eval": "document.querySelectorAll('#world label input[type=checkbox]')[1].click() || 1" },
        { "eval": shown },
        { "eval": "document.querySelectorAll('#world label input[type=checkbox]')[1].click() || 1" },
        { "eval": "window.before = document.querySelector('#world canvas').toDataURL(); 1" },
        { "click": "#world .zoom button" },
        { "eval": "document.querySelector('#world canvas').toDataURL() !== window.before" },
        { "click": "#world canvas" },
        { "eval": "document.querySelector('#photo h3').textContent" },
        { "eval": "document.querySelector('#photo .controls button').click() || 1" },
        { "eval": "[...document.querySelectorAll('#photo option')].length" },
        { "eval": format!("{slider} === null || {slider}.closest('.controls').hidden") },
        { "eval": "document.querySelector('#photo input[type=checkbox]').click() || 1" },
        { "eval": "document.querySelector('#photo h3').textContent + document.querySelector('#photo').innerText.includes('2 samples')" },
        { "eval": format!("{slider}.value") },
        { "eval": "document.title" },
        { "eval": "window.before = document.querySelector('#photo canvas').toDataURL(); 1" },
        { "eval": format!("{slider}.value = 0; {slider}.dispatchEvent(new Event('input')) && 1") },
        { "move": "#photo canvas" },
        { "eval": "document.querySelector('#photo canvas').toDataURL() !== window.before" },
        { "eval": format!("{slider}.closest('.controls').innerText") },
        { "eval": format!("{cells:?}.map(outlineOf)") },
    ]);
    let Some(found) = browse(&stage, eval.join("report.html"), &steps) else { return };
    assert_eq!((&found["problems"], &found["requests"]), (&json!([]), &json!([])), "{found}");
    let values = found["values"].as_array().expect("the script prints values");
    assert_eq!(values[..3], [json!("trueReport: <b>run&0"), json!(2), json!("40 of 40 answers")], "{found}");
    let text = values[3].as_str().expect("it is text");
    assert!(
        text.starts_with(&format!("20{HOSTILE}truth: 0.000° N, 0.000° Eanswer: 0.000° N, 1.000° Eerror: 111 km")),
        "{text}"
    );
    assert_eq!(values[6], "0 of 40 answers", "the filter has no effect: {found}");
    assert_eq!(values[9], true, "the button does not zoom");
    assert_eq!(values[10], format!("20{HOSTILE}"), "a click on the map does not show the photo");
    assert_eq!((&values[12], &values[13]), (&json!(3), &json!(true)), "{found}");
    assert_eq!(values[15], format!("0{HOSTILE}true"), "the photo with samples is not shown");
    assert_eq!((&values[16], &values[17]), (&json!("1"), &json!("Report: <b>run&")), "{found}");
    assert_eq!(values[20], true, "the density is the same at every step");
    assert_eq!(values[21], "density at denoising step\nt = 199: half of the probability is on 43,000,000 km²");
    let outlines = values[22].as_array().expect("there are outlines");
    for (unique, outline) in cells.into_iter().zip(outlines) {
        check_outline(unique, outline);
    }
}

/// Checks the outline of a cell on a map of equal areas: it has the area of a cell, and its middle is that of the cell.
fn check_outline(unique: u64, outline: &Value) {
    let degrees = |value: &Value| value.as_f64().expect("a coordinate is a number").to_radians();
    let points = outline.as_array().expect("an outline has points").iter();
    let points: Vec<[f64; 2]> = points.map(|point| [degrees(&point[1]), degrees(&point[0]).sin()]).collect();
    let next = points.iter().cycle().skip(1);
    let area = points.iter().zip(next).map(|(one, next)| (one[0] * next[1] - next[0] * one[1]) / 2.0).sum::<f64>();
    let (order, cell) = order_and_cell(unique);
    let (grid, wanted) = (Healpix::new(order), 4.0 * std::f64::consts::PI / Healpix::new(order).cells() as f64);
    assert!((area / wanted - 1.0).abs() < 0.02, "cell {unique}: the outline has {area} of {wanted}");
    // All corners lie on the border, so a point slightly inside belongs to the cell.
    let middle = Place::from(grid.centre(cell));
    for [lon, height] in points {
        let turned = middle.longitude().0.to_radians();
        let turned = turned + std::f64::consts::TAU * ((lon - turned) / std::f64::consts::TAU).round();
        let inside = [lon + 0.05 * (turned - lon), height + 0.05 * (middle.latitude().0.to_radians().sin() - height)];
        let point = UnitVector::from_height(inside[1], inside[0]).expect("the height is between -1 and 1");
        assert_eq!(grid.cell_of(point), cell, "cell {unique}: a corner at {lon}, {height} is elsewhere");
    }
}

#[test]
fn page_can_neither_run_other_scripts_nor_load_anything() {
    let stage = Stage::new(Worker::None);
    hostile_run(&stage, "run", 5, 1.0);
    stage.run("report run").exits_with(ExitCode::Success);
    let steps = json!([
        { "eval": "document.body.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 1' })); 1" },
        { "eval": "document.body.append(Object.assign(new Image(), { src: 'http://localhost/x.png' })); 1" },
        { "eval": "fetch('http://localhost/').then(() => 'loaded', () => 'refused')" },
        { "eval": "document.title" },
    ]);
    let Some(found) = browse(&stage, stage.path().join("checkpoints/run/eval/report.html"), &steps) else { return };
    assert_eq!(found["values"], json!([1, 1, "refused", "Report: run"]), "{found}");
    let problems: Vec<&str> = found["problems"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for what in ["inline script", "the image", "Connecting to"] {
        let is_refused = |text: &&str| text.contains(what) && text.contains("Content Security Policy");
        assert!(problems.iter().any(is_refused), "{what} is not refused: {found}");
    }
}

#[test]
fn runs_with_other_photos_are_shown_together_but_not_compared() {
    let stage = Stage::new(Worker::None);
    hostile_run(&stage, "run", 5, 1.0);
    hostile_run(&stage, "other", 6, 1.0);
    std::fs::create_dir(stage.path().join("there")).expect("the test folder is writable");
    std::fs::rename(stage.path().join("checkpoints/other"), stage.path().join("there/run")).expect("it is writable");
    stage.run("report run there/run").exits_with(ExitCode::Success);
    let found = read_json(&stage.path().join("report/report.json"));
    assert_eq!((&found["between_runs"], found["photo_sets"].as_array().map(Vec::len)), (&json!([]), Some(2)));
    let note = "there/run located other photos than checkpoints/run, so the two are not compared photo by photo";
    assert_eq!(found["notes"], json!([note]));
    let steps = json!([{ "eval": "document.documentElement.dataset.ready" }]);
    let Some(found) = browse(&stage, stage.path().join("report/report.html"), &steps) else { return };
    assert_eq!(found, json!({ "problems": [], "requests": [], "values": ["true"] }));
}

#[test]
fn large_pages_show_some_photos_and_say_so() {
    let stage = Stage::new(Worker::None);
    hostile_run(&stage, "large", 70_000, 0.5);
    let images: Vec<Value> = (0..101).map(|at| json!({ "id": at.to_string() })).collect();
    let file = stage.path().join("checkpoints/large/eval/images.json");
    std::fs::write(file, json!({ "images": images }).to_string()).expect("the test folder is writable");
    stage.run("report checkpoints/large --out there").exits_with(ExitCode::Success);
    let found = read_json(&stage.path().join("there/report.json"));
    let set = &found["photo_sets"][0];
    assert_eq!((&set["photos"], set["ids"].as_array().map(Vec::len)), (&json!(70_000), Some(60_000)));
    let note = found["notes"][0].as_str().expect("the report says that photos are left out");
    assert!(note.starts_with("the map shows 60000 of 70000 photos"), "{note}");
    assert_eq!(found["systems"][0]["answers"].as_array().map(Vec::len), Some(120_000));
    let note = "large: the page shows the samples of the first 100 of 101 photos that have any";
    assert_eq!((&found["notes"][1], found["images"].as_array().map(Vec::len)), (&json!(note), Some(100)));
}

#[test]
fn damaged_files_are_named() {
    let stage = Stage::new(Worker::None);
    hostile_run(&stage, "bad", 5, 1.0);
    let eval = stage.path().join("checkpoints/bad/eval");
    for (name, text, code, reason) in [
        (
            "images.json",
            "{\"images\": [{\"id\": \"a\", \"samples\": [[1]]}]}",
            ExitCode::BadData,
            "images.json: invalid length",
        ),
        (
            "images.json",
            "{\"images\": [{\"id\": \"a\", \"steps\": [{\"t\": 1, \"cells\": [[3, 0.5]]}]}]}",
            ExitCode::BadData,
            "images.json: no cell has the number 3, wanted 4 to",
        ),
        ("predictions-locdiff.csv", "id,lat,lon\nx,1,2\n", ExitCode::BadData, "its ids are not those of truth.csv"),
        (
            "table.json",
            "{\"calibration\": {\"rows\": [{\"level\": 1}]}}",
            ExitCode::BadData,
            "table.json: calibration: missing field `share`",
        ),
        ("table.json", "{", ExitCode::BadData, "table.json: EOF"),
    ] {
        let good = std::fs::read(eval.join(name)).expect("the file exists");
        std::fs::write(eval.join(name), text).expect("the test folder is writable");
        stage.run("report bad").exits_with(code).stderr_has(reason);
        std::fs::write(eval.join(name), good).expect("the test folder is writable");
    }
    stage.run("report none").exits_with(ExitCode::NoData).stderr_has("no run `none`");
    stage.run("report bad --out checkpoints/bad/config.toml").exits_with(ExitCode::Exists);
}
