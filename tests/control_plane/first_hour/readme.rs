//! Tests of the commands in README.md and docs/OPERATIONS.md: a reader can type them as they stand.

use std::process::Command;

use clap::Parser as _;
use locdiff_core::config;
use locdiff_core::exit_code::ExitCode;
use locdiff_launch::cli::Cli;

use crate::small_shards;
use crate::stage::{Ran, Stage, Worker};

const README: &str = include_str!("../../../README.md");
const OPERATIONS: &str = include_str!("../../../docs/OPERATIONS.md");

/// The sentence of the README that comes before the commands for machines without a GPU.
const BEFORE_COMMANDS: &str = "run these commands in this order after `make demo`";

/// Settings that make the README's training small. The run stores them, so later commands need no settings. The
/// embeddings of the small shards are not GeoCLIP's, so retrieval searches the training rows.
const SMALL: &str = "--set model.degree=8 --set loss.anchors=64 --set train.global_batch=64 --set train.steps=4 \
    --set eval.samples=2 --set eval.sampler_steps=2 --set eval.anchors=grid --set eval.grid_points=2000 \
    --set retrieval.head=knn";

/// The fenced blocks of a page.
fn blocks(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").skip(1).step_by(2)
}

/// The `locdiff-launch` commands of a block, without the name of the program and without comments.
fn commands(block: &str) -> Vec<String> {
    let block = block.replace("\\\n", " ");
    let without_comment = |line: &str| line.split(" #").next().unwrap_or_default().trim().to_owned();
    block.lines().filter_map(|line| line.trim().strip_prefix("locdiff-launch ")).map(without_comment).collect()
}

#[test]
fn readme_commands_run_from_top_to_bottom() {
    let stage = Stage::new(Worker::Real);
    for (name, rows) in [("train", 0..128), ("validation", 200..232), ("test", 300..332)] {
        small_shards::build(&stage, &format!("demo/{name}"), rows, 1, false);
    }
    let (_, after) = README.split_once(BEFORE_COMMANDS).expect("the README has the sentence before the commands");
    let lines = commands(blocks(after).next().expect("a block of commands follows"));
    // For each command: a part of its text, and a part of its output.
    let wanted = [
        ("doctor", "worker"),
        ("config show", "\"shards/demo/train\""),
        ("train", "checkpoints/first"),
        ("train", "is at its last step, 4 of 4"),
        ("runs", "4 of 4"),
        ("eval --hybrid", "LocDiff-H"),
        ("report", "eval/report.html"),
        ("checkpoint list", "step-00000004"),
        ("checkpoint export", "averaged weights of step 4"),
    ];
    assert_eq!(lines.len(), wanted.len(), "{lines:?}");
    for (number, (line, (command, effect))) in lines.iter().zip(wanted).enumerate() {
        assert!(line.contains(command), "command {number} of the README is `{line}`, wanted {command}");
        let is_first_training = command == "train" && !stage.path().join("checkpoints").exists();
        let ran = stage.run(&if is_first_training { format!("{line} {SMALL}") } else { line.clone() });
        ran.exits_with(ExitCode::Success);
        assert!(ran.stdout.contains(effect), "{line}: missing {effect:?} in stdout:\n{}", ran.stdout);
    }
    assert!(stage.path().join("first.safetensors").exists());
}

#[test]
fn flags_and_keys_of_all_documented_commands_exist() {
    let lines: Vec<String> = blocks(README).chain(blocks(OPERATIONS)).flat_map(commands).collect();
    assert!(lines.len() > 30, "only {} commands were found: {lines:?}", lines.len());
    for line in lines {
        let words = || std::iter::once("locdiff-launch".to_owned()).chain(line.split_whitespace().map(str::to_owned));
        let parsed = Cli::try_parse_from(words()).and_then(|cli| cli.validate(words()));
        let cli = parsed.unwrap_or_else(|error| panic!("`locdiff-launch {line}`: {error}"));
        if cli.global.config.is_empty() {
            config::load_for(&cli.global.layers("demo"), &[])
                .unwrap_or_else(|error| panic!("`locdiff-launch {line}`: {error}"));
        }
    }
}

#[test]
fn help_names_the_manual_that_was_installed() {
    let stage = Stage::new(Worker::None);
    assert!(stage.run("--help").stdout.contains("docs/OPERATIONS.md"));
    let folder = stage.path().canonicalize().expect("the stage exists");
    let (program, manual) = (folder.join("bin/locdiff-launch"), folder.join("share/doc/locdiff-launch/OPERATIONS.md"));
    for path in [&program, &manual] {
        std::fs::create_dir_all(path.parent().expect("the path has a folder")).expect("the stage is writable");
    }
    std::fs::rename(folder.join("locdiff-launch"), &program).expect("the stage is writable");
    std::fs::write(&manual, OPERATIONS).expect("the stage is writable");
    let help = Ran::from(Command::new(&program).arg("--help").output().expect("the launcher can be started"));
    assert!(help.stdout.contains(&manual.display().to_string()), "{}", help.stdout);
}
