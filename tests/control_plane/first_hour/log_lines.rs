//! Tests of the log lines of workers. On the terminal, a line has local time, the level that the worker gave it, and
//! the ranks that logged it. Each error is shown once. Log files have every line with its full time.

use locdiff_core::exit_code::ExitCode;

use crate::small_shards;
use crate::stage::{Ran, Stage, Worker};

/// Runs a command in a time zone nine hours ahead of UTC.
fn run_in_japan(stage: &Stage, line: &str) -> Ran {
    let mut command = stage.command(line);
    Ran::from(command.env("TZ", "JST-9").output().expect("the launcher can be started"))
}

/// The time of day as minutes since midnight.
fn minutes(time: &str) -> i64 {
    let (hour, rest) = time.split_once(':').expect("a time has hours and minutes");
    let number = |text: &str| text.parse::<i64>().expect("a time consists of numbers");
    number(hour) * 60 + number(&rest[..2])
}

#[test]
fn lines_of_workers_have_local_time_their_own_level_and_their_ranks() {
    let stage = Stage::new(Worker::Fake("talk"));
    let ran = run_in_japan(&stage, "--workers 3 --device cpu self-check");
    ran.exits_with(ExitCode::Success).stderr_has(" INFO  [rank 1] rank 1 has started");
    ran.stderr_has(" WARN  [ranks 0-2] slow disk\n").stderr_has(" INFO  [ranks 0-2] ready\n");
    assert!(!ran.stderr.contains("2026-"), "the worker's own timestamp is shown: {}", ran.stderr);
    let line = ran.stderr.lines().find(|line| line.ends_with("slow disk")).expect("the line is shown");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is after 1970");
    let want = (now.as_secs() / 60 + 9 * 60) % (24 * 60);
    let late = (want as i64 - minutes(&line[..8])).rem_euclid(24 * 60);
    assert!(late <= 5 && &line[8..9] == " ", "{line}: wanted the time in Japan");

    let ran = stage.run("--workers 1 --device cpu self-check");
    ran.exits_with(ExitCode::Success).stderr_has(" WARN  slow disk\n").stderr_has(" INFO  rank 0 has started\n");
    assert!(!ran.stderr.contains("[rank"), "the rank of the only worker is shown: {}", ran.stderr);
}

#[test]
fn error_of_a_worker_is_shown_once() {
    let stage = Stage::new(Worker::Fake("fail-loudly@1"));
    let ran = stage.run("--workers 2 --device cpu self-check");
    ran.exits_with(ExitCode::BadData).stderr_has("error: no such thing");
    assert_eq!(ran.stderr.matches("no such thing").count(), 1, "{}", ran.stderr);
    // The final report does not repeat the other error. A log line of rank 1 therefore shows it.
    ran.stderr_has(" ERROR [rank 1] another thing\n");

    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "small", 0..8, 1, false);
    std::fs::write(stage.path().join("table.csv"), "id,lat,lon\na,1,2\n").expect("the test folder is writable");
    let ran = stage.run("--device cpu shards build --table table.csv --embeddings embeddings.npy --out shards/other");
    ran.exits_with(ExitCode::BadData);
    assert_eq!(ran.stderr.matches("table.csv").count(), 1, "{}", ran.stderr);
}

#[test]
fn log_file_of_a_rank_has_every_line_with_its_full_time() {
    let stage = Stage::new(Worker::Fake("talk"));
    std::fs::create_dir_all(stage.path().join("shards/demo/train")).expect("the test folder is writable");
    std::fs::write(stage.path().join("shards/demo/train/a.parquet"), "").expect("the test folder is writable");
    stage
        .run("--device cpu --run first --set eval.after_train=false --set eval.every=0 train")
        .exits_with(ExitCode::Success);
    let log =
        std::fs::read_to_string(stage.path().join("checkpoints/first/logs/0/rank-0.log")).expect("there is a log");
    assert!(log.contains("\n2026-11-16T10:00:00.000001Z  WARN slow disk\n"), "{log}");
}
