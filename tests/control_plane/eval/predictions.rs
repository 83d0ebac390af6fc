//! `eval --predictions`: anybody's answers, scored by the code that scores ours.

use locdiff_launch::exit_code::ExitCode;

use super::support::{ACCURACIES, read, row, stage};

#[test]
fn own_predictions_score_as_the_table_says_and_wrong_ones_are_refused() {
    let stage = stage();
    let table = stage.run("--json eval");
    table.ends_with(ExitCode::Success);
    let answers = "checkpoints/small/eval/predictions-locdiff.csv";
    let by_shards = format!("--json --device cpu --set shards.test=shards/test eval --predictions {answers}");
    let ran = stage.run(&by_shards);
    ran.ends_with(ExitCode::Success);
    let by_truth = "--json --device cpu --set eval.truth=checkpoints/small/eval/truth.csv eval --predictions";
    let again = stage.run(&format!("{by_truth} {answers}"));
    again.ends_with(ExitCode::Success);
    let (table, ran, again) = (table.json(), ran.json(), again.json());
    for key in ACCURACIES.iter().chain(&["acc_25km_lo", "median_km", "mean_km_hi", "geo_score"]) {
        let want = &row(&table, "locdiff")[*key];
        assert!(want.is_number() && ran["rows"][0][*key] == *want && again["rows"][0][*key] == *want, "{key}: {ran}");
    }
    let text = read(&stage, "predictions-locdiff.csv");
    let lines: Vec<&str> = text.lines().collect();
    let wrong = [
        ("nan", text.replacen(lines[3].split(',').nth(1).expect("lat"), "NaN", 1), "row 2"),
        ("short", lines[..lines.len() - 1].join("\n"), "no prediction for 1 of the 150 rows"),
        ("twice", format!("{text}{}\n", lines[1]), "photo-1000"),
        ("extra", format!("{text}nobody,1,2\n"), "`nobody`"),
        (
            "length",
            lines[..5].iter().map(|line| line.split_once(',').expect("id").1).collect::<Vec<_>>().join("\n"),
            "4 rows",
        ),
    ];
    for (name, text, reason) in wrong {
        std::fs::write(stage.path().join(format!("{name}.csv")), text).expect("written");
        let ran = stage.run(&format!("{by_truth} {name}.csv"));
        ran.ends_with(ExitCode::BadData).says(&format!("{name}.csv")).says(reason);
    }
    stage.run(&format!("{by_truth} none.csv")).ends_with(ExitCode::Io).says("none.csv");
}
