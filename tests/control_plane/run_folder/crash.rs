//! Tests of faults in file operations. A session opens a run, writes the parts of two ranks, commits them, and prunes.
//! Each test repeats the session for every file operation, and makes that operation fail. After each fault, the next
//! launcher must recover.

use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{Fault, Files};
use locdiff_launch::error::LaunchError;
use locdiff_launch::run_folder::{Depth, RunFolder, checkpoints, newest_whole};

use super::{Home, assert_contents, save};

/// Opens a run that has checkpoints at steps 20 and 30. Saves a checkpoint at step 40, which prunes step 20.
fn session(home: &Home, files: &Files) -> Result<(), LaunchError> {
    let mut folder = home.try_open(files.clone())?.folder;
    folder.begin_attempt(1)?;
    folder.resume_point()?;
    let saved = save(files, &folder, 40, None);
    if saved.is_err() {
        // Clean the run as `train` does after its workers have ended.
        let _ = folder.clean();
    }
    saved.map(drop)
}

/// Checks that the next launcher finds no damage and can save a checkpoint. If the session has `saved` its checkpoint,
/// the newest checkpoint must be at step 40, otherwise at step 30 or 40. `case` names the fault.
fn assert_recovers(home: &Home, case: &str, saved: bool) {
    let folder = home.open();
    let point = folder.resume_point().expect("the checkpoints can be read");
    assert_eq!(point.set_aside, Vec::<String>::new(), "{case}");
    let newest = point.checkpoint.expect("the run always has a checkpoint");
    assert_contents(&newest);
    let step = newest.manifest.step;
    assert!(step == 40 || (step == 30 && !saved), "{case}: the newest checkpoint is at step {step}");
    assert_eq!(home.names("."), Vec::<String>::new(), "{case}: hidden files are left");
    let latest = std::fs::read_to_string(home.run().join("latest")).expect("the file can be read");
    assert_eq!(latest, format!("step-{step:08}\n"), "{case}");
    save(&Files::real(), &folder, 50, None).expect("the next save succeeds");
    assert_eq!(home.names("step-"), [format!("step-{step:08}"), "step-00000050".into()], "{case}");
}

fn fail_everywhere(fault: Fault) {
    let mut committed = 0;
    for operation in 0_u64.. {
        assert!(operation < 500, "a session has 500 or more file operations");
        let home = Home::new();
        let before = home.open();
        for step in [20, 30] {
            save(&Files::real(), &before, step, None).expect("the checkpoint can be committed");
        }
        drop(before);
        let files = Files::failing(fault, operation);
        let ended = session(&home, &files);
        if let Err(error) = &ended {
            assert_eq!(error.exit_code(), ExitCode::Io, "{fault:?} at operation {operation}: {error}");
        }
        if fault == Fault::DiskFull {
            assert_eq!(
                home.names(".step-"),
                Vec::<String>::new(),
                "a partial folder is left after a full disk at operation {operation}"
            );
        }
        committed += u64::from(ended.is_err() && home.run().join("step-00000040").exists());
        assert_recovers(&home, &format!("{fault:?} at operation {operation}"), ended.is_ok());
        if !files.has_failed() {
            assert!(
                operation > 20 && ended.is_ok(),
                "the session without a fault gave {ended:?} after {operation} operations, wanted Ok after more than 20"
            );
            break;
        }
    }
    assert!(committed > 0, "every fault came before the commit");
}

#[test]
fn crash_at_any_operation_loses_at_most_one_checkpoint() {
    fail_everywhere(Fault::Crash);
}

#[test]
fn power_loss_at_any_operation_loses_at_most_one_checkpoint() {
    fail_everywhere(Fault::PowerLoss);
}

#[test]
fn full_disk_at_any_operation_loses_at_most_one_checkpoint() {
    fail_everywhere(Fault::DiskFull);
}

/// What counts in a run: the step and the attempt of each checkpoint.
fn counted(home: &Home) -> Vec<(u64, Option<u32>)> {
    let rows = checkpoints(&home.run(), Depth::Checksums).expect("the checkpoints can be read");
    rows.iter().filter(|row| row.state == "whole").map(|row| (row.step, row.attempt)).collect()
}

