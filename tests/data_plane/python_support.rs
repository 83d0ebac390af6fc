//! Runs Python scripts of this project with the packages that `setup/python.lock` lists.

use std::path::Path;
use std::process::Command;

/// Runs a script of this project and returns its standard output. The interpreter is `python3`, or the program that the
/// environment variable `PYTHON` names.
pub(crate) fn run_python(script: &str, arguments: &[&Path]) -> String {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let project = crate_folder
        .ancestors()
        .find(|folder| folder.join("setup/python.lock").exists())
        .expect("setup/python.lock is in a parent folder");
    let tools = project.join(".tools/python");
    assert!(
        tools.join("installed.json").exists(),
        "{} has no Python packages; `make test` or `python3 setup/python_tools.py` installs them",
        tools.display()
    );
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let output = Command::new(python)
        .arg("-B")
        .arg(project.join(script))
        .args(arguments)
        .env("PYTHONPATH", &tools)
        .env("PYTHONNOUSERSITE", "1")
        .output()
        .expect("Python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script} failed: {}\n{out}{err}", output.status);
    out.into_owned()
}
