#!/usr/bin/env python3
"""Runs all checks, for `make test`.

Most stages run one after the other. Some crates that do not need libtorch compile during its download. The audit, the tests of the set-up
scripts and the installation of Python packages run in the background during the build. After the build, the CUDA variant compiles and
links in the background.

The Makefile chooses the variant and sets LIBTORCH and CARGO_TARGET_DIR for it. All stages use one Cargo profile (release), so that nothing
is built twice. The first failure ends the run and all background processes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
import children  # noqa: E402 (the line above must come first)
import elf  # noqa: E402

PROJECT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or PROJECT / "target").absolute()
LIBTORCH_NAMES = ("libtorch", "libc10")
LOG_LINES_SHOWN = 200
# Test modules that run only if a file of the project has changed since they passed.
LONG_MODULES = ("eval", "comm", "split", "perturbation", "train", "gang", "world", "first_hour")
# Crates that take long to compile and do not need libtorch; compiled while libtorch is downloaded.
EARLY_LIBRARIES = ("parquet", "rustls", "arrow-array")
# The project has no examples. With --examples, cargo enables the same features of dependencies as for the tests, so that nothing is built twice.
AS_FOR_TESTS = ("--examples",)


class Failed(Exception):
    """A stage failed. The text says which stage failed, and why."""


def log(text):
    print("test: " + text, file=sys.stderr, flush=True)


def timed(name, work):
    """Runs one stage and prints how long it took. `work` returns None, or the reason if the stage failed."""
    start = time.monotonic()
    log("%s ..." % name)
    reason = work()
    seconds = time.monotonic() - start
    if reason:
        raise Failed("%s failed after %.1f s: %s" % (name, seconds, reason))
    log("%s passed in %.1f s" % (name, seconds))


def command(*arguments, **environment):
    """Makes a stage that runs one command. The stage fails if the exit status of the command is not 0."""
    def work():
        status = children.wait(children.start(arguments, env=dict(os.environ, **environment)))
        return "`%s` exited with %d" % (" ".join(arguments), status) if status else None
    return work


def files_below(*patterns):
    return [path for pattern in patterns for path in PROJECT.glob(pattern)]


def whole_project():
    """Returns all files that git does not ignore, and the version file of libtorch."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], stdout=subprocess.PIPE, check=True)
    paths = [PROJECT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return paths + [Path(os.environ.get("LIBTORCH", ".libtorch/cpu")) / "build-version"]


class Stamp:
    """Records the inputs with which a stage last passed. If LOCDIFF_TEST_ALL=1 is set, the record is ignored."""

    def __init__(self, name, inputs):
        digest = hashlib.sha256()
        for path in sorted(path for path in inputs if path.is_file()):
            digest.update(str(path).encode() + b"\0" + path.read_bytes())
        self.digest = digest.hexdigest()
        self.path = TARGET / (".passed-" + name)
        unchanged = self.path.is_file() and self.path.read_text() == self.digest
        self.passed = unchanged and os.environ.get("LOCDIFF_TEST_ALL") != "1"
        if self.passed:
            log("%s: skipped, because its inputs have not changed since it passed" % name)

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.digest)


def unless_unchanged(name, inputs, work):
    """Runs a stage, or skips it if its inputs have not changed since it last passed."""
    stamp = Stamp(name, inputs)
    if not stamp.passed:
        timed(name, work)
        stamp.write()


