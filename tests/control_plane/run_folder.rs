//! A run on disk: who may open it, what becomes a checkpoint, what survives.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{FileError, Files};
use locdiff_core::protocol::{CheckpointFile, PartsWritten, partial_name};
use locdiff_launch::error::LaunchError;
use locdiff_launch::run_folder::{
    Checkpoint, Commit, Depth, OpenedRun, RunFolder, checkpoints, newest_run, newest_whole,
};
use proptest::prelude::*;

mod crash;
mod damage;
mod verbs;

/// A folder of runs.
pub(crate) struct Home {
    folder: tempfile::TempDir,
    pub(crate) config: RunConfig,
}

impl Home {
    pub(crate) fn new() -> Self {
        let mut config = RunConfig::default();
        config.checkpoint.keep = 2;
        // Thousands of fsyncs: in memory where that is possible.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { folder: folder.expect("temporary folder"), config }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.dir().join("run")
    }

    pub(crate) fn try_open(&self, files: Files) -> Result<OpenedRun, LaunchError> {
        RunFolder::open(files, self.dir(), "run", &self.config)
    }

    /// Opened, with an attempt of its own.
    pub(crate) fn open(&self) -> RunFolder {
        let mut folder = self.try_open(Files::real()).expect("opened").folder;
        folder.begin_attempt().expect("a number");
        folder
    }

    /// Names in the run that begin like this, sorted.
    pub(crate) fn names(&self, start: &str) -> Vec<String> {
        let entries = Files::real().entries(&self.run()).expect("readable").into_iter();
        let names = entries.map(|path| path.file_name().expect("a name").to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(start)).collect()
    }
}

/// What a rank writes at a step: bytes that tell both.
pub(crate) fn content(step: u64, rank: u32) -> Vec<u8> {
    format!("step {step} rank {rank} ").repeat(40).into_bytes()
}

/// Writes a rank's part as a worker would.
pub(crate) fn write_part(
    files: &Files,
    run: &Path,
    attempt: u32,
    step: u64,
    rank: u32,
) -> Result<PartsWritten, FileError> {
    let folder = run.join(partial_name(step, attempt));
    let name = format!("part-{rank}");
    files.create_folder(&folder)?;
    let written = files.write_new(&folder.join(&name), &content(step, rank))?;
    files.sync_folder(&folder)?;
    let file = CheckpointFile { name, bytes: written.bytes, xxh3: written.xxh3 };
    Ok(PartsWritten { step, attempt, files: vec![file], score: None })
}

/// A whole checkpoint of two ranks.
pub(crate) fn save(files: &Files, run: &RunFolder, step: u64, score: Option<f64>) -> Result<Commit, LaunchError> {
    let attempt = run.attempt().expect("an attempt was begun");
    let mut parts = Vec::new();
    for rank in 0..2 {
        parts.push(PartsWritten { score, ..write_part(files, run.path(), attempt, step, rank)? });
    }
    run.commit(attempt, step, &parts)
}

pub(crate) fn is_what_was_written(checkpoint: &Checkpoint) {
    let step = checkpoint.manifest.step;
    assert_eq!(checkpoint.manifest.files.len(), 2);
    for rank in 0..2 {
        let bytes = std::fs::read(checkpoint.path.join(format!("part-{rank}"))).expect("readable");
        assert_eq!(bytes, content(step, rank), "step {step} rank {rank}");
    }
}

#[test]
fn a_new_run_has_its_configuration_and_no_checkpoint() {
    let home = Home::new();
    let opened = home.try_open(Files::real()).expect("opened");
    assert!(opened.is_new && opened.changes.is_empty());
    assert_eq!(opened.folder.resume_point().expect("readable").checkpoint, None);
    drop(opened);
    let again = home.try_open(Files::real()).expect("opened");
    assert!(!again.is_new && again.changes.is_empty(), "{again:?}");
    let text = std::fs::read_to_string(home.run().join("config.toml")).expect("readable");
    assert!(text.contains("degree = 47") && text.contains("run = \"run\""), "{text}");
}

