//! The tables in this file say which modules may import which other modules, in all three crates. The tests compare the
//! sources with the tables.
//!
//! There are three rules:
//! - A module may import only modules from the rows above its own row in the table of its crate.
//! - The imports in [`NEVER`] are forbidden, although the tables would allow them.
//! - The files of a folder must not import each other in a cycle.
//!
//! An import of a re-exported name counts as an import of the file that defines the name. Test modules are ignored.

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use imports::Crate;

/// A crate and the rows of its layer table. A module may import modules from the rows above its own row, but no other
/// module from its own row or from the rows below.
struct Design {
    name: &'static str,
    source: &'static str,
    rows: &'static [&'static [&'static str]],
}

const CORE: Design = Design {
    name: "locdiff_core",
    source: "core/src",
    rows: &[
        &["calibration", "cgroup", "exit_code", "geo", "parallel", "pulse", "random", "stop", "text"],
        &["metrics"],
        &["config", "draw", "files", "tables"],
        &["predictions", "prior_file", "protocol", "tensorboard"],
        &["answers", "cells", "exported", "tuning"],
    ],
};

const LAUNCHER: Design = Design {
    name: "locdiff_launch",
    source: "launcher/src",
    rows: &[
        &["error", "gpus", "pulses", "terminal"],
        &["coordinator", "output", "run_folder"],
        &["cluster"],
        &["cli", "rendezvous"],
        &["report"],
        &["supervisor"],
        &["verbs"],
        &["main"],
    ],
};

const LOCDIFF: Design = Design {
    name: "locdiff",
    source: "src",
    rows: &[
        &["native"],
        &["comm", "shdd"],
        &["diffusion", "loss", "model"],
        &["geoclip"],
        &["checkpoint", "retrieval", "shards"],
        &["infer", "simulate"],
        &["methods"],
        &["eval", "train"],
        &["worker"],
        &["bin"],
    ],
};

/// Imports that are forbidden although the tables allow them. The modules of the first list must not import the modules
/// of the second list, because I/O and retrieval must not depend on the numerics.
const NEVER: &[(&[&str], &[&str])] = &[(&["checkpoint", "retrieval", "shards"], &["diffusion", "loss", "model"])];

/// Folders whose files may have import cycles, each with the reason for the exception.
const ALLOWED_CYCLES: &[(&str, &str)] = &[];

fn read(design: &Design) -> Crate {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(design.source);
    Crate::read(design.name, &root)
}

/// Describes the violation if `from` may not import `to`.
fn forbidden_import(design: &Design, from: &str, to: &str) -> Option<String> {
    let row = |module: &str| design.rows.iter().position(|row| row.contains(&module));
    let Some(own) = row(from) else { return Some(format!("no layer has the module `{from}`")) };
    let is_never = NEVER.iter().any(|(modules, others)| modules.contains(&from) && others.contains(&to));
    let is_above = row(to).is_some_and(|other| other < own);
    (from != to && (is_never || !is_above)).then(|| format!("{from} -> {to}"))
}

#[test]
fn imports_follow_the_layer_tables() {
    let mut wrong = Vec::new();
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        for (from, to) in read(design).imports() {
            // The rules do not apply to the crate root. The root re-exports all modules, and any module may use the
            // items of the root, such as the version.
            let (Some(from_module), Some(to_module)) = (from.first(), to.first()) else { continue };
            let violation = forbidden_import(design, from_module, to_module);
            wrong.extend(
                violation.map(|pair| format!("{}: {pair} ({} -> {})", design.name, from.join("::"), to.join("::"))),
            );
        }
    }
    assert!(wrong.is_empty(), "forbidden imports:\n{}", wrong.join("\n"));
}

#[test]
fn files_of_a_folder_have_no_import_cycles() {
    let mut cycles = Vec::new();
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        for (folder, cycle) in cycles_of(&read(design)) {
            let folder = format!("{}::{}", design.name, folder.join("::"));
            if !ALLOWED_CYCLES.iter().any(|(allowed, _)| *allowed == folder) {
                cycles.push(format!("{folder}: {}", cycle.join(" -> ")));
            }
        }
    }
    assert!(cycles.is_empty(), "import cycles:\n{}", cycles.join("\n"));
}

#[test]
fn every_source_file_is_checked() {
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(design.source);
        let on_disk: BTreeSet<_> = imports::sources(&root).into_iter().collect();
        let read: BTreeSet<_> = read(design).files().map(Path::to_owned).collect();
        assert_eq!(on_disk, read, "{}: not every source file was read", design.name);
        let in_rows: BTreeSet<&str> = design.rows.iter().flat_map(|row| row.iter().copied()).collect();
        let modules: BTreeSet<String> = read
            .iter()
            .filter_map(|file| imports::top_module(&root, file))
            .filter(|module| !module.ends_with("_tests"))
            .collect();
        assert_eq!(in_rows, modules.iter().map(String::as_str).collect(), "{}: table and modules differ", design.name);
    }
}