class BackgroundStage:
    """A stage that runs in the background during the build, because it mostly waits for the network or uses an idle core."""

    def __init__(self, name, *arguments):
        self.log_path = TARGET / (name + ".log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "w") as log_file:
            # `nice` lowers the priority of this stage, so that it does not slow down the build, for which everything waits.
            self.child = children.start(("nice", *arguments), stdout=log_file, stderr=subprocess.STDOUT)

    def finish(self):
        status = children.wait(self.child)
        # Print the log even if the stage passed, because the log says which checks were skipped.
        print(self.log_path.read_text(errors="replace"), file=sys.stderr, flush=True)
        return "see the log above (%s)" % self.log_path if status else None


# --- the CUDA variant, without a GPU ---------------------------------------------------------------------


class CudaLink:
    """Compiles and links the CUDA variant in the background, in a separate folder. The main crate is not optimised."""

    def __init__(self):
        self.target = TARGET / "cuda-link"
        self.log_path = self.target / "link.log"
        self.target.mkdir(parents=True, exist_ok=True)
        self.copy_dependencies()
        environment = dict(os.environ, LIBTORCH=str(PROJECT / ".libtorch/cuda"), CARGO_TERM_COLOR="never")
        arguments = ["cargo", "build", "--release", "--locked", "--workspace", "--bins", *AS_FOR_TESTS, "--target-dir", str(self.target)]
        arguments += ["--config", "profile.release.package.locdiff.opt-level=0", "--config", "profile.release.package.locdiff.debug=false"]
        with open(self.log_path, "w") as log_file:
            self.child = children.start(arguments, env=environment, stdout=log_file, stderr=subprocess.STDOUT)

    def copy_dependencies(self):
        """Copies the CPU build before the first CUDA build, which then recompiles only torch-sys and the crates that depend on it."""
        ready = self.target / "release"
        if ready.exists():
            return
        incomplete = self.target / "release.copying"
        shutil.rmtree(incomplete, ignore_errors=True)
        for part in (".fingerprint", "build", "deps"):
            shutil.copytree(TARGET / "release" / part, incomplete / part, symlinks=True)
        incomplete.rename(ready)

    def finish(self):
        """Waits for the build and checks the libraries of the worker."""
        if children.wait(self.child) != 0:
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            print("\n".join(lines), file=sys.stderr, flush=True)
            return "the CUDA variant does not build; see the log above (%s)" % self.log_path
        worker = self.target / "release/locdiff-worker"
        direct = elf.needed(worker)
        if "libtorch_cuda.so" not in direct:
            return "%s is not linked with libtorch_cuda.so; it is linked with %s" % (worker, ", ".join(direct))
        # Do not check indirect dependencies: the wheels of the `link` set lack some libraries that libtorch_cuda.so needs at run time.
        return missing_libraries(worker, direct)


def missing_libraries(binary, names=None):
    missing = sorted({name for name, place in elf.resolve(binary) if place is None and (names is None or name in names)})
    return "%s: the loader does not find %s" % (binary, ", ".join(missing)) if missing else None


def check_binaries():
    """Checks that the launcher does not link libtorch, and that the worker finds its libraries without environment variables."""
    launcher = TARGET / "release/locdiff-launch"
    linked = [name for name in elf.needed(launcher) if name.startswith(LIBTORCH_NAMES)]
    if linked:
        return "%s links %s; the launcher must not link libtorch" % (launcher, ", ".join(linked))
    return missing_libraries(TARGET / "release/locdiff-worker")


# --- the stages ------------------------------------------------------------------------------------------


def cores():
    """Number of cores that this process may use, by its affinity and the quota of its cgroup."""
    affinity = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(affinity, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup of version 2, or no quota ("max")
        return affinity


def test_commands():
    """Returns two stages: the tests that always run, and the long tests, which run only if the project has changed since they passed."""
    if shutil.which("cargo-nextest"):
        nextest = ["cargo", "nextest", "run", "--release", "--locked", "--workspace", "-E"]
        long = " or ".join("test(/(^|::)%s::/)" % module for module in LONG_MODULES)
        # The long tests often wait for time limits, so run one more of them than there are cores.
        threads = () if os.environ.get("NEXTEST_TEST_THREADS") else ("--test-threads", str(cores() + 1))
        return command(*nextest, "not (%s)" % long), command(*nextest, long, *threads)
    test = ["cargo", "test", "--release", "--locked", "--workspace", "--all-targets", "--"]
    skips = [word for module in LONG_MODULES for word in ("--skip", module + "::")]
    return command(*test, *skips), command(*test, *(module + "::" for module in LONG_MODULES))


def prepare(libtorch_set):
    """Downloads libtorch and GeoCLIP's weights, and meanwhile compiles slow crates that do not need libtorch."""
    arguments = ["cargo", "build", "--release", "--locked", "--lib"] + [word for name in EARLY_LIBRARIES for word in ("--package", name)]
    TARGET.mkdir(parents=True, exist_ok=True)
    with open(TARGET / "early.log", "w") as log_file:
        early = children.start(("nice", *arguments), stdout=log_file, stderr=subprocess.STDOUT)
    for name, options in (("libtorch", ["--set", libtorch_set]), ("geoclip", [])):
        if children.wait(children.start([sys.executable, "-B", "setup/%s.py" % name, *options])) != 0:
            raise Failed("cannot prepare %s; see the error above" % name)
    # Stop the early build if it still runs. While it holds cargo's lock on the target folder, the main build cannot begin to compile
    # torch-sys, on which the main crate depends.
    children.wait(early, 0)


def report_namespaces():
    """Says if tests of several nodes will skip themselves. cargo hides what a test that passes prints."""
    probes = {
        "network namespaces": "ip netns add locdiff-probe && ip netns delete locdiff-probe",
        "mounts in a namespace": "unshare --mount mount -t tmpfs none /tmp",
    }
    for what, probe in probes.items():
        if subprocess.run(["sh", "-c", probe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
            log("%s cannot be made here, so the tests that need them are skipped" % what)


def run(libtorch_set, cuda_link):
    timed("format", command("cargo", "fmt", "--all", "--check"))
    timed("documents", command(sys.executable, "-B", "tests/check_docs.py"))
    prepare(libtorch_set)
    set_up_stamp = Stamp("set-up", files_below("setup/*", "tests/*_test.py", "deny.toml"))
    python_tests = ["-B", "-m", "unittest", "discover", "-s", "tests", "-p", "*_test.py"]
    set_up = None if set_up_stamp.passed else BackgroundStage("set-up", sys.executable, *python_tests)
    audit = BackgroundStage("audit", sys.executable, "-B", "setup/audit.py", "--installed")
    packages = BackgroundStage("python-packages", sys.executable, "-B", "setup/python_tools.py")
    timed("build", command("cargo", "build", "--release", "--locked", "--workspace", "--all-targets"))
    if set_up:
        timed("set-up", set_up.finish)
        set_up_stamp.write()
    cuda = CudaLink() if cuda_link else None
    timed("clippy", command("cargo", "clippy", "--release", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"))
    docs = ["cargo", "doc", "--release", "--locked", "--workspace", "--no-deps", "--lib", "--bin", "locdiff-worker", *AS_FOR_TESTS]
    timed("docs", command(*docs, RUSTDOCFLAGS="-D warnings"))
    timed("audit", audit.finish)
    timed("Python packages", packages.finish)
    timed("binaries", check_binaries)
    # Wait for the CUDA build before the tests, because some tests measure time and need an idle machine.
    if cuda:
        timed("CUDA link", cuda.finish)
    else:
        log("CUDA link: not needed for this variant")
    # Says so if there is no browser, because the tests that need one are then skipped.
    children.wait(children.start([sys.executable, "-B", "tests/browse.py", "--find"]))
    report_namespaces()
    quick, long = test_commands()
    timed("tests", quick)
    unless_unchanged("long-tests", whole_project(), long)
    timed("doc tests", command("cargo", "test", "--release", "--locked", "--workspace", "--doc"))


def main():
    parser = argparse.ArgumentParser(description="Runs all checks of the project.")
    parser.add_argument("--cuda-link", action="store_true", help="also compile and link the CUDA variant from .libtorch/cuda")
    parser.add_argument("--libtorch", default="auto", help="the set of wheels that setup/libtorch.py installs before the build")
    arguments = parser.parse_args()
    os.chdir(PROJECT)
    # The tests must use the Python for which the packages are installed.
    os.environ["PYTHON"] = sys.executable
    children.end_all_on_signals()
    start = time.monotonic()
    try:
        run(arguments.libtorch, arguments.cuda_link)
    except Failed as failure:
        log(str(failure))
        return 1
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    finally:
        children.end_all()
    log("all passed in %.0f s" % (time.monotonic() - start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