#[test]
fn a_run_keeps_its_model_and_says_what_else_changed() {
    let mut home = Home::new();
    save(&Files::real(), &home.open(), 1, None).expect("saved");
    let before = std::fs::read(home.run().join("config.toml")).expect("readable");
    home.config.model.degree = 23;
    home.config.train.seed = 5;
    let error = home.try_open(Files::real()).expect_err("another model");
    assert_eq!(error.exit_code(), ExitCode::RunDiffers);
    let text = error.to_string();
    for part in ["model.degree is 23, the run has 47", "train.seed is 5, the run has 0", "--run NAME"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(std::fs::read(home.run().join("config.toml")).expect("readable"), before, "nothing is overwritten");

    home.config = RunConfig::default();
    home.config.checkpoint.keep = 2;
    home.config.train.learning_rate = 5e-4;
    let opened = home.try_open(Files::real()).expect("allowed");
    assert_eq!(opened.changes, ["train.learning_rate was 0.0008, is 0.0005"]);
    assert_eq!(std::fs::read(home.run().join("config.toml")).expect("readable"), before, "not before it is taken");
    let mut folder = opened.folder;
    folder.keep_configuration().expect("written");
    drop(folder);
    assert_eq!(home.try_open(Files::real()).expect("opened").changes, Vec::<String>::new());
}

#[test]
fn attempts_only_grow() {
    let home = Home::new();
    let mut folder = home.try_open(Files::real()).expect("opened").folder;
    assert_eq!((folder.begin_attempt().ok(), folder.begin_attempt().ok()), (Some(0), Some(1)));
    assert!(home.run().join("logs/1").is_dir());
    drop(folder);
    let mut folder = home.try_open(Files::real()).expect("opened").folder;
    assert_eq!(folder.begin_attempt().ok(), Some(2));
    std::fs::remove_dir_all(home.run().join("logs")).expect("removed");
    assert_eq!(folder.begin_attempt().ok(), Some(3), "without the logs");
    std::fs::remove_file(home.run().join("attempt")).expect("removed");
    assert_eq!(folder.begin_attempt().ok(), Some(4), "without the file");
}

#[test]
fn late_parts_of_an_older_attempt_are_never_committed() {
    let home = Home::new();
    let mut folder = home.open();
    let old = [write_part(&Files::real(), folder.path(), 0, 10, 0).expect("written")];
    folder.begin_attempt().expect("a number");
    for (attempt, parts) in [(0, &old), (1, &old)] {
        let error = folder.commit(attempt, 10, parts).expect_err("stale");
        assert_eq!(error.exit_code(), ExitCode::WorkerFailed);
        assert!(error.to_string().contains("written by attempt 0"), "{error}");
    }
    assert_eq!(home.names("step-"), Vec::<String>::new());
    assert_eq!(folder.resume_point().expect("readable").checkpoint, None);
    assert_eq!(home.names(".step-"), Vec::<String>::new(), "leftovers are gone");
}

#[test]
fn a_step_that_is_there_already_stays() {
    let home = Home::new();
    let mut folder = home.open();
    save(&Files::real(), &folder, 10, None).expect("committed");
    folder.begin_attempt().expect("a number");
    let commit = save(&Files::real(), &folder, 10, None).expect("no error");
    assert!(matches!(&commit, Commit::AlreadyThere(path) if path.ends_with("step-00000010")), "{commit:?}");
    assert_eq!(home.names(".step-"), Vec::<String>::new());
    let point = folder.resume_point().expect("readable").checkpoint.expect("one");
    assert_eq!(point.manifest.attempt, 0);
}

#[test]
fn parts_that_are_not_what_their_rank_says_are_not_committed() {
    let home = Home::new();
    let folder = home.open();
    let wrong = |change: &dyn Fn(&mut Vec<PartsWritten>)| {
        let mut parts: Vec<PartsWritten> =
            (0..2).map(|rank| write_part(&Files::real(), folder.path(), 0, 10, rank).expect("written")).collect();
        change(&mut parts);
        let error = folder.commit(0, 10, &parts).expect_err("refused");
        assert_eq!(home.names(".step-"), Vec::<String>::new(), "removed");
        error.to_string()
    };
    assert!(wrong(&|parts| parts[1].files[0].bytes += 1).contains("part-1 has"));
    assert!(wrong(&|parts| parts[1].files[0].name = "part-0".into()).contains("part-0 was written twice"));
    assert!(wrong(&|parts| parts[1].files[0].name = "../lock".into()).contains("is no name for a part"));
    assert!(wrong(&|parts| parts[1].files[0].name = "manifest.json".into()).contains("is no name for a part"));
    assert!(wrong(&|parts| parts[1].files[0].name = "part-7".into()).contains("No such file"));
    assert!(wrong(&|parts| parts.clear()).contains("no rank wrote anything"));
    save(&Files::real(), &folder, 10, None).expect("the next one is fine");
}

#[test]
fn a_second_launcher_is_told_who_holds_the_run() {
    let home = Home::new();
    let folder = home.open();
    let error = home.try_open(Files::real()).expect_err("held");
    assert_eq!(error.exit_code(), ExitCode::RunHeld);
    assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
    drop(folder);
    home.try_open(Files::real()).expect("free again");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let home = Home::new();
    std::fs::write(home.dir().join("file"), "").expect("written");
    // A file in the way, and a file system on which nobody can make a folder.
    for dir in [home.dir().join("file"), PathBuf::from("/sys/locdiff")] {
        let error = RunFolder::open(Files::real(), &dir, "run", &home.config).expect_err("no place for a run");
        assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
        assert!(error.to_string().contains(&dir.display().to_string()), "{error}");
    }
    let error = RunFolder::open(Files::real(), home.dir(), "../up", &home.config).expect_err("no plain name");
    assert_eq!(error.exit_code(), ExitCode::Config);
}

#[test]
fn the_newest_run_is_the_one_written_to_last() {
    let home = Home::new();
    assert_eq!(newest_run(home.dir()).expect_err("none").exit_code(), ExitCode::NoData);
    assert_eq!(newest_run(&home.dir().join("none")).expect_err("none").exit_code(), ExitCode::NoData);
    for (name, second) in [("a", 30), ("b", 20), ("c", 10)] {
        RunFolder::open(Files::real(), home.dir(), name, &home.config).expect("opened");
        let file = std::fs::File::options().write(true).open(home.dir().join(name).join("config.toml")).expect("there");
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(second)).expect("set");
    }
    std::fs::create_dir(home.dir().join("d")).expect("made");
    assert_eq!(newest_run(home.dir()).expect("some"), home.dir().join("a"));
    std::fs::write(home.dir().join("b/latest"), "step-00000001\n").expect("written");
    assert_eq!(newest_run(home.dir()).expect("some"), home.dir().join("b"));
}

