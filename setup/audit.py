#!/usr/bin/env python3
"""Audits the dependencies against `deny.toml`.

setup/policy.py checks bans, licences and sources. cargo-deny, in a pinned version, repeats these checks and also checks advisories.
Building cargo-deny takes minutes, so `make test` (which uses --installed) runs it only if it is installed. `make audit` builds it if
needed.

The advisory database is a git repository that some machines cannot reach. On such a machine the audit prints that advisories were not
checked, and passes.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import children  # noqa: E402 (the line above must come first)
import policy  # noqa: E402

CARGO_DENY_VERSION = "0.20.2"
FETCH_TIMEOUT_S = 30
PROJECT = Path(__file__).resolve().parent.parent
TOOLS = PROJECT / ".tools"


def log(text):
    print("audit: " + text, file=sys.stderr, flush=True)


def find_cargo_deny():
    for path in (str(TOOLS / "bin/cargo-deny"), shutil.which("cargo-deny")):
        if path and os.access(path, os.X_OK):
            version = subprocess.run([path, "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
            if version == "cargo-deny " + CARGO_DENY_VERSION:
                return path
    return None


def install_cargo_deny(environment):
    """Builds cargo-deny without optimisation. An optimised build takes three times as long, and an unoptimised run takes only two seconds."""
    log("building cargo-deny %s in .tools/ (once, about 2 minutes)" % CARGO_DENY_VERSION)
    command = ["cargo", "install", "cargo-deny", "--version", CARGO_DENY_VERSION, "--locked", "--quiet", "--force"]
    command += ["--profile", "dev", "--config", "profile.dev.debug=false", "--root", str(TOOLS)]
    return children.wait(children.start(command, env=environment)) == 0


def fetch_database(cargo_deny, environment):
    """Updates the advisory database. Returns whether this succeeded. After a failure, prints the reason and removes the database."""
    log_path = TOOLS / "fetch.log"
    with open(log_path, "w") as log_file:
        fetch = children.start([cargo_deny, "fetch", "db"], env=environment, stdout=log_file, stderr=log_file)
        status = children.wait(fetch, FETCH_TIMEOUT_S)
    if status == 0:
        return True
    # An incomplete copy of the database would make every later fetch fail.
    shutil.rmtree(TOOLS / "advisory-db", ignore_errors=True)
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    log("advisories not checked: database unreachable (%s)" % ("no response within %d s" % FETCH_TIMEOUT_S if status is None else lines[-1]))
    return False


def run_cargo_deny(cargo_deny, environment):
    status = children.wait(children.start([cargo_deny, "check", "bans", "licenses", "sources"], env=environment))
    if status == 0 and fetch_database(cargo_deny, environment):
        status = children.wait(children.start([cargo_deny, "--offline", "check", "advisories"], env=environment))
    return 1 if status else 0


def check_policy(project):
    """Checks bans, licences and sources with setup/policy.py, without cargo-deny. Returns the exit code."""
    try:
        crate_count, refusals = policy.check(project)
    except policy.PolicyError as error:
        log(str(error))
        return 1
    for refusal in refusals:
        log(refusal)
    log("bans, licences, sources of %d crates: %s" % (crate_count, "%d refused by deny.toml" % len(refusals) if refusals else "ok"))
    return 1 if refusals else 0


def audit(project, installed_only):
    if check_policy(project) != 0:
        return 1
    # The build of cargo-deny must not use the project's target folder, and git must never prompt for a password.
    environment = dict(os.environ, GIT_TERMINAL_PROMPT="0", GIT_ASKPASS="true")
    environment.pop("CARGO_TARGET_DIR", None)
    TOOLS.mkdir(exist_ok=True)
    cargo_deny = find_cargo_deny()
    if cargo_deny is None and installed_only:
        log("advisories not checked: no cargo-deny %s; run `make audit` to build it" % CARGO_DENY_VERSION)
        return 0
    if cargo_deny is None:
        if not install_cargo_deny(environment):
            log("cannot build cargo-deny %s; fix the error that cargo printed and run `make audit` again" % CARGO_DENY_VERSION)
            return 1
        cargo_deny = str(TOOLS / "bin/cargo-deny")
    return run_cargo_deny(cargo_deny, environment)


def main():
    parser = argparse.ArgumentParser(description="Checks the dependencies against deny.toml.")
    parser.add_argument("--installed", action="store_true", help="run cargo-deny only if it is installed; do not build it")
    parser.add_argument("--root", type=Path, default=PROJECT, help="the project to audit")
    arguments = parser.parse_args()
    children.end_all_on_signals()
    project = arguments.root.resolve()
    os.chdir(project)
    try:
        return audit(project, arguments.installed)
    except KeyboardInterrupt:
        return 130
    finally:
        children.end_all()


if __name__ == "__main__":
    sys.exit(main())
