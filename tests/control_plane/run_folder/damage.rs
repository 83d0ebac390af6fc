//! Damaged checkpoints are set aside and reported. A checkpoint that cannot be read stops the run and is not renamed.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::Files;
use locdiff_launch::run_folder::{Depth, RunFolder, checkpoints, newest_whole, whole_checkpoint};

use super::{Home, assert_contents, save};

/// A run with checkpoints at steps 10 and 20.
fn run_with_two_checkpoints() -> (Home, RunFolder) {
    let home = Home::new();
    let folder = home.open();
    save(&Files::real(), &folder, 10, Some(3.5)).expect("the checkpoint can be committed");
    save(&Files::real(), &folder, 20, Some(2.5)).expect("the checkpoint can be committed");
    (home, folder)
}

fn newest(home: &Home) -> PathBuf {
    home.run().join("step-00000020")
}

/// A description of the damage, a function that damages a checkpoint folder, and a part of the reason that must be
/// reported.
type Damage = (&'static str, fn(PathBuf), &'static str);

const DAMAGES: [Damage; 6] = [
    ("a flipped bit", |folder| change(folder.join("part-1"), |bytes| bytes[7] ^= 1), "part-1 has checksum "),
    ("a truncated file", |folder| change(folder.join("part-1"), |bytes| bytes.truncate(9)), "part-1 has 9 bytes"),
    ("a missing file", |folder| std::fs::remove_file(folder.join("part-0")).expect("it exists"), "part-0 is missing"),
    (
        "half a manifest",
        |folder| change(folder.join("manifest.json"), |bytes| bytes.truncate(30)),
        "manifest.json cannot be parsed",
    ),
    ("no manifest", |folder| std::fs::remove_file(folder.join("manifest.json")).expect("removed"), "no manifest.json"),
    (
        "a file name that leads out of the folder",
        |folder| {
            let path = folder.join("manifest.json");
            let text = std::fs::read_to_string(&path).expect("the file can be read").replace("part-0", "../lock");
            std::fs::write(path, text).expect("the test folder is writable");
        },
        "is not a valid file name",
    ),
];

fn change(path: PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(&path).expect("the file can be read");
    change(&mut bytes);
    std::fs::write(path, bytes).expect("the test folder is writable");
}

#[test]
fn damaged_checkpoint_is_set_aside_and_the_previous_one_is_used() {
    for (what, damage, reason) in DAMAGES {
        let (home, folder) = run_with_two_checkpoints();
        damage(newest(&home));
        // First call the functions that only read. They must not rename the damaged checkpoint.
        let (found, passed_over) = newest_whole(&home.run()).expect("one checkpoint is whole");
        assert_eq!((found.manifest.step, passed_over.len()), (10, 1), "{what}");
        assert!(passed_over[0].contains(reason), "{what}: {passed_over:?}");
        let rows = checkpoints(&home.run(), Depth::Checksums).expect("the checkpoints can be read");
        let (found, _) = whole_checkpoint(&home.run()).expect("the run has a whole checkpoint");
        assert_eq!(found.manifest.step, 10, "{what}");
        let (found, _) = whole_checkpoint(&home.run().join("step-00000010")).expect("the checkpoint is whole");
        assert_eq!(found.manifest.step, 10, "{what}");
        let error = whole_checkpoint(&newest(&home)).expect_err("the checkpoint is damaged");
        assert!(error.exit_code() == ExitCode::Corrupt && error.to_string().contains(reason), "{what}: {error}");
        assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), ["whole", "damaged"], "{what}");
        assert!(newest(&home).exists(), "{what}: the damaged checkpoint was renamed");

        let point = folder.resume_point().expect("one checkpoint is whole");
        let checkpoint = point.checkpoint.clone().expect("the run has a whole checkpoint");
        assert_contents(&checkpoint);
        assert_eq!((checkpoint.manifest.step, point.best_score), (10, Some(3.5)), "{what}");
        assert!(point.set_aside[0].contains(reason) && point.set_aside[0].contains("step-00000020"), "{point:?}");
        assert_eq!(home.names("step-"), ["step-00000010", "step-00000020.corrupt"], "{what}");
        let latest = std::fs::read_to_string(home.run().join("latest")).expect("the file can be read");
        assert_eq!(latest, "step-00000010\n", "{what}");

        // Save and damage the same step again. Pruning must keep both damaged copies.
        save(&Files::real(), &folder, 20, None).expect("the checkpoint can be committed");
        damage(newest(&home));
        folder.resume_point().expect("one checkpoint is whole");
        for step in [30, 40, 50] {
            save(&Files::real(), &folder, step, None).expect("the checkpoint can be committed");
        }
        let aside = ["step-00000020.corrupt", "step-00000020.corrupt.1"];
        let kept = [&["step-00000010"][..], &aside, &["step-00000040", "step-00000050"]].concat();
        assert_eq!(home.names("step-"), kept, "{what}: wrong checkpoints were kept; step 10 has the best score");
    }
}