#[test]
fn events_are_lines_and_failures_come_and_go() {
    let home = Home::new();
    let folder = home.open();
    folder.event("started", &serde_json::json!({ "attempt": 0 })).expect("written");
    let path = home.run().join("events.jsonl");
    let mut text = std::fs::read_to_string(&path).expect("readable");
    text.push_str("{\"half");
    std::fs::write(&path, text).expect("written");
    folder.event("ended", &serde_json::json!({})).expect("written");
    let text = std::fs::read_to_string(&path).expect("readable");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let last: serde_json::Value = serde_json::from_str(lines[2]).expect("whole");
    assert_eq!(last["event"], "ended");
    folder.clear_failure().expect("nothing to clear");
    folder.write_failure(&serde_json::json!({ "cause": "x" })).expect("written");
    assert!(home.run().join("failure.json").exists());
    folder.clear_failure().expect("cleared");
    assert!(!home.run().join("failure.json").exists());
}

/// The steps that must be there, worked out differently: walk over the commits and ask of each whether anything justifies it.
fn expected(scores: &[Option<u32>], keep: usize) -> Vec<u64> {
    let mut there: Vec<usize> = Vec::new();
    for index in 0..scores.len() {
        there.push(index);
        let top = there.iter().filter_map(|at| scores[*at]).max();
        let best = there.iter().copied().rfind(|at| top.is_some() && scores[*at] == top);
        let recent = there.len().saturating_sub(keep);
        let kept = there.iter().enumerate().filter(|(place, at)| *place >= recent || Some(**at) == best);
        there = kept.map(|(_, at)| *at).collect();
    }
    there.into_iter().map(|index| index as u64 + 1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_last_and_the_best_are_kept_and_nothing_else(
        scores in proptest::collection::vec(proptest::option::of(0_u32..5), 1..9),
        keep in 1_u32..4,
    ) {
        let mut home = Home::new();
        home.config.checkpoint.keep = keep;
        let folder = home.open();
        let aside = home.run().join("step-00000000.corrupt");
        std::fs::create_dir(&aside).expect("made");
        for (index, score) in scores.iter().enumerate() {
            save(&Files::real(), &folder, index as u64 + 1, score.map(f64::from)).expect("committed");
        }
        let rows = checkpoints(&home.run(), Depth::Checksums).expect("readable");
        let whole: Vec<u64> = rows.iter().filter(|row| row.state == "whole").map(|row| row.step).collect();
        prop_assert_eq!(whole, expected(&scores, keep as usize));
        prop_assert!(aside.exists(), "what was set aside is never pruned");
        prop_assert_eq!(rows.len(), expected(&scores, keep as usize).len() + 1);
        prop_assert!(home.names(".").is_empty(), "{:?}", home.names("."));
        let (newest, passed_over) = newest_whole(&home.run()).expect("one");
        prop_assert_eq!((newest.manifest.step, passed_over.len()), (scores.len() as u64, 0));
    }
}
