#!/usr/bin/env python3
"""Installs the Python packages for the tests into `.tools/python/`, pinned by `python.lock`.

The script may be killed at any moment. pip installs into a temporary folder. When pip has finished, the script writes the list of
installed files and renames the folder. The packages are installed again if the lock file or the Python version has changed, or if a
file is missing or has the wrong size.
"""

import argparse
import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

sys.dont_write_bytecode = True
from libtorch import PROJECT, SetupError, check_platform, hold_lock, log, megabytes, run_guarded, run_pip, space_advice  # noqa: E402
from locks import sha256_of  # noqa: E402

LIST = "installed.json"
PIP_INSTALL = ["install", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes", "--no-warn-conflicts"]
# The wheels take 30 MB, and their contents take 100 MB. Compiled Python files take some more space.
SPACE_BYTES = 200 * 10**6


def fingerprint(lock):
    """Identifies an installation by the lock file and the Python version."""
    return "%s %s" % (sha256_of(lock), sys.implementation.cache_tag)


def sizes(folder):
    files = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files if path.suffix != ".pyc" and path.name != LIST}


def problem(target, wanted):
    """Returns why the packages must be installed, or None if they are intact. Checks only the sizes of the files, to be fast."""
    try:
        found = json.loads((target / LIST).read_text())
        if found["for"] != wanted:
            return "installed for another lock file or Python version"
        files = found["files"]
    except FileNotFoundError:
        return "not installed"
    except (OSError, ValueError, KeyError, TypeError):
        return "%s is damaged" % LIST
    now = sizes(target)
    wrong = sorted(name for name in files if now.get(name) != files[name])
    return "%s is missing or has the wrong size" % wrong[0] if wrong else None


def install(base, target, lock, wanted):
    check_platform()
    if find_spec("pip") is None:
        raise SetupError("%s has no pip; install it (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; elsewhere: "
                         "python3 -m ensurepip) and run again" % sys.executable)
    free = shutil.disk_usage(base).free
    if free < SPACE_BYTES:
        raise SetupError("%s has %s free, wanted %s for the Python packages of the tests; %s"
                         % (base, megabytes(free), megabytes(SPACE_BYTES), space_advice(base)))
    temporary = target.with_name(target.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    log("installing the Python packages of the tests (30 MB, once)")
    scratch = base / "download/tmp"
    try:
        status, output = run_pip(PIP_INSTALL + ["--target", str(temporary), "-r", str(lock)], scratch)
    finally:
        shutil.rmtree(scratch.parent, ignore_errors=True)
    if status != 0:
        raise SetupError(explain_pip(output, lock))
    (temporary / LIST).write_text(json.dumps({"for": wanted, "files": sizes(temporary)}))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)


def explain_pip(output, lock):
    """Finds the cause of a failure in pip's output. Returns a message that gives the cause and says what to do."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(28, "no space left")
    got = re.search(r"^\s*Got\s+([0-9a-f]{64})", output, re.MULTILINE)
    if got:
        return ("pip got a package whose sha256 %s is not in %s; the package source is damaged or not trustworthy\n"
                "nothing was installed; try another source (pip's index settings) and run again" % (got.group(1), lock.name))
    if "No matching distribution" in output and "broken by" not in output:
        missing = re.search(r"No matching distribution found for (.+)", output).group(1)
        return ("pip finds no %s for Python %d.%d; %s supports Python 3.8 to 3.14; choose another Python with PYTHON=..., or check pip's "
                "index settings" % (missing.strip(), sys.version_info[0], sys.version_info[1], lock.name))
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    return ("cannot install the Python packages of the tests: pip says: %s\n"
            "check the network and pip's settings (`python3 -m pip config list`) and run again" % (lines[-1] if lines else "nothing"))


def prepare(base, lock):
    target, wanted = base / "python", fingerprint(lock)
    base.mkdir(parents=True, exist_ok=True)
    with hold_lock(base):
        found = problem(target, wanted)
        if found is None:
            return
        if found != "not installed":
            log("repairing the Python packages of the tests: %s" % found)
        install(base, target, lock, wanted)
        log("the Python packages of the tests are ready in %s" % target)


def main():
    parser = argparse.ArgumentParser(description="Installs the Python packages of the tests, in the versions that python.lock pins, into .tools/python/.")
    parser.add_argument("--root", type=Path, default=PROJECT, metavar="DIR", help="folder that contains .tools/ (default: the project)")
    parser.add_argument("--locks", type=Path, default=PROJECT / "setup", metavar="DIR", help="folder that contains python.lock (default: setup/)")
    arguments = parser.parse_args()
    base = arguments.root.resolve() / ".tools"
    return run_guarded(base, lambda: prepare(base, arguments.locks / "python.lock"))


if __name__ == "__main__":
    sys.exit(main())
