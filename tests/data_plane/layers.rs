//! Who may import whom. The table is the design; the test reads the sources.

use std::path::{Path, PathBuf};

/// Each row may import itself and the rows above it, and nothing else of the crate.
const ROWS: &[&[&str]] = &[
    &["geo", "native"],
    &["shdd", "comm"],
    &["diffusion", "model", "loss", "metrics", "draw"],
    &["geoclip", "tables"],
    &["shards", "checkpoint", "tensorboard", "retrieval"],
    &["infer"],
    &["train", "eval"],
    &["worker"],
];

/// I/O never knows the numbers that it carries.
const NEVER: &[(&[&str], &[&str])] =
    &[(&["shards", "checkpoint", "tensorboard", "retrieval"], &["diffusion", "model", "loss"])];

/// All that the data plane may use of the control plane.
const FROM_LAUNCHER: &[&str] = &["config", "protocol", "exit_code", "files", "VERSION", "REVISION"];

fn row(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

/// The first path segments that `text` names behind `root::`, also in `root::{a, b::c}`.
fn named(text: &str, root: &str) -> Vec<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for (start, _) in code.match_indices(&format!("{root}::")) {
        let before = code[..start].chars().next_back();
        if before.is_some_and(|character| character.is_alphanumeric() || character == '_') {
            continue;
        }
        let rest = &code[start + root.len() + 2..];
        match rest.strip_prefix('{') {
            None => found.push(word(rest)),
            Some(group) => found.extend(members(group)),
        }
    }
    found
}

fn word(text: &str) -> String {
    text.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// The top-level entries of `a, b::{c, d}, e}`.
fn members(group: &str) -> Vec<String> {
    let (mut depth, mut entries, mut entry) = (0, Vec::new(), String::new());
    for character in group.chars() {
        match character {
            '}' if depth == 0 => break,
            ',' if depth == 0 => entries.push(std::mem::take(&mut entry)),
            '{' => depth += 1,
            '}' => depth -= 1,
            _ if depth == 0 => entry.push(character),
            _ => {}
        }
    }
    entries.push(entry);
    entries.iter().map(|entry| word(entry.trim())).filter(|name| !name.is_empty()).collect()
}

/// What is wrong with `module` containing `text`.
fn wrong_arrows(module: &str, text: &str) -> Vec<String> {
    let Some(own) = row(module) else { return vec![format!("{module} is in no row")] };
    let mut wrong = Vec::new();
    for other in named(text, "crate").into_iter().filter(|other| other != module) {
        let never = NEVER.iter().any(|(from, to)| from.contains(&module) && to.contains(&other.as_str()));
        if never || row(&other).is_none_or(|other| other >= own) {
            wrong.push(format!("{module} -> {other}"));
        }
    }
    for item in named(text, "locdiff_launch") {
        if !FROM_LAUNCHER.contains(&item.as_str()) {
            wrong.push(format!("{module} -> locdiff_core::{item}"));
        }
    }
    wrong
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("readable").map(|entry| entry.expect("readable").path()) {
        if entry.is_dir() {
            files.extend(sources(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            files.push(entry);
        }
    }
    files
}

#[test]
fn imports_point_up_the_table() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in sources(&src) {
        let inside = file.strip_prefix(&src).expect("below src");
        let module = inside.components().next().expect("has a name").as_os_str().to_string_lossy().replace(".rs", "");
        if matches!(module.as_str(), "lib" | "bin") {
            continue;
        }
        let text = std::fs::read_to_string(&file).expect("readable");
        wrong.extend(wrong_arrows(&module, &text).into_iter().map(|arrow| format!("{}: {arrow}", inside.display())));
        checked += 1;
    }
    assert!(wrong.is_empty(), "arrows the wrong way:\n{}", wrong.join("\n"));
    assert!(checked >= 3, "only {checked} files were read");
}

#[test]
fn unsafe_code_stays_in_native() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in sources(&src).iter().filter(|file| !file.starts_with(src.join("native"))) {
        let text = std::fs::read_to_string(file).expect("readable");
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            assert!(!line.contains("unsafe "), "{}: {line}", file.display());
        }
    }
}

#[test]
fn the_test_sees_an_arrow_the_wrong_way() {
    assert_eq!(wrong_arrows("geo", "use crate::train::step;"), ["geo -> train"]);
    assert_eq!(wrong_arrows("shards", "use crate::{geo::Km, model::{A, B}};"), ["shards -> model"]);
    assert_eq!(wrong_arrows("native", "let x = crate::comm::f();"), ["native -> comm"]);
    assert_eq!(wrong_arrows("train", "use locdiff_core::supervisor;"), ["train -> locdiff_core::supervisor"]);
    assert_eq!(wrong_arrows("elsewhere", ""), ["elsewhere is in no row"]);
    assert!(wrong_arrows("train", "use crate::model::A;\n// crate::worker\nuse locdiff_core::config::X;").is_empty());
}
