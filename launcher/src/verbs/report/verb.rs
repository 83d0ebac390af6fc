//! The verb `report`, and the files of a report.

use std::path::{Path, PathBuf};

use locdiff_core::files::Files;
use serde_json::{Value, json};

use super::content::ReportContent;
use super::markdown::markdown;
use super::page::page;
use super::source::{EvaluatedRun, SuiteResult};
use crate::cli::{Global, ReportRequest};
use crate::error::{LaunchError, refuse};
use crate::output::Output;
use crate::run_folder::RunLock;
use crate::supervisor::{Supervisor, hold_signals};
use crate::verbs::paths::require_new;
use crate::verbs::runs::find_run;

/// Folder of a report about several runs, if `--out` is not given.
const COMPARISON: &str = "report";

/// Runs `report`. A report about one run replaces the one in `RUN/eval/`, unless `--out` names another folder.
pub(in crate::verbs) fn run(request: &ReportRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let ReportRequest { runs, out, experiments, overwrite } = request;
    hold_signals()?;
    let folders = match runs.as_slice() {
        [] => vec![find_run(None, global, output)?],
        named => named.iter().map(|run| find_run(Some(run), global, output)).collect::<Result<Vec<_>, _>>()?,
    };
    let eval = folders[0].join("eval");
    let (folder, is_own) = match out {
        Some(out) => (out.clone(), false),
        None if folders.len() == 1 => (eval.clone(), true),
        None => (PathBuf::from(COMPARISON), false),
    };
    let name = if out.is_some() { "--out" } else { "report" };
    if !is_own {
        require_new(name, &folder, *overwrite)?;
        if folder.exists() && !folder.is_dir() {
            refuse!(Io, "{name}: {} is a file, wanted a folder", folder.display());
        }
    }
    let mut supervisor = Supervisor::new()?;
    let (target, experiments) = (folder.clone(), experiments.clone());
    let rows = supervisor.compute(move || {
        // `eval` writes to the same folder.
        let _lock = if is_own && eval.exists() { Some(RunLock::take(&eval)?) } else { None };
        let mut content = content(&folders)?;
        content.experiments = experiments.iter().map(|path| SuiteResult::read(path)).collect::<Result<Vec<_>, _>>()?;
        write(&content, &target)?;
        Ok(content.rows)
    })?;
    let [page, markdown, data] = ["html", "md", "json"].map(|kind| folder.join(format!("report.{kind}")));
    output.print(&format!(
        "page:\n  {}\nMarkdown:\n  {}\ndata:\n  {}",
        page.display(),
        markdown.display(),
        data.display()
    ));
    Ok(json!({ "ok": true, "page": page, "markdown": markdown, "data": data, "rows": rows }))
}

/// Writes the report of the run in `run` to `RUN/eval/`. The caller holds the lock of this folder. Returns the path of the
/// page.
pub(in crate::verbs) fn write_beside(run: &Path) -> anyhow::Result<PathBuf> {
    Ok(write(&content(&[run.to_owned()])?, &run.join("eval"))?)
}

fn content(folders: &[PathBuf]) -> Result<ReportContent, LaunchError> {
    let mut runs = folders.iter().map(|folder| EvaluatedRun::read(folder)).collect::<Result<Vec<_>, _>>()?;
    // Runs in different folders may have the same name.
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for run in &mut runs {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = run.folder.display().to_string();
        }
    }
    ReportContent::new(&runs)
}

/// Writes the three files of a report to `folder`. Returns the path of the page.
fn write(content: &ReportContent, folder: &Path) -> Result<PathBuf, LaunchError> {
    let files = Files::real();
    files.create_folders(folder)?;
    let data = serde_json::to_string(content).expect("the content of a report can be written as JSON");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        files.write_atomically(&path, text.as_bytes()).map(|_| path)
    };
    write("report.json", &data)?;
    write("report.md", &markdown(content))?;
    Ok(write("report.html", &page(content))?)
}
