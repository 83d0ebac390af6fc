//! Tests of faults in file operations. A session opens a run, writes the parts of two ranks, commits them, and prunes.
//! Each test repeats the session for every file operation, and makes that operation fail. After each fault, the next
//! launcher must recover.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{Fault, Files};
use locdiff_launch::error::LaunchError;

use super::{Home, assert_contents, save};

/// Opens a run that has checkpoints at steps 20 and 30. Saves a checkpoint at step 40, which prunes step 20.
fn session(home: &Home, files: &Files) -> Result<(), LaunchError> {
    let mut folder = home.try_open(files.clone())?.folder;
    folder.begin_attempt()?;
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
