//! Tests of predictions that are interrupted: by kills, by changed data and by failing disks.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::super::support::stage;
use crate::small_shards;
use crate::stage::{Ran, Stage, eventually, has_begun, signal, wait, workers_of};

/// Rows of the input: eight pieces.
const ROWS: usize = 2000;

/// A stage with a trained run and the shards `shards/many`.
fn prepared() -> Stage {
    let stage = stage();
    small_shards::build(&stage, "many", 1000..1000 + ROWS, 1, false);
    stage
}

/// The complete pieces of `out`.
fn pieces(stage: &Stage, out: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(stage.path().join(format!("{out}.partial"))).into_iter().flatten().flatten();
    let is_piece = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("piece-"));
    entries.map(|entry| entry.path()).filter(is_piece).collect()
}

/// Starts a command with two workers and waits until `wanted` pieces of `out` are complete. The second worker is
/// stopped, so that the command cannot end.
#[track_caller]
fn started(stage: &Stage, line: &str, out: &str, wanted: usize) -> Child {
    let mut command = stage.command(line);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can start");
    stop_second_worker(&child, &[]);
    eventually("some pieces are complete", || pieces(stage, out).len() >= wanted);
    child
}

/// Stops the second worker that is not in `before` as soon as it has begun its job.
#[track_caller]
fn stop_second_worker(child: &Child, before: &[u32]) {
    let mut workers = Vec::new();
    eventually("two workers have begun", || {
        workers = workers_of(child.id());
        workers.retain(|pid| !before.contains(pid) && has_begun(*pid));
        workers.len() == 2
    });
    signal(workers[1], Signal::SIGSTOP);
}

#[track_caller]
fn kill_launcher(stage: &Stage, mut child: Child, out: &str) {
    signal(child.id(), Signal::SIGKILL);
    wait(&mut child);
    assert!(!stage.path().join(out).exists(), "the prediction ended before it was killed");
}

/// Kills the second worker. Returns the workers that were there.
#[track_caller]
fn kill_worker(child: &Child) -> Vec<u32> {
    let workers = workers_of(child.id());
    signal(*workers.last().expect("the second worker is stopped"), Signal::SIGKILL);
    workers
}

/// Changes the ids in one complete piece, and returns the number of its rows. The changed ids are in the output unless
/// the piece is predicted again.
fn mark_a_piece(stage: &Stage, out: &str) -> usize {
    let piece = pieces(stage, out).pop().expect("a piece is complete");
    let text = std::fs::read_to_string(&piece).expect("the piece can be read");
    std::fs::write(&piece, text.replace("\"photo-", "\"kept-")).expect("the piece is writable");
    text.lines().count()
}

fn kept_rows(stage: &Stage, out: &str) -> usize {
    let text = std::fs::read_to_string(stage.path().join(out)).expect("the output was written");
    assert_eq!(text.lines().count(), ROWS + 1);
    text.matches("kept-").count()
}

#[test]
fn killed_predictions_go_on_and_give_the_same_bytes() {
    let stage = prepared();
    stage.run("predict shards/many --out whole.parquet").exits_with(ExitCode::Success);
    let (line, out) = ("--workers 2 predict shards/many --out out.parquet", "out.parquet");
    kill_launcher(&stage, started(&stage, line, out, 1), out);
    let child = started(&stage, line, out, 2);
    stop_second_worker(&child, &kill_worker(&child));
    eventually("another piece is complete", || pieces(&stage, out).len() >= 4);
    kill_launcher(&stage, child, out);
    let ran = stage.run("--set eval.samples=8 predict shards/many --out out.parquet");
    ran.exits_with(ExitCode::Exists).stderr_has("another value of `settings`");
    // A killed command may leave a file that was being written.
    std::fs::write(stage.path().join("out.parquet.partial/.job.json.writing"), "{").expect("the folder is writable");
    let ran = stage.run("predict shards/many --out out.parquet");
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("resuming: "), "{}", ran.stdout);
    let [whole, resumed] = ["whole.parquet", "out.parquet"].map(|name| std::fs::read(stage.path().join(name)));
    assert_eq!(whole.expect("the file was written"), resumed.expect("the file was written"));
    assert!(!stage.path().join("out.parquet.partial").exists());
    stage.run("predict shards/many --out out.parquet").exits_with(ExitCode::Exists).stderr_has("use --overwrite");
}