#[test]
fn run_with_only_damaged_checkpoints_never_starts_over() {
    let (home, folder) = run_with_two_checkpoints();
    for step in ["step-00000010", "step-00000020"] {
        change(home.run().join(step).join("part-0"), |bytes| bytes[0] ^= 1);
    }
    assert_eq!(newest_whole(&home.run()).expect_err("no checkpoint is whole").exit_code(), ExitCode::Corrupt);
    for time in ["first", "second"] {
        let error = folder.resume_point().expect_err("no checkpoint is whole");
        assert_eq!(error.exit_code(), ExitCode::Corrupt, "{time}: {error}");
        for part in ["step-00000010", "step-00000020", "--run NAME"] {
            assert!(error.to_string().contains(part), "{time}: {error}");
        }
    }
    assert_eq!(home.names("step-"), ["step-00000010.corrupt", "step-00000020.corrupt"]);
}

#[test]
fn unreadable_checkpoint_stops_the_run_and_is_not_renamed() {
    for name in ["part-1", "manifest.json"] {
        let (home, folder) = run_with_two_checkpoints();
        let path = newest(&home).join(name);
        std::fs::remove_file(&path).expect("the file exists");
        std::fs::create_dir(&path).expect("the parent folder exists");
        let resumed = folder.resume_point().expect_err("a file cannot be read");
        let found = newest_whole(&home.run()).expect_err("a file cannot be read");
        for error in [resumed, found] {
            assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
            assert!(error.to_string().starts_with(&format!("{}: ", path.display())), "{error}");
        }
        assert_eq!(home.names("step-"), ["step-00000010", "step-00000020"]);
    }
}

#[test]
fn checkpoint_of_a_later_version_is_refused_but_not_set_aside() {
    let (home, folder) = run_with_two_checkpoints();
    let path = newest(&home).join("manifest.json");
    let text = std::fs::read_to_string(&path).expect("the file can be read").replace("\"format\": 1", "\"format\": 2");
    std::fs::write(path, text.replace("\"attempt\"", "\"generation\"")).expect("the test folder is writable");
    let error = folder.resume_point().expect_err("the checkpoint cannot be used");
    assert_eq!(error.exit_code(), ExitCode::BadData, "{error}");
    assert!(error.to_string().contains("format 2 is from a later version, wanted 1"), "{error}");
    assert_eq!(home.names("step-"), ["step-00000010", "step-00000020"]);
}

/// The next attempt lists damaged checkpoints too, so that a copy can be put in their place, and that a run whose
/// checkpoints are all damaged does not start over.
#[test]
fn damaged_checkpoint_is_damaged_not_stale_and_its_copy_counts() {
    for (what, damage, _) in DAMAGES {
        let (home, folder) = run_with_two_checkpoints();
        drop(folder);
        let oldest = home.run().join("step-00000010");
        let copy = home.dir().join("copy");
        let status = std::process::Command::new("cp").arg("-r").args([&newest(&home), &copy]).status();
        assert!(status.expect("cp starts").success());
        damage(newest(&home));
        damage(oldest);
        std::fs::remove_file(home.run().join("latest")).expect("the file exists");
        let folder = home.open();
        let error = folder.resume_point().expect_err("no checkpoint is whole");
        assert_eq!(error.exit_code(), ExitCode::Corrupt, "{what}: {error}");
        assert_eq!(home.names("step-"), ["step-00000010.corrupt", "step-00000020.corrupt"], "{what}");
        drop(folder);
        std::fs::rename(&copy, newest(&home)).expect("the name is free");
        let point = home.open().resume_point().expect("a checkpoint is whole");
        assert_contents(&point.checkpoint.expect("the copy counts"));
    }
}
