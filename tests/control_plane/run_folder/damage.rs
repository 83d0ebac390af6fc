//! Damaged checkpoints are set aside and named; what cannot be read is left alone.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::Files;
use locdiff_launch::run_folder::{Depth, RunFolder, checkpoints, newest_whole, whole_checkpoint};

use super::{Home, is_what_was_written, save};

/// A run with the checkpoints 10 and 20.
fn two() -> (Home, RunFolder) {
    let home = Home::new();
    let folder = home.open();
    save(&Files::real(), &folder, 10, Some(3.5)).expect("committed");
    save(&Files::real(), &folder, 20, Some(2.5)).expect("committed");
    (home, folder)
}

fn newest(home: &Home) -> PathBuf {
    home.run().join("step-00000020")
}

/// Does something to the newest checkpoint, and says what the reason must tell.
type Damage = (&'static str, fn(PathBuf), &'static str);

const DAMAGES: [Damage; 6] = [
    ("a flipped bit", |folder| change(folder.join("part-1"), |bytes| bytes[7] ^= 1), "part-1: xxh3 is "),
    ("a file cut short", |folder| change(folder.join("part-1"), |bytes| bytes.truncate(9)), "part-1 has 9 bytes"),
    ("a missing file", |folder| std::fs::remove_file(folder.join("part-0")).expect("removed"), "part-0 is missing"),
    (
        "half a manifest",
        |folder| change(folder.join("manifest.json"), |bytes| bytes.truncate(30)),
        "manifest.json cannot be understood",
    ),
    ("no manifest", |folder| std::fs::remove_file(folder.join("manifest.json")).expect("removed"), "no manifest.json"),
    (
        "a name that leads elsewhere",
        |folder| {
            let path = folder.join("manifest.json");
            let text = std::fs::read_to_string(&path).expect("readable").replace("part-0", "../lock");
            std::fs::write(path, text).expect("written");
        },
        "is no plain name",
    ),
];

fn change(path: PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(&path).expect("readable");
    change(&mut bytes);
    std::fs::write(path, bytes).expect("written");
}

#[test]
fn damage_is_set_aside_and_named_and_the_one_before_is_used() {
    for (what, damage, reason) in DAMAGES {
        let (home, folder) = two();
        damage(newest(&home));
        // Reading verbs first: they rename nothing.
        let (found, passed_over) = newest_whole(&home.run()).expect("one is whole");
        assert_eq!((found.manifest.step, passed_over.len()), (10, 1), "{what}");
        assert!(passed_over[0].contains(reason), "{what}: {passed_over:?}");
        let rows = checkpoints(&home.run(), Depth::Checksums).expect("readable");
        let (found, _) = whole_checkpoint(&home.run()).expect("of a run, the newest whole one");
        assert_eq!(found.manifest.step, 10, "{what}");
        let (found, _) = whole_checkpoint(&home.run().join("step-00000010")).expect("itself");
        assert_eq!(found.manifest.step, 10, "{what}");
        let error = whole_checkpoint(&newest(&home)).expect_err("itself, whatever lies beside it");
        assert!(error.exit_code() == ExitCode::Corrupt && error.to_string().contains(reason), "{what}: {error}");
        assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), ["whole", "damaged"], "{what}");
        assert!(newest(&home).exists(), "{what}: nothing is renamed");

        let point = folder.resume_point().expect("one is whole");
        let checkpoint = point.checkpoint.clone().expect("one");
        is_what_was_written(&checkpoint);
        assert_eq!((checkpoint.manifest.step, point.best_score), (10, Some(3.5)), "{what}");
        assert!(point.set_aside[0].contains(reason) && point.set_aside[0].contains("step-00000020"), "{point:?}");
        assert_eq!(home.names("step-"), ["step-00000010", "step-00000020.corrupt"], "{what}");
        let latest = std::fs::read_to_string(home.run().join("latest")).expect("readable");
        assert_eq!(latest, "step-00000010\n", "{what}");

        // The same step again, damaged again: both are kept, whatever is pruned.
        save(&Files::real(), &folder, 20, None).expect("committed");
        damage(newest(&home));
        folder.resume_point().expect("one is whole");
        for step in [30, 40, 50] {
            save(&Files::real(), &folder, step, None).expect("committed");
        }
        let aside = ["step-00000020.corrupt", "step-00000020.corrupt.1"];
        let kept = [&["step-00000010"][..], &aside, &["step-00000040", "step-00000050"]].concat();
        assert_eq!(home.names("step-"), kept, "{what}: 10 is the best");
    }
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_never_begins_anew() {
    let (home, folder) = two();
    for step in ["step-00000010", "step-00000020"] {
        change(home.run().join(step).join("part-0"), |bytes| bytes[0] ^= 1);
    }
    assert_eq!(newest_whole(&home.run()).expect_err("none").exit_code(), ExitCode::Corrupt);
    for time in ["first", "second"] {
        let error = folder.resume_point().expect_err("none is whole");
        assert_eq!(error.exit_code(), ExitCode::Corrupt, "{time}: {error}");
        for part in ["step-00000010", "step-00000020", "--run NAME"] {
            assert!(error.to_string().contains(part), "{time}: {error}");
        }
    }
    assert_eq!(home.names("step-"), ["step-00000010.corrupt", "step-00000020.corrupt"]);
}

#[test]
fn what_cannot_be_read_stops_the_run_and_nothing_is_renamed() {
    for name in ["part-1", "manifest.json"] {
        let (home, folder) = two();
        let path = newest(&home).join(name);
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        for error in [folder.resume_point().expect_err("refused"), newest_whole(&home.run()).expect_err("refused")] {
            assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
            assert!(error.to_string().starts_with(&format!("{}: ", path.display())), "{error}");
        }
        assert_eq!(home.names("step-"), ["step-00000010", "step-00000020"]);
    }
}

#[test]
fn a_checkpoint_of_a_later_version_is_refused_not_condemned() {
    let (home, folder) = two();
    let path = newest(&home).join("manifest.json");
    let text = std::fs::read_to_string(&path).expect("readable").replace("\"format\": 1", "\"format\": 2");
    std::fs::write(path, text.replace("\"attempt\"", "\"generation\"")).expect("written");
    let error = folder.resume_point().expect_err("refused");
    assert_eq!(error.exit_code(), ExitCode::BadData, "{error}");
    assert!(error.to_string().contains("format 2 is that of a later version, wanted 1"), "{error}");
    assert_eq!(home.names("step-"), ["step-00000010", "step-00000020"]);
}