#[test]
fn no_folder_holds_more_than_fifteen_source_files() {
    const FILES_MAX: usize = 15;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: BTreeMap<_, usize> = BTreeMap::new();
    for source in ["core/src", "launcher/src", "src", "tests", "setup"] {
        for file in imports::files_below(&root.join(source), &["rs", "cpp", "h", "cu", "py"]) {
            *folders.entry(file.parent().expect("the file is below the root").to_owned()).or_default() += 1;
        }
    }
    let crowded: Vec<_> = folders.iter().filter(|(_, count)| **count > FILES_MAX).collect();
    assert!(crowded.is_empty(), "folders with more than {FILES_MAX} files: {crowded:?}");
}

#[test]
fn unsafe_code_stays_in_native_and_random() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let allowed = [root.join("src/native"), root.join("core/src/random")];
    for source in ["core/src", "launcher/src", "src"] {
        for file in imports::sources(&root.join(source)) {
            if allowed.iter().any(|folder| file.starts_with(folder)) {
                continue;
            }
            let text = std::fs::read_to_string(&file).expect("the source file can be read");
            for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
                assert!(
                    !line.contains("unsafe "),
                    "{} has unsafe code outside of the allowed folders: {line}",
                    file.display()
                );
            }
        }
    }
}

/// Finds every folder whose direct members import each other in a cycle. Returns each such folder with one of its
/// cycles.
fn cycles_of(found: &Crate) -> Vec<(Vec<String>, Vec<String>)> {
    let mut graphs: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (from, to) in found.imports() {
        let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
        // If one of the two modules contains the other, the outer module is the shared folder itself, and the graph
        // names this module `mod`.
        let member = |path: &[String]| path.get(shared).cloned().unwrap_or_else(|| "mod".to_owned());
        let graph = graphs.entry(from[..shared].to_vec()).or_default();
        graph.entry(member(&from)).or_default().insert(member(&to));
    }
    graphs.into_iter().filter_map(|(folder, graph)| Some((folder, cycle_in(&graph)?))).collect()
}

/// Returns a path along the imports from some member back to the same member, or `None` if the graph has no cycle.
fn cycle_in(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    graph.keys().find_map(|start| {
        let (mut paths, mut seen) = (vec![vec![start.clone()]], BTreeSet::new());
        while let Some(path) = paths.pop() {
            for next in graph.get(path.last().expect("every path contains the start")).into_iter().flatten() {
                let longer: Vec<String> = path.iter().chain([next]).cloned().collect();
                if next == start && longer.len() > 2 {
                    return Some(longer);
                }
                if seen.insert(next.clone()) {
                    paths.push(longer);
                }
            }
        }
        None
    })
}

#[test]
fn layer_checks_detect_wrong_imports_and_cycles() {
    let folder = tempfile::tempdir().expect("the temporary folder is writable");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("the path has a parent"))
            .expect("the temporary folder is writable");
        std::fs::write(path, text).expect("the temporary folder is writable");
    };
    write("lib.rs", "pub mod geo;\npub mod train;\n");
    write("geo.rs", "use crate::train::{Step, feed};\npub struct Place;\n");
    write("train/mod.rs", "mod step;\nmod feed;\npub use step::Step;\npub use crate::geo::Place;\n");
    write("train/step.rs", "use super::feed::Feed;\nuse crate::geo::Place;\npub struct Step;\n");
    write(
        "train/feed.rs",
        "// use crate::worker::Nothing;\npub struct Feed;\nfn step() -> super::Step {}\n#[cfg(test)]\nmod tests {\n    use crate::geo;\n}\n",
    );
    let found = Crate::read("example", folder.path());
    let imports: Vec<String> =
        found.imports().iter().map(|(from, to)| from.join("::") + " -> " + &to.join("::")).collect();
    assert_eq!(
        imports,
        [
            "geo -> train::feed",
            "geo -> train::step",
            "train -> geo",
            "train::feed -> train::step",
            "train::step -> geo",
            "train::step -> train::feed"
        ]
    );
    let cycles: Vec<String> = cycles_of(&found).iter().map(|(folder, _)| folder.join("::")).collect();
    assert_eq!(cycles, ["", "train"]);
    assert_eq!(forbidden_import(&LOCDIFF, "native", "comm").as_deref(), Some("native -> comm"));
    assert_eq!(forbidden_import(&LOCDIFF, "shards", "model").as_deref(), Some("shards -> model"));
    assert_eq!(forbidden_import(&LOCDIFF, "elsewhere", "comm").as_deref(), Some("no layer has the module `elsewhere`"));
    assert_eq!(forbidden_import(&LOCDIFF, "train", "model"), None);
}
