//! Who may import whom, in all three crates. The tables are the design; the tests read the sources.
//!
//! Two rules: a module imports only modules of rows above its own, and the files of one folder do not import each other in a
//! circle. A name is followed through re-exports to the file that defines it. Test modules are left out.

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use imports::Crate;

/// A crate and its rows: a module may import its own row's members never, rows above always.
struct Design {
    name: &'static str,
    source: &'static str,
    rows: &'static [&'static [&'static str]],
}

const CORE: Design = Design {
    name: "locdiff_core",
    source: "core/src",
    rows: &[
        &["exit_code", "geo", "random"],
        &["config", "draw", "files", "metrics", "tables"],
        &["predictions", "protocol", "tensorboard"],
        &["tuning"],
    ],
};

const LAUNCHER: Design = Design {
    name: "locdiff_launch",
    source: "launcher/src",
    rows: &[
        &["error", "gpus", "progress"],
        &["cli", "coordinator", "output", "rendezvous", "run_folder"],
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
        &["eval", "train"],
        &["worker"],
        &["bin"],
    ],
};

/// I/O never knows the numbers that it carries.
const NEVER: &[(&[&str], &[&str])] = &[(&["checkpoint", "retrieval", "shards"], &["diffusion", "loss", "model"])];

/// Folders whose files may import each other in a circle, each with the reason.
const CIRCLES: &[(&str, &str)] = &[];

fn read(design: &Design) -> Crate {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(design.source);
    Crate::read(design.name, &root)
}

/// What is wrong with an import of `to` by `from`.
fn wrong_arrow(design: &Design, from: &str, to: &str) -> Option<String> {
    let row = |module: &str| design.rows.iter().position(|row| row.contains(&module));
    let Some(own) = row(from) else { return Some(format!("{from} is in no row")) };
    let is_never = NEVER.iter().any(|(modules, others)| modules.contains(&from) && others.contains(&to));
    let is_above = row(to).is_some_and(|other| other < own);
    (from != to && (is_never || !is_above)).then(|| format!("{from} -> {to}"))
}

#[test]
fn imports_point_up_the_tables() {
    let mut wrong = Vec::new();
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        for (from, to) in read(design).arrows() {
            // The root re-exports everything; what it defines itself (the version) is for everybody.
            let (Some(from_module), Some(to_module)) = (from.first(), to.first()) else { continue };
            let arrow = wrong_arrow(design, from_module, to_module);
            wrong.extend(
                arrow.map(|arrow| format!("{}: {arrow} ({} -> {})", design.name, from.join("::"), to.join("::"))),
            );
        }
    }
    assert!(wrong.is_empty(), "arrows the wrong way:\n{}", wrong.join("\n"));
}

#[test]
fn files_of_a_folder_import_each_other_in_no_circle() {
    let mut circles = Vec::new();
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        for (folder, circle) in circles_of(&read(design)) {
            let folder = format!("{}::{}", design.name, folder.join("::"));
            if !CIRCLES.iter().any(|(known, _)| *known == folder) {
                circles.push(format!("{folder}: {}", circle.join(" -> ")));
            }
        }
    }
    assert!(circles.is_empty(), "circles:\n{}", circles.join("\n"));
}

#[test]
fn every_source_file_is_read() {
    for design in [&CORE, &LAUNCHER, &LOCDIFF] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(design.source);
        let on_disk: BTreeSet<_> = imports::sources(&root).into_iter().collect();
        let read: BTreeSet<_> = read(design).files().map(Path::to_owned).collect();
        assert_eq!(on_disk, read, "{}", design.name);
        let in_rows: BTreeSet<&str> = design.rows.iter().flat_map(|row| row.iter().copied()).collect();
        let modules: BTreeSet<String> = read
            .iter()
            .filter_map(|file| imports::top_module(&root, file))
            .filter(|module| !module.ends_with("_tests"))
            .collect();
        assert_eq!(in_rows, modules.iter().map(String::as_str).collect(), "{}: rows and modules", design.name);
    }
}

#[test]
fn no_folder_holds_more_than_fifteen_source_files() {
    const FILES_MAX: usize = 15;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: BTreeMap<_, usize> = BTreeMap::new();
    for source in ["core/src", "launcher/src", "src", "tests", "setup"] {
        for file in imports::files_below(&root.join(source), &["rs", "cpp", "h", "cu", "py"]) {
            *folders.entry(file.parent().expect("below the root").to_owned()).or_default() += 1;
        }
    }
    let crowded: Vec<_> = folders.iter().filter(|(_, count)| **count > FILES_MAX).collect();
    assert!(crowded.is_empty(), "more than {FILES_MAX} files: {crowded:?}");
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
            let text = std::fs::read_to_string(&file).expect("readable");
            for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
                assert!(!line.contains("unsafe "), "{}: {line}", file.display());
            }
        }
    }
}

/// Circles among the direct members of each folder: one for each folder that has any.
fn circles_of(found: &Crate) -> Vec<(Vec<String>, Vec<String>)> {
    let mut graphs: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (from, to) in found.arrows() {
        let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
        // A module that is the folder of the other stands for the folder's own `mod.rs`.
        let member = |path: &[String]| path.get(shared).cloned().unwrap_or_else(|| "mod".to_owned());
        let graph = graphs.entry(from[..shared].to_vec()).or_default();
        graph.entry(member(&from)).or_default().insert(member(&to));
    }
    graphs.into_iter().filter_map(|(folder, graph)| Some((folder, circle_in(&graph)?))).collect()
}

/// Some way from a member back to itself.
fn circle_in(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    graph.keys().find_map(|start| {
        let (mut ways, mut seen) = (vec![vec![start.clone()]], BTreeSet::new());
        while let Some(way) = ways.pop() {
            for next in graph.get(way.last().expect("begins with the start")).into_iter().flatten() {
                let longer: Vec<String> = way.iter().chain([next]).cloned().collect();
                if next == start && longer.len() > 2 {
                    return Some(longer);
                }
                if seen.insert(next.clone()) {
                    ways.push(longer);
                }
            }
        }
        None
    })
}

#[test]
fn tests_see_wrong_arrows_and_circles() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("has one")).expect("folder");
        std::fs::write(path, text).expect("written");
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
    let arrows: Vec<String> =
        found.arrows().iter().map(|(from, to)| from.join("::") + " -> " + &to.join("::")).collect();
    assert_eq!(
        arrows,
        [
            "geo -> train::feed",
            "geo -> train::step",
            "train -> geo",
            "train::feed -> train::step",
            "train::step -> geo",
            "train::step -> train::feed"
        ]
    );
    let circles: Vec<String> = circles_of(&found).iter().map(|(folder, _)| folder.join("::")).collect();
    assert_eq!(circles, ["", "train"]);
    assert_eq!(wrong_arrow(&LOCDIFF, "native", "comm").as_deref(), Some("native -> comm"));
    assert_eq!(wrong_arrow(&LOCDIFF, "shards", "model").as_deref(), Some("shards -> model"));
    assert_eq!(wrong_arrow(&LOCDIFF, "elsewhere", "comm").as_deref(), Some("elsewhere is in no row"));
    assert_eq!(wrong_arrow(&LOCDIFF, "train", "model"), None);
}