/// Resumes the run although another launcher holds the lock, as happens if a file server gives the lock of a machine that
/// is cut off to another. Returns the folder and the step from which the run resumes.
fn take_over(dir: &Path, config: &RunConfig) -> (RunFolder, u64) {
    std::fs::remove_file(dir.join("run/lock")).expect("the run has a lock");
    let mut folder = RunFolder::open(Files::real(), dir, "run", config).expect("the run can be opened").folder;
    folder.begin_attempt(1).expect("an attempt can begin");
    let point = folder.resume_point().expect("the checkpoints can be read");
    (folder, point.checkpoint.expect("the run has a checkpoint").manifest.step)
}

/// A launcher is stopped before each of its file operations in turn. Another launcher resumes the run, and `trains` or
/// only begins. Then the first one wakes up.
fn wake_up_after_others(trains: bool) {
    let mut refused = 0;
    for operation in 0_u64.. {
        assert!(operation < 500, "a session has 500 or more file operations");
        let home = Home::new();
        let before = home.open();
        for step in [20, 30] {
            save(&Files::real(), &before, step, None).expect("the checkpoint can be committed");
        }
        drop(before);
        let (sender, resumed) = std::sync::mpsc::channel();
        let (dir, config) = (home.dir().to_owned(), home.config.clone());
        let files = Files::pausing(operation, move || {
            if !dir.join("run/attempts/1").exists() {
                // The first launcher has not begun, so it would be the one that takes over.
                return;
            }
            let (folder, from) = take_over(&dir, &config);
            if trains {
                save(&Files::real(), &folder, 50, None).expect("the checkpoint can be committed");
            }
            sender.send((folder, from)).expect("the test waits");
        });
        let ended = session(&home, &files);
        let Ok((folder, from)) = resumed.try_recv() else {
            ended.expect("a session without another launcher succeeds");
            if !files.has_failed() {
                break;
            }
            continue;
        };
        let case = format!("stopped before operation {operation}, resumed from step {from}");
        let attempt = folder.attempt().expect("the attempt has begun");
        if let Err(error) = &ended {
            assert!([ExitCode::RunHeld, ExitCode::Io].contains(&error.exit_code()), "{case}: {error}");
            refused += u32::from(error.exit_code() == ExitCode::RunHeld);
        }
        assert!(counted(&home).iter().any(|(step, _)| *step == from), "{case}: the resume point was removed");
        if trains {
            let kept: Vec<u64> = counted(&home).iter().map(|(step, _)| *step).collect();
            assert_eq!(kept, [from, 50], "{case}");
        }
        let next = if trains { 60 } else { 40 };
        if next > from {
            save(&Files::real(), &folder, next, None).expect("the checkpoint can be committed");
            assert_eq!(counted(&home).last(), Some(&(next, Some(attempt))), "{case}");
            let latest = std::fs::read_to_string(home.run().join("latest")).expect("the file can be read");
            assert_eq!(latest, format!("step-{next:08}\n"), "{case}");
        }
        let newest = newest_whole(&home.run()).expect("the run has a whole checkpoint").0.manifest;
        assert_eq!(newest.step, next.max(from), "{case}");
        drop(folder);
        let (_, step) = take_over(home.dir(), &home.config);
        assert_eq!(step, next.max(from), "{case}");
    }
    assert!(refused > 0, "no session was stopped in the middle of its commit");
}

#[test]
fn launcher_whose_run_was_taken_over_does_not_write_its_configuration() {
    let home = Home::new();
    save(&Files::real(), &home.open(), 20, None).expect("the checkpoint can be committed");
    let mut other = home.config.clone();
    other.train.log_every += 1;
    let mut old = RunFolder::open(Files::real(), home.dir(), "run", &other).expect("the run can be opened").folder;
    old.begin_attempt(1).expect("an attempt can begin");
    let written = || std::fs::read_to_string(home.run().join("config.toml")).expect("the file can be read");
    let before = written();
    let (_folder, _) = take_over(home.dir(), &home.config);
    let refused = old.keep_configuration().expect_err("another launcher has the run");
    assert_eq!((refused.exit_code(), written()), (ExitCode::RunHeld, before));
}

#[test]
fn launcher_that_wakes_up_after_another_has_resumed_changes_nothing() {
    wake_up_after_others(false);
}

#[test]
fn launcher_that_wakes_up_after_another_has_trained_changes_nothing() {
    wake_up_after_others(true);
}
