//! `shards split`: cuts a table of photos into parts. No worker is needed.

use std::path::{Path, PathBuf};

use locdiff_core::files::{Files, WRITING};
use locdiff_core::tables::{CutTable, PartShare, TableCut, copy_rows};
use serde_json::{Value, json};

use crate::error::{LaunchError, refuse};
use crate::output::Output;
use crate::verbs::paths::{require_file, require_new};

/// How far the sum of the shares may be from 1.
const SUM_TOLERANCE: f64 = 1e-6;

/// Cuts `table` and writes each part to `out`, in the format of the table. Existing files are replaced only if
/// `overwrite` is true. No file gets its final name before all files are written.
pub(super) fn split(
    table: &Path,
    out: &Path,
    cut: &TableCut,
    overwrite: bool,
    output: Output,
) -> anyhow::Result<Value> {
    require_file("TABLE of `shards split`", table)?;
    check_parts(&cut.parts)?;
    let files: Vec<PathBuf> = cut.parts.iter().map(|part| file_of(&part.name, table, out)).collect();
    files.iter().try_for_each(|file| require_new("--out", file, overwrite))?;
    if let Some(file) = files.iter().find(|file| same_file(file, table)) {
        refuse!(Usage, "{} is the table itself and would be replaced; choose another --out", file.display());
    }
    let found = cut.cut(table).map_err(LaunchError::reported)?;
    let disk = Files::real();
    disk.create_folders(out).map_err(LaunchError::reported)?;
    let partial: Vec<PathBuf> = files.iter().map(|file| partial_path(file)).collect();
    let written = partial.iter().enumerate().try_for_each(|(part, partial)| {
        let keep: Vec<bool> = found.part_of_row.iter().map(|of_row| *of_row == Some(part)).collect();
        copy_rows(table, &keep, partial)
    });
    if let Err(error) = written {
        // Incomplete files are useless, and the disk may be full. Some files may not exist, so errors are ignored.
        partial.iter().for_each(|file| drop(disk.remove_file(file)));
        return Err(LaunchError::reported(error).into());
    }
    let mut renamed = partial.iter().zip(&files).map(|(partial, file)| disk.rename(partial, file));
    renamed.try_for_each(|done| done).and_then(|()| disk.sync_folder(out)).map_err(LaunchError::reported)?;
    report(&found, &files, output)
}

fn same_file(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

fn check_parts(parts: &[PartShare]) -> Result<(), LaunchError> {
    let sum: f64 = parts.iter().map(|part| part.share).sum();
    if (sum - 1.0).abs() > SUM_TOLERANCE {
        refuse!(Usage, "--parts: the shares add up to {sum:.4}, wanted 1");
    }
    for (at, part) in parts.iter().enumerate() {
        if parts[..at].iter().any(|other| other.name == part.name) {
            refuse!(Usage, "--parts: `{}` is given twice, wanted different names", part.name);
        }
    }
    Ok(())
}

fn file_of(part: &str, table: &Path, out: &Path) -> PathBuf {
    let file = out.join(part);
    table.extension().map_or_else(|| file.clone(), |extension| file.with_extension(extension))
}

fn partial_path(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    file.with_file_name(format!(".{name}{WRITING}"))
}

fn report(found: &CutTable, files: &[PathBuf], output: Output) -> anyhow::Result<Value> {
    let rows = found.part_of_row.len();
    let dropped = found.part_of_row.iter().filter(|part| part.is_none()).count();
    let mut parts = Vec::new();
    for (part, file) in found.parts.iter().zip(files) {
        let percent = 100.0 * part.rows as f64 / rows as f64;
        let authors = part.authors.map(|authors| format!(", {authors} authors")).unwrap_or_default();
        let file = file.display();
        output.print(&format!("{file}: {} rows ({percent:.1} %), {} places{authors}", part.rows, part.places));
        parts.push(json!({
            "name": part.name, "file": file.to_string(), "rows": part.rows, "places": part.places,
            "authors": part.authors,
        }));
    }
    let authors = match &found.author_column {
        None => "no author column, so parts may share authors".to_owned(),
        Some(column) => {
            format!("{dropped} of {rows} rows dropped, because their author (column `{column}`) is in another part")
        }
    };
    output.print(&authors);
    Ok(json!({
        "ok": true, "rows": rows, "dropped": dropped, "author_column": found.author_column, "parts": parts,
    }))
}
