//! Finds the imports of a crate in its source files. A module imports another module if it uses an item that the other
//! module defines.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The names of the modules from the crate root to a module. The list is empty for the root itself.
type ModulePath = Vec<String>;

/// The modules of a crate.
pub(super) struct Crate {
    name: &'static str,
    modules: BTreeMap<ModulePath, Module>,
}

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Names of the items that the module's file defines.
    items: BTreeSet<String>,
    uses: Vec<Use>,
    /// Paths outside of `use` declarations, such as `crate::geo::Place::new`.
    paths: Vec<Vec<String>>,
}

/// One name that a `use` declaration imports.
struct Use {
    path: Vec<String>,
    name: String,
    is_public: bool,
}

impl Crate {
    /// Reads every source file below `root`.
    pub(super) fn read(name: &'static str, root: &Path) -> Self {
        let mut modules = BTreeMap::new();
        for file in sources(root) {
            let text = without_tests(&std::fs::read_to_string(&file).expect("the source file can be read"));
            let uses = uses(&text);
            let module = Module { items: items(&text), paths: inline_paths(&text), uses, file: file.clone() };
            modules.insert(module_path(root, &file), module);
        }
        Self { name, modules }
    }

    /// The files that were read.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.modules.values().map(|module| module.file.as_path())
    }

    /// All imports, sorted and without duplicates. Each pair is the importing module and the imported module. A public
    /// re-export counts as an import only if it is outside of the crate root and re-exports an item of another
    /// top-level module.
    pub(super) fn imports(&self) -> Vec<(ModulePath, ModulePath)> {
        let mut imports = BTreeSet::new();
        for (own, module) in self.modules.iter().filter(|(own, _)| !is_test(own)) {
            let used = module.uses.iter().map(|used| (&used.path, used.is_public));
            for (path, is_public) in used.chain(module.paths.iter().map(|path| (path, false))) {
                let defined = self.absolute(own, path).and_then(|path| self.defining(&path, 0));
                let is_import = |to: &ModulePath| !is_public || !own.is_empty() && to.first() != own.first();
                if let Some(to) = defined.filter(|to| to != own && !is_test(to) && is_import(to)) {
                    imports.insert((own.clone(), to));
                }
            }
        }
        imports.into_iter().collect()
    }

    /// Converts a `path` that module `own` uses into a path from the crate root. `None` for a path into another crate.
    fn absolute(&self, own: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut base = match path.first()?.as_str() {
            "crate" => Vec::new(),
            first if first == self.name => Vec::new(),
            "self" => own.to_vec(),
            "super" => own[..own.len().checked_sub(1)?].to_vec(),
            first => {
                let child: Vec<String> = own.iter().cloned().chain([first.to_owned()]).collect();
                self.modules.contains_key(&child).then_some(())?;
                return Some(own.iter().chain(path).cloned().collect());
            }
        };
        let mut rest = &path[1..];
        while rest.first().is_some_and(|segment| segment == "super") {
            base.pop()?;
            rest = &rest[1..];
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The module whose file defines an item. `path` is the path of the item from the crate root. Follows at most eight
    /// re-exports.
    fn defining(&self, path: &[String], depth: usize) -> Option<ModulePath> {
        let length = (0..=path.len()).rev().find(|length| self.modules.contains_key(&path[..*length]))?;
        let (own, rest) = (&path[..length], &path[length..]);
        let module = &self.modules[own];
        let Some(name) = rest.first().filter(|name| !module.items.contains(*name) && depth < 8) else {
            return Some(own.to_vec());
        };
        let reexported = module.uses.iter().filter(|used| used.name == *name || used.name == "*").find_map(|used| {
            let mut target = self.absolute(own, &used.path)?;
            if used.name == "*" {
                target.push(name.clone());
            }
            target.extend_from_slice(&rest[1..]);
            let found = self.defining(&target, depth + 1)?;
            let is_there = used.name != "*" || self.modules[&found].items.contains(name);
            is_there.then_some(found)
        });
        Some(reexported.unwrap_or_else(|| own.to_vec()))
    }
}

/// Every Rust file below `folder`.
pub(super) fn sources(folder: &Path) -> Vec<PathBuf> {
    files_below(folder, &["rs"])
}

/// Every file below `folder` with one of `extensions`.
pub(super) fn files_below(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)
        .expect("the source folder can be read")
        .map(|entry| entry.expect("the source folder can be read").path())
    {
        if entry.is_dir() {
            files.extend(files_below(&entry, extensions));
        } else if entry.extension().is_some_and(|found| extensions.iter().any(|wanted| found == *wanted)) {
            files.push(entry);
        }
    }
    files.sort();
    files
}

