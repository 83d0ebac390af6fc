//! Tests of what people see: tables that fit the terminal, the lines before and after a training, and where TensorBoard
//! finds a run.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use locdiff_core::exit_code::ExitCode;

use crate::small_shards;
use crate::stage::{Ran, Stage, Worker};

/// A name that does not fit into the first column of a list.
const LONG_NAME: &str = "the-first-run-with-photos-of-the-northern-hemisphere-at-night";

/// Settings for a model that trains in about a second. Retrieval searches the training rows, so GeoCLIP is not needed.
const SMALL: &str = "--device cpu --workers 1 --set model.degree=8 --set loss.anchors=64 --set train.global_batch=64 \
    --set train.warmup_steps=0 --set shards.train=shards/train --set shards.test=shards/test \
    --set shards.validation=\"\" --set eval.samples=2 --set eval.sampler_steps=2 --set eval.anchors=grid \
    --set eval.grid_points=2000 --set retrieval.head=knn --set retrieval.radius_km=2000";

fn stage() -> Stage {
    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "train", 0..128, 1, false);
    small_shards::build(&stage, "test", 1000..1200, 1, false);
    stage
}

fn run_at(stage: &Stage, columns: &str, line: &str) -> Ran {
    let output = stage.command(line).env("COLUMNS", columns).output();
    Ran::from(output.expect("the launcher can be started"))
}

/// Runs a command in a terminal of 130 columns and prints its output.
const IN_A_TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 130, 0, 0))
    os.environ["TERM"] = "xterm"
    os.execv(sys.argv[1], sys.argv[1:])
output = b""
try:
    while piece := os.read(terminal, 4096):
        output += piece
except OSError:
    pass
sys.stdout.buffer.write(output)
sys.exit(os.waitpid(pid, 0)[1] >> 8)
"#;

/// Fails if a line of stdout is wider than `columns`. Paths and commands may be wider, because they cannot be broken.
#[track_caller]
fn assert_fits(ran: &Ran, columns: usize) {
    ran.exits_with(ExitCode::Success);
    for line in ran.stdout.lines().filter(|line| line.trim().contains(' ') && !line.starts_with("  locdiff-launch ")) {
        assert!(line.chars().count() <= columns, "wider than {columns} columns: {line}\n{}", ran.stdout);
    }
}

/// The words of a text that contain a digit.
fn numbers(text: &str) -> BTreeSet<&str> {
    text.split_whitespace().filter(|word| word.contains(|letter: char| letter.is_ascii_digit())).collect()
}

#[test]
fn training_ends_with_files_and_commands_and_tables_fit_the_terminal() {
    let stage = stage();
    let flags = format!("{SMALL} --run {LONG_NAME} --set train.steps=8 --set checkpoint.every=4");
    let trained = run_at(&stage, "80", &format!("{flags} --set eval.after_train=true train"));
    assert_fits(&trained, 80);
    let after = |heading: &str| {
        let rest = trained.stdout.split_once(&format!("\n{heading}:\n  "));
        rest.and_then(|(_, rest)| rest.lines().next()).unwrap_or_else(|| panic!("no {heading}: {}", trained.stdout))
    };
    for (heading, name) in [("answers", "predictions-locdiff-h.csv"), ("report", "report.txt")] {
        let path = Path::new(after(heading));
        assert!(path.ends_with(name) && stage.path().join(path).exists(), "{}", path.display());
    }
    let further = format!("locdiff-launch --run {LONG_NAME} --set train.steps=16 train");
    let ending = format!("\nto go on:\n  {further}\n  tensorboard --logdir checkpoints\n");
    assert!(trained.stdout.ends_with(&ending), "{}", trained.stdout);

    let [narrow, wide] = [80, 120].map(|columns: usize| {
        let ran = run_at(&stage, &columns.to_string(), "--device cpu --workers 1 eval --hybrid");
        assert_fits(&ran, columns);
        ran.stdout
    });
    assert_eq!(numbers(&narrow), numbers(&wide), "{narrow}\n{wide}");
    assert!(narrow.contains("\nother scores ") && !wide.contains("\nother scores "), "{narrow}\n{wide}");
    assert!(narrow.contains("\nLocDiff-H minus LocDiff  "), "{narrow}");
    let report = std::fs::read_to_string(stage.path().join(after("report"))).expect("the report exists");
    let (heading, rest) = report.split_once('\n').expect("the report has several lines");
    assert!(heading.ends_with("/step-00000008, retrieval head knn"), "{heading}");
    assert!(wide.contains(rest.split_once("\nlocdiff-launch ").expect("the report names the version").0), "{report}");

    let launcher = stage.command("--device cpu --workers 1 eval --hybrid");
    let mut command = Command::new("python3");
    command.args(["-c", IN_A_TERMINAL]).arg(launcher.get_program()).args(launcher.get_args());
    command.current_dir(stage.path()).env("XDG_RUNTIME_DIR", stage.path()).env_remove("COLUMNS");
    let ran = Ran::from(command.output().expect("python3 can be started"));
    let shown = &ran.exits_with(ExitCode::Success).stdout;
    assert!(shown.contains("/200 photos located"), "no bar: {shown}");
    assert!(!shown.contains("\nother scores ") && numbers(shown).is_superset(&numbers(&wide)), "{shown}");

    for verb in ["runs", "checkpoint list", "status"] {
        let ran = run_at(&stage, "80", verb);
        assert_fits(&ran, 80);
        assert!(ran.stdout.contains(LONG_NAME), "{}", ran.stdout);
    }
}

#[test]
fn training_begins_with_its_size_and_tensorboard_calls_the_run_by_its_name() {
    let stage = stage();
    let many_epochs = "--set train.global_batch=128 --set train.steps=210 --set eval.after_train=false";
    let ran = stage.run(&format!("{SMALL} --run mine {many_epochs} train"));
    ran.exits_with(ExitCode::Success)
        .stderr_has(" M parameters, trained by 1 CPU worker(s) with autograd, because the device is the CPU")
        .stderr_has("128 rows with one view each from shards/train")
        .stderr_has("210 epochs of only 128 rows")
        .stderr_has("128 rows = 210.0 epochs");
    let bound = ran.stderr.lines().find(|line| line.ends_with(" for 210 steps, going by the speed of matrix products"));
    assert!(bound.is_some_and(|line| line.contains(" at least about ")), "{}", ran.stderr);
    let ending = "\nto go on:\n  locdiff-launch --run mine eval --hybrid\n  tensorboard --logdir checkpoints\n";
    assert!(ran.stdout.ends_with(ending), "{}", ran.stdout);
    let run = stage.path().join("checkpoints/mine");
    let has_events = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("events.out.tfevents."))
    };
    assert!(has_events(&run) && !run.join("tensorboard").exists());

    // A run from an older version has its events in the folder `tensorboard`. New events go there too, so that the
    // curves stay together.
    let own = run.join("tensorboard");
    std::fs::create_dir(&own).expect("the test folder is writable");
    for entry in std::fs::read_dir(&run).expect("the run has a folder").flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("events.out.tfevents.") {
            std::fs::rename(entry.path(), own.join(name)).expect("the test folder is writable");
        }
    }
    stage.run("--device cpu --run mine --set train.steps=212 train").exits_with(ExitCode::Success);
    assert!(has_events(&own) && !has_events(&run));
}