#[test]
fn complete_pieces_are_used_after_the_death_of_a_worker_and_with_overwrite() {
    let stage = prepared();
    let (line, out) = ("--workers 2 predict shards/many --overwrite --out out.csv", "out.csv");
    let mut child = started(&stage, line, out, 1);
    let marked = mark_a_piece(&stage, out);
    kill_worker(&child);
    assert_eq!(wait(&mut child), Some(0));
    assert_eq!(kept_rows(&stage, out), marked, "a piece was predicted again after the death of a worker");

    std::fs::remove_file(stage.path().join(out)).expect("the output exists");
    kill_launcher(&stage, started(&stage, line, out, 1), out);
    let marked = mark_a_piece(&stage, out);
    let ran = stage.run(line);
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("resuming: "), "{}", ran.stdout);
    assert_eq!(kept_rows(&stage, out), marked, "--overwrite removed the pieces of the same prediction");
}

/// Data without a manifest: nothing but the version of the file shows that it has changed.
#[test]
fn changed_data_is_refused_and_predicted_again_with_overwrite() {
    let stage = prepared();
    let [shard, photos] = ["shards/many/part-00000.parquet", "photos.parquet"].map(|name| stage.path().join(name));
    std::fs::copy(&shard, &photos).expect("the shard can be copied");
    let (line, out) = ("--workers 2 predict photos.parquet --out out.csv", "out.csv");
    kill_launcher(&stage, started(&stage, line, out, 1), out);
    mark_a_piece(&stage, out);
    // A command with another input, which is refused, leaves the pieces and their description as they are.
    std::fs::write(stage.path().join("other.csv"), format!("embedding\n\"{}\"\n", "1 ".repeat(12)))
        .expect("the folder is writable");
    stage.run("predict other.csv --out out.csv").exits_with(ExitCode::Exists);
    std::fs::remove_file(&photos).and_then(|()| std::fs::copy(&shard, &photos)).expect("the shard can be copied");
    let ran = stage.run(line);
    ran.exits_with(ExitCode::DataChanged).stderr_has("the input has changed since the pieces in out.csv.partial");
    let ran = stage.run("predict photos.parquet --overwrite --out out.csv");
    ran.exits_with(ExitCode::Success).stderr_has("the input has changed");
    assert_eq!(kept_rows(&stage, out), 0, "a piece of the old data is in the output");
}

/// Lines that are lost or wrong are noticed, and the piece is predicted again.
#[test]
fn damaged_piece_is_named_and_predicted_again() {
    let stage = prepared();
    stage.run("predict shards/many --out whole.csv").exits_with(ExitCode::Success);
    let (line, out) = ("--workers 2 predict shards/many --out out.csv", "out.csv");
    kill_launcher(&stage, started(&stage, line, out, 3), out);
    let found = pieces(&stage, out);
    let text = std::fs::read_to_string(&found[0]).expect("the piece can be read");
    let cut: String = text.split_inclusive('\n').take(100).collect();
    std::fs::write(&found[0], cut).expect("the piece is writable");
    std::fs::write(&found[1], "no JSON\n").expect("the piece is writable");
    for _ in 0..2 {
        let ran = stage.run(line);
        ran.exits_with(ExitCode::Corrupt).stderr_has("is damaged: ").stderr_has("the piece was removed; repeat the");
    }
    stage.run(line).exits_with(ExitCode::Success);
    let [whole, out] = ["whole.csv", out].map(|name| std::fs::read(stage.path().join(name)));
    assert!(whole.expect("the file was written") == out.expect("the file was written"), "the answers differ");
}

/// A limit on the size of files stands for a full disk.
#[test]
fn failed_write_stops_the_workers_and_names_the_file() {
    let stage = prepared();
    let mut command = Command::new("bash");
    // Without the trap, the kernel would kill the launcher. The limit is in KiB; a piece has more.
    let script = "trap '' XFSZ; ulimit -f 32; exec ./locdiff-launch --workers 2 predict shards/many --out out.csv";
    let inner = stage.command("");
    command.args(["-c", script]).current_dir(stage.path());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let ran = Ran::from(command.output().expect("bash can be started"));
    ran.exits_with(ExitCode::Io).stderr_has("out.csv.partial/.piece-0000000").stderr_has("File too large");
    assert!(!stage.path().join("out.csv").exists());
    assert_eq!(pieces(&stage, "out.csv").len(), 0);
}