/// The top-level module that contains `file`. `None` for the file of the crate root.
pub(super) fn top_module(root: &Path, file: &Path) -> Option<String> {
    module_path(root, file).into_iter().next()
}

fn module_path(root: &Path, file: &Path) -> ModulePath {
    let inside = file.strip_prefix(root).expect("the file is below the root").with_extension("");
    let mut path: ModulePath = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if matches!(path.last().map(String::as_str), Some("mod" | "lib")) {
        path.pop();
    }
    path
}

fn is_test(path: &[String]) -> bool {
    path.iter().any(|part| part.ends_with("tests"))
}

/// The code without comments and without `#[cfg(test)]` items.
fn without_tests(text: &str) -> String {
    let (mut kept, mut lines) = (String::new(), text.lines());
    while let Some(line) = lines.next() {
        if line.starts_with("#[cfg(test)]") {
            // Skips the item. An item ends with a closing brace in the first column, or with a semicolon at the end of
            // a line that is not indented.
            for line in lines.by_ref() {
                if line.starts_with('}') || (!line.starts_with([' ', '#']) && line.ends_with(';')) {
                    break;
                }
            }
        } else if !line.trim_start().starts_with("//") {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !character.is_alphanumeric() && character != '_').filter(|word| !word.is_empty())
}

/// Names of the items at the top level of the source `text`.
fn items(text: &str) -> BTreeSet<String> {
    const KINDS: [&str; 9] = ["struct", "enum", "fn", "trait", "type", "const", "static", "macro_rules", "union"];
    let heads = text.lines().filter(|line| !line.starts_with([' ', '#', '}', ')']));
    let named = heads.filter_map(|line| {
        let mut words = identifiers(line).skip_while(|word| !KINDS.contains(word));
        words.next()?;
        words.find(|word| !matches!(*word, "fn" | "unsafe" | "extern" | "C")).map(str::to_owned)
    });
    named.collect()
}

fn uses(text: &str) -> Vec<Use> {
    let mut found = Vec::new();
    for (start, _) in text.match_indices("use ") {
        let line_start = text[..start].rfind('\n').map_or(0, |end| end + 1);
        let before = text[line_start..start].trim();
        if !(before.is_empty() || before.starts_with("pub")) {
            continue;
        }
        let tree = text[start + 4..].split(';').next().unwrap_or_default();
        expand(&[], tree, &mut |path, name| {
            found.push(Use { path, name, is_public: before.starts_with("pub") });
        });
    }
    found
}

/// Calls `found` for every path of a use tree such as `a::{b, c::{self, d as e}}`. The arguments are the path and the
/// name that the path introduces.
fn expand(prefix: &[String], tree: &str, found: &mut impl FnMut(Vec<String>, String)) {
    let tree = tree.trim();
    let (path, group) = match tree.split_once('{') {
        Some((path, group)) => (path, Some(group.trim_end().strip_suffix('}').unwrap_or(group))),
        None => (tree, None),
    };
    let (path, alias) = path.split_once(" as ").map_or((path, None), |(path, alias)| (path, Some(alias.trim())));
    let mut full = prefix.to_vec();
    full.extend(identifiers(path).map(str::to_owned));
    let Some(group) = group else {
        if path.trim_end().ends_with('*') {
            return found(full, "*".to_owned());
        }
        if full.last().is_some_and(|last| last == "self") && full.len() > 1 {
            full.pop();
        }
        let name = alias.map(str::to_owned).or_else(|| full.last().cloned()).unwrap_or_default();
        return found(full, name);
    };
    let (mut depth, mut start) = (0, 0);
    for (index, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&full, &group[start..index], found);
                start = index + 1;
            }
            _ => {}
        }
    }
    if !group[start..].trim().is_empty() {
        expand(&full, &group[start..], found);
    }
}

/// Paths outside of `use` declarations that begin with `crate`, `super` or `self`.
fn inline_paths(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for root in ["crate::", "super::", "self::"] {
        for (start, _) in text.match_indices(root) {
            let before = text[..start].chars().next_back();
            if before.is_some_and(|character| character.is_alphanumeric() || character == '_' || character == ':') {
                continue;
            }
            let line_start = text[..start].rfind('\n').map_or(0, |end| end + 1);
            let line = text[line_start..start].trim_start();
            let is_use = line.starts_with("use ") || line.starts_with("pub") && line.trim_end().ends_with(" use");
            if is_use || line.ends_with("pub(in ") {
                continue;
            }
            let path: String = text[start..]
                .chars()
                .take_while(|character| character.is_alphanumeric() || matches!(character, '_' | ':'))
                .collect();
            found.push(path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect());
        }
    }
    found
}
