//! A fault at every file operation of a launcher's life, from opening the run over the parts of two ranks to the last file
//! that is pruned.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{Fault, Files};
use locdiff_launch::error::LaunchError;

use super::{Home, is_what_was_written, save};

/// Opens a run that has the checkpoints 20 and 30, and saves 40, for which 20 goes.
fn session(home: &Home, files: &Files) -> Result<(), LaunchError> {
    let mut folder = home.try_open(files.clone())?.folder;
    folder.begin_attempt()?;
    folder.resume_point()?;
    let saved = save(files, &folder, 40, None);
    if saved.is_err() {
        // As a launcher does when its workers have ended.
        let _ = folder.clean();
    }
    saved.map(drop)
}

/// What the next launcher finds: nothing damaged, the newest is N or N-1, and everything works again.
fn recovers(home: &Home, what: &str, saved: bool) {
    let folder = home.open();
    let point = folder.resume_point().expect("readable");
    assert_eq!(point.set_aside, Vec::<String>::new(), "{what}");
    let newest = point.checkpoint.expect("never none");
    is_what_was_written(&newest);
    let step = newest.manifest.step;
    assert!(step == 40 || (step == 30 && !saved), "{what}: step {step}");
    assert_eq!(home.names("."), Vec::<String>::new(), "{what}: leftovers");
    let latest = std::fs::read_to_string(home.run().join("latest")).expect("readable");
    assert_eq!(latest, format!("step-{step:08}\n"), "{what}");
    save(&Files::real(), &folder, 50, None).expect("the next save works");
    assert_eq!(home.names("step-"), [format!("step-{step:08}"), "step-00000050".into()], "{what}");
}

fn fail_everywhere(fault: Fault) {
    let mut committed = 0;
    for operation in 0_u64.. {
        assert!(operation < 500, "a session never passes");
        let home = Home::new();
        let before = home.open();
        for step in [20, 30] {
            save(&Files::real(), &before, step, None).expect("committed");
        }
        drop(before);
        let files = Files::failing(fault, operation);
        let ended = session(&home, &files);
        if let Err(error) = &ended {
            assert_eq!(error.exit_code(), ExitCode::Io, "{fault:?} at {operation}: {error}");
        }
        if fault == Fault::DiskFull {
            assert_eq!(home.names(".step-"), Vec::<String>::new(), "at {operation}: a full disk is not left fuller");
        }
        committed += u64::from(ended.is_err() && home.run().join("step-00000040").exists());
        recovers(&home, &format!("{fault:?} at {operation}"), ended.is_ok());
        if !files.has_failed() {
            assert!(operation > 20 && ended.is_ok(), "only {operation} operations were tried");
            break;
        }
    }
    assert!(committed > 0, "no fault struck between the commit and the end");
}

#[test]
fn a_crash_at_any_operation_costs_one_checkpoint_at_most() {
    fail_everywhere(Fault::Crash);
}

#[test]
fn a_power_loss_at_any_operation_costs_one_checkpoint_at_most() {
    fail_everywhere(Fault::PowerLoss);
}

#[test]
fn a_full_disk_at_any_operation_costs_one_checkpoint_at_most() {
    fail_everywhere(Fault::DiskFull);
}
