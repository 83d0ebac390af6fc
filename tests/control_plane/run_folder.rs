//! Tests of the run folder: locking, committing checkpoints, pruning, and recovery from crashes and damage.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{FileError, Files};
use locdiff_core::protocol::{CheckpointFile, PartsWritten, partial_name};
use locdiff_launch::error::LaunchError;
use locdiff_launch::run_folder::{
    Commit, Depth, OpenedRun, RunFolder, WholeCheckpoint, checkpoints, newest_run, newest_whole,
};
use proptest::prelude::*;

mod crash;
mod damage;
mod verbs;

/// A temporary folder of runs, and the configuration with which the tests open a run.
pub(crate) struct Home {
    folder: tempfile::TempDir,
    pub(crate) config: RunConfig,
}

impl Home {
    pub(crate) fn new() -> Self {
        let mut config = RunConfig::default();
        config.checkpoint.keep = 2;
        // These tests call fsync thousands of times, so they use a file system in memory if the machine has one.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { folder: folder.expect("a temporary folder can be created"), config }
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

    /// Opens the run and begins a new attempt.
    pub(crate) fn open(&self) -> RunFolder {
        let mut folder = self.try_open(Files::real()).expect("the run can be opened").folder;
        folder.begin_attempt(1).expect("an attempt can begin");
        folder
    }

    /// The names in the run folder that begin with `start`, sorted.
    pub(crate) fn names(&self, start: &str) -> Vec<String> {
        let entries = Files::real().entries(&self.run()).expect("the folder can be read").into_iter();
        let names = entries.map(|path| path.file_name().expect("an entry has a name").to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(start)).collect()
    }
}

/// The bytes that a rank writes at a step. Each rank and each step has different bytes.
pub(crate) fn content(step: u64, rank: u32) -> Vec<u8> {
    format!("step {step} rank {rank} ").repeat(40).into_bytes()
}

/// Writes the part of one rank as a worker does.
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

/// Writes and commits a checkpoint of two ranks.
pub(crate) fn save(files: &Files, run: &RunFolder, step: u64, score: Option<f64>) -> Result<Commit, LaunchError> {
    let attempt = run.attempt().expect("an attempt has begun");
    let mut parts = Vec::new();
    for rank in 0..2 {
        parts.push(PartsWritten { score, ..write_part(files, run.path(), attempt, step, rank)? });
    }
    run.commit(attempt, step, &parts)
}

pub(crate) fn assert_contents(checkpoint: &WholeCheckpoint) {
    let step = checkpoint.manifest.step;
    assert_eq!(checkpoint.manifest.files.len(), 2);
    for rank in 0..2 {
        let bytes = std::fs::read(checkpoint.path.join(format!("part-{rank}"))).expect("the file can be read");
        assert_eq!(bytes, content(step, rank), "step {step}: the part of rank {rank} has wrong bytes");
    }
}

#[test]
fn new_run_has_a_configuration_and_no_checkpoint() {
    let home = Home::new();
    let opened = home.try_open(Files::real()).expect("the run can be opened");
    assert!(opened.is_new && opened.changes.is_empty());
    assert_eq!(opened.folder.resume_point().expect("the checkpoints can be read").checkpoint, None);
    drop(opened);
    let again = home.try_open(Files::real()).expect("the run can be opened");
    assert!(!again.is_new && again.changes.is_empty(), "{again:?}");
    let text = std::fs::read_to_string(home.run().join("config.toml")).expect("the file can be read");
    assert!(text.contains("degree = 47") && text.contains("run = \"run\""), "{text}");
}

#[test]
fn model_of_a_run_is_fixed_and_other_changes_are_listed() {
    let mut home = Home::new();
    save(&Files::real(), &home.open(), 1, None).expect("the checkpoint can be saved");
    let before = std::fs::read(home.run().join("config.toml")).expect("the file can be read");
    home.config.model.degree = 23;
    home.config.train.seed = 5;
    let error = home.try_open(Files::real()).expect_err("the model differs");
    assert_eq!(error.exit_code(), ExitCode::RunDiffers);
    let text = error.to_string();
    for part in ["model.degree is 23, but the run has 47", "train.seed is 5, but the run has 0", "--run NAME"] {
        assert!(text.contains(part), "{text}");
    }
    let kept = std::fs::read(home.run().join("config.toml")).expect("the file can be read");
    assert_eq!(kept, before, "config.toml was overwritten");

    home.config = RunConfig::default();
    home.config.checkpoint.keep = 2;
    home.config.train.learning_rate = 5e-4;
    let opened = home.try_open(Files::real()).expect("the change is allowed");
    assert_eq!(opened.changes, ["train.learning_rate changed from 0.0008 to 0.0005"]);
    let kept = std::fs::read(home.run().join("config.toml")).expect("the file can be read");
    assert_eq!(kept, before, "config.toml was overwritten before the workers accepted the change");
    let mut folder = opened.folder;
    folder.keep_configuration().expect("the test folder is writable");
    drop(folder);
    assert_eq!(home.try_open(Files::real()).expect("the run can be opened").changes, Vec::<String>::new());
}

#[test]
fn attempt_numbers_only_grow() {
    let home = Home::new();
    let mut folder = home.try_open(Files::real()).expect("the run can be opened").folder;
    assert_eq!((folder.begin_attempt(7).ok(), folder.begin_attempt(1).ok()), (Some(0), Some(1)));
    assert_eq!(folder.workers_max().ok(), Some(7));
    assert!(home.run().join("logs/1").is_dir());
    drop(folder);
    let mut folder = home.try_open(Files::real()).expect("the run can be opened").folder;
    assert_eq!(folder.begin_attempt(1).ok(), Some(2));
    std::fs::remove_dir_all(home.run().join("logs")).expect("the folder exists");
    assert_eq!(folder.begin_attempt(1).ok(), Some(3), "the attempt number is wrong after the logs were removed");
    std::fs::remove_dir_all(home.run().join("attempts")).expect("the folder exists");
    assert_eq!(folder.begin_attempt(1).ok(), Some(4), "the attempt number is wrong after the records were removed");
}

#[test]
fn late_parts_of_an_older_attempt_are_never_committed() {
    let home = Home::new();
    let mut folder = home.open();
    let old = [write_part(&Files::real(), folder.path(), 0, 10, 0).expect("the test folder is writable")];
    folder.begin_attempt(1).expect("an attempt can begin");
    for (attempt, parts) in [(0, &old), (1, &old)] {
        let error = folder.commit(attempt, 10, parts).expect_err("the parts are from an older attempt");
        assert_eq!(error.exit_code(), ExitCode::WorkerFailed);
        let reason = "got parts from step 10 of attempt 0, wanted parts from step 10 of attempt 1";
        assert!(error.to_string().contains(reason), "{error}");
    }
    assert_eq!(home.names("step-"), Vec::<String>::new());
    assert_eq!(folder.resume_point().expect("the checkpoints can be read").checkpoint, None);
    assert_eq!(home.names(".step-"), Vec::<String>::new(), "the partial folders were not removed");
}

#[test]
fn existing_step_is_not_replaced() {
    let home = Home::new();
    let mut folder = home.open();
    save(&Files::real(), &folder, 10, None).expect("the checkpoint can be committed");
    folder.begin_attempt(1).expect("an attempt can begin");
    let commit = save(&Files::real(), &folder, 10, None).expect("an existing checkpoint is not an error");
    assert!(matches!(&commit, Commit::AlreadyThere(path) if path.ends_with("step-00000010")), "{commit:?}");
    assert_eq!(home.names(".step-"), Vec::<String>::new());
    let point = folder.resume_point().expect("the checkpoints can be read");
    let point = point.checkpoint.expect("the run has a whole checkpoint");
    assert_eq!(point.manifest.attempt, 0);
}

#[test]
fn parts_that_differ_from_their_report_are_not_committed() {
    let home = Home::new();
    let folder = home.open();
    let refusal = |change: &dyn Fn(&mut Vec<PartsWritten>)| {
        let mut parts: Vec<PartsWritten> =
            (0..2).map(|rank| write_part(&Files::real(), folder.path(), 0, 10, rank).expect("no fault")).collect();
        change(&mut parts);
        let error = folder.commit(0, 10, &parts).expect_err("the parts are invalid");
        assert_eq!(home.names(".step-"), Vec::<String>::new(), "the partial folder was not removed");
        error.to_string()
    };
    assert!(refusal(&|parts| parts[1].files[0].bytes += 1).contains("part-1 has"));
    assert!(refusal(&|parts| parts[1].files[0].name = "part-0".into()).contains("part-0 was written twice"));
    assert!(refusal(&|parts| parts[1].files[0].name = "../lock".into()).contains("is not a valid name for a part"));
    assert!(
        refusal(&|parts| parts[1].files[0].name = "manifest.json".into()).contains("is not a valid name for a part")
    );
    assert!(refusal(&|parts| parts[1].files[0].name = "part-7".into()).contains("No such file"));
    assert!(refusal(&|parts| parts.clear()).contains("no rank wrote any file"));
    save(&Files::real(), &folder, 10, None).expect("the next save succeeds");
}

#[test]
fn second_launcher_is_refused_with_the_pid_of_the_first() {
    let home = Home::new();
    let folder = home.open();
    let error = home.try_open(Files::real()).expect_err("another launcher holds the run");
    assert_eq!(error.exit_code(), ExitCode::RunHeld);
    assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
    drop(folder);
    home.try_open(Files::real()).expect("the lock is free again");
}

#[test]
fn unwritable_run_folder_is_named() {
    let home = Home::new();
    std::fs::write(home.dir().join("file"), "").expect("the test folder is writable");
    // The first path is a file, not a folder. The second is in a file system in which no folder can be created.
    for dir in [home.dir().join("file"), PathBuf::from("/sys/locdiff")] {
        let error = RunFolder::open(Files::real(), &dir, "run", &home.config).expect_err("no folder can be created");
        assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
        assert!(error.to_string().contains(&dir.display().to_string()), "{error}");
    }
    let error = RunFolder::open(Files::real(), home.dir(), "../up", &home.config).expect_err("the name has a slash");
    assert_eq!(error.exit_code(), ExitCode::Config);
}

#[test]
fn newest_run_is_the_last_one_written_that_has_a_checkpoint() {
    let home = Home::new();
    assert_eq!(newest_run(home.dir()).expect_err("there are no runs").exit_code(), ExitCode::NoData);
    assert_eq!(newest_run(&home.dir().join("none")).expect_err("there are no runs").exit_code(), ExitCode::NoData);
    for (name, second) in [("a", 30), ("b", 20), ("c", 10), ("without", 40)] {
        RunFolder::open(Files::real(), home.dir(), name, &home.config).expect("the run can be opened");
        let path = home.dir().join(name).join("config.toml");
        let file = std::fs::File::options().write(true).open(path).expect("the run has a configuration");
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(second);
        file.set_modified(time).expect("the test owns the file");
    }
    assert!(newest_run(home.dir()).expect_err("no run has a checkpoint").to_string().contains("(runs without one: 4)"));
    for folder in ["a/step-00000001", "b/step-00000001", "c/step-00000001", "d"] {
        std::fs::create_dir(home.dir().join(folder)).expect("the parent folder exists");
    }
    assert_eq!(newest_run(home.dir()).expect("the folder contains runs"), home.dir().join("a"));
    std::fs::write(home.dir().join("b/latest"), "step-00000001\n").expect("the test folder is writable");
    assert_eq!(newest_run(home.dir()).expect("the folder contains runs"), home.dir().join("b"));
}

#[test]
fn events_are_appended_as_lines_and_failures_can_be_cleared() {
    let home = Home::new();
    let folder = home.open();
    folder.event("started", &serde_json::json!({ "attempt": 0 })).expect("the test folder is writable");
    let path = home.run().join("events.jsonl");
    let mut text = std::fs::read_to_string(&path).expect("the file can be read");
    text.push_str("{\"half");
    std::fs::write(&path, text).expect("the test folder is writable");
    folder.event("ended", &serde_json::json!({})).expect("the test folder is writable");
    let text = std::fs::read_to_string(&path).expect("the file can be read");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let last: serde_json::Value = serde_json::from_str(lines[2]).expect("the line is complete JSON");
    assert_eq!(last["event"], "ended");
    folder.clear_failure().expect("a missing file is not an error");
    folder.write_failure(&serde_json::json!({ "cause": "x" })).expect("the test folder is writable");
    assert!(home.run().join("failure.json").exists());
    folder.clear_failure().expect("the file exists");
    assert!(!home.run().join("failure.json").exists());
}

/// The steps that pruning must keep, computed independently of the launcher. Replays the commits and, after each
/// commit, keeps only the last `keep` steps and the step with the best score.
fn expected_steps(scores: &[Option<u32>], keep: usize) -> Vec<u64> {
    let mut kept: Vec<usize> = Vec::new();
    for index in 0..scores.len() {
        kept.push(index);
        let top = kept.iter().filter_map(|at| scores[*at]).max();
        let best = kept.iter().copied().rfind(|at| top.is_some() && scores[*at] == top);
        let recent = kept.len().saturating_sub(keep);
        let survivors = kept.iter().enumerate().filter(|(place, at)| *place >= recent || Some(**at) == best);
        kept = survivors.map(|(_, at)| *at).collect();
    }
    kept.into_iter().map(|index| index as u64 + 1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pruning_keeps_only_the_last_and_the_best_checkpoints(
        scores in proptest::collection::vec(proptest::option::of(0_u32..5), 1..9),
        keep in 1_u32..4,
    ) {
        let mut home = Home::new();
        home.config.checkpoint.keep = keep;
        let folder = home.open();
        let aside = home.run().join("step-00000000.corrupt");
        std::fs::create_dir(&aside).expect("the parent folder exists");
        for (index, score) in scores.iter().enumerate() {
            save(&Files::real(), &folder, index as u64 + 1, score.map(f64::from)).expect("the commit succeeds");
        }
        let rows = checkpoints(&home.run(), Depth::Checksums).expect("the checkpoints can be read");
        let whole: Vec<u64> = rows.iter().filter(|row| row.state == "whole").map(|row| row.step).collect();
        prop_assert_eq!(whole, expected_steps(&scores, keep as usize));
        prop_assert!(aside.exists(), "pruning removed a damaged checkpoint that was set aside");
        prop_assert_eq!(rows.len(), expected_steps(&scores, keep as usize).len() + 1);
        prop_assert!(home.names(".").is_empty(), "{:?}", home.names("."));
        let (newest, passed_over) = newest_whole(&home.run()).expect("the run has a whole checkpoint");
        prop_assert_eq!((newest.manifest.step, passed_over.len()), (scores.len() as u64, 0));
    }
}
