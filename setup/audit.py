#!/usr/bin/env python3
"""Audits the dependencies by `deny.toml`: bans, licences and sources always (setup/policy.py), and with a pinned cargo-deny, which knows
the advisories too. Building it takes minutes, so `make test` (--installed) asks it only where it is there; `make audit` builds it.

The database of advisories is a git repository that not every machine can reach. That must not fail the audit, nor pass in silence.
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


def say(text):
    print("audit: " + text, file=sys.stderr, flush=True)


def find_cargo_deny():
    for path in (str(TOOLS / "bin/cargo-deny"), shutil.which("cargo-deny")):
        if path and os.access(path, os.X_OK):
            version = subprocess.run([path, "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
            if version == "cargo-deny " + CARGO_DENY_VERSION:
                return path
    return None


def install_cargo_deny(environment):
    """Without optimisation: it takes a third of the time to build, and runs for two seconds."""
    say("building cargo-deny %s in .tools/ (once, about 2 minutes)" % CARGO_DENY_VERSION)
    command = ["cargo", "install", "cargo-deny", "--version", CARGO_DENY_VERSION, "--locked", "--quiet", "--force"]
    command += ["--profile", "dev", "--config", "profile.dev.debug=false", "--root", str(TOOLS)]
    return children.wait(children.start(command, env=environment)) == 0


def fetch_database(cargo_deny, environment):
    """Whether the advisory database is there and fresh; says why not. A copy cut short would fail every later fetch: it goes."""
    log_path = TOOLS / "fetch.log"
    with open(log_path, "w") as log:
        status = children.wait(children.start([cargo_deny, "fetch", "db"], env=environment, stdout=log, stderr=log), FETCH_TIMEOUT_S)
    if status == 0:
        return True
    shutil.rmtree(TOOLS / "advisory-db", ignore_errors=True)
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    say("advisories not checked: database unreachable (%s)" % ("no answer in %d s" % FETCH_TIMEOUT_S if status is None else lines[-1]))
    return False


def ask_cargo_deny(cargo_deny, environment):
    status = children.wait(children.start([cargo_deny, "check", "bans", "licenses", "sources"], env=environment))
    if status == 0 and fetch_database(cargo_deny, environment):
        status = children.wait(children.start([cargo_deny, "--offline", "check", "advisories"], env=environment))
    return 1 if status else 0


def follow_policy(project):
    """The part that needs no tool."""
    try:
        looked_at, refusals = policy.check(project)
    except policy.PolicyError as error:
        say(str(error))
        return 1
    for refusal in refusals:
        say(refusal)
    say("bans, licences, sources of %d crates: %s" % (looked_at, "%d refused by deny.toml" % len(refusals) if refusals else "ok"))
    return 1 if refusals else 0


def audit(project, installed_only):
    if follow_policy(project) != 0:
        return 1
    # Nothing of the project's own build belongs in cargo-deny's, and git must never wait for a password.
    environment = dict(os.environ, GIT_TERMINAL_PROMPT="0", GIT_ASKPASS="true")
    environment.pop("CARGO_TARGET_DIR", None)
    TOOLS.mkdir(exist_ok=True)
    cargo_deny = find_cargo_deny()
    if cargo_deny is None and installed_only:
        say("advisories not checked: no cargo-deny %s; `make audit` builds it" % CARGO_DENY_VERSION)
        return 0
    if cargo_deny is None:
        if not install_cargo_deny(environment):
            say("cannot build cargo-deny %s; see above, then run `make audit` again" % CARGO_DENY_VERSION)
            return 1
        cargo_deny = str(TOOLS / "bin/cargo-deny")
    return ask_cargo_deny(cargo_deny, environment)


def main():
    parser = argparse.ArgumentParser(description="Checks the dependencies by deny.toml.")
    parser.add_argument("--installed", action="store_true", help="ask cargo-deny only where it is installed; do not build it")
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
