#!/usr/bin/env python3
"""`make test`: every check, one after the other. What needs no libtorch compiles while that is downloaded. The audit, the set-up's own
tests and the installation of Python packages run beside the build; once it is there, the CUDA variant compiles and links beside the checks.

The Makefile has chosen the variant and set LIBTORCH and CARGO_TARGET_DIR for it. One Cargo profile (release) serves every
stage, so that nothing is built twice. The first failure ends the run, and with it everything that was started.
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
# Test modules that are run again only when a file of the project has changed.
LONG_MODULES = ("eval", "long", "comm", "split", "perturbation", "train", "gang", "world")
# Libraries that take long to compile and do not need libtorch.
EARLY_LIBRARIES = ("parquet", "rustls", "arrow-array")
# There are no examples; but with this, dependencies get the features that the tests want, and none is built once more.
AS_FOR_TESTS = ("--examples",)


class Failed(Exception):
    """A stage that did not pass; its text says which and why."""


def say(text):
    print("test: " + text, file=sys.stderr, flush=True)


def timed(name, work):
    """Runs one stage and says how long it took."""
    start = time.monotonic()
    say("%s ..." % name)
    reason = work()
    seconds = time.monotonic() - start
    if reason:
        raise Failed("%s failed after %.1f s: %s" % (name, seconds, reason))
    say("%s passed in %.1f s" % (name, seconds))


def command(*words, **environment):
    """A stage that is one command: its reason to fail is its exit status."""
    def work():
        status = children.wait(children.start(words, env=dict(os.environ, **environment)))
        return "`%s` exited with %d" % (" ".join(words), status) if status else None
    return work


def files_below(*patterns):
    return [path for pattern in patterns for path in PROJECT.glob(pattern)]


def whole_project():
    """Every file that git does not ignore, and the libtorch that it is built with."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], stdout=subprocess.PIPE, check=True)
    paths = [PROJECT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return paths + [Path(os.environ.get("LIBTORCH", ".libtorch/cpu")) / "build-version"]


class Stamp:
    """Remembers the inputs with which a stage has passed; LOCDIFF_TEST_ALL=1 forgets them."""

    def __init__(self, name, inputs):
        digest = hashlib.sha256()
        for path in sorted(path for path in inputs if path.is_file()):
            digest.update(str(path).encode() + b"\0" + path.read_bytes())
        self.digest = digest.hexdigest()
        self.path = TARGET / (".passed-" + name)
        known = self.path.is_file() and self.path.read_text() == self.digest
        self.passed = known and os.environ.get("LOCDIFF_TEST_ALL") != "1"
        if self.passed:
            say("%s: unchanged since it passed" % name)

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.digest)


def unless_unchanged(name, inputs, work):
    """A stage that is not run again while its inputs are as they were when it passed."""
    stamp = Stamp(name, inputs)
    if not stamp.passed:
        timed(name, work)
        stamp.write()


class Beside:
    """A stage that runs while the build does: it waits for the network most of the time, or takes the core that is idle."""

    def __init__(self, name, *words):
        self.log = TARGET / (name + ".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as log:
            # The build comes first: everything else waits for it.
            self.child = children.start(("nice", *words), stdout=log, stderr=subprocess.STDOUT)

    def finish(self):
        status = children.wait(self.child)
        # Also where it passed: what could not be checked is said there.
        print(self.log.read_text(errors="replace"), file=sys.stderr, flush=True)
        return "the log above is %s" % self.log if status else None


# --- the CUDA variant, without a GPU ---------------------------------------------------------------------


class CudaLink:
    """Compiles and links the CUDA variant in the background, unoptimised, in a folder where nobody takes it for the real one."""

    def __init__(self):
        self.target = TARGET / "cuda-link"
        self.log = self.target / "link.log"
        self.target.mkdir(parents=True, exist_ok=True)
        self.take_dependencies()
        environment = dict(os.environ, LIBTORCH=str(PROJECT / ".libtorch/cuda"), CARGO_TERM_COLOR="never")
        words = ["cargo", "build", "--release", "--locked", "--workspace", "--bins", *AS_FOR_TESTS, "--target-dir", str(self.target)]
        words += ["--config", "profile.release.package.locdiff.opt-level=0", "--config", "profile.release.package.locdiff.debug=false"]
        with open(self.log, "w") as log:
            self.child = children.start(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def take_dependencies(self):
        """The first time, begins with what the CPU variant has built: all but torch-sys and what stands on it is the same."""
        ready = self.target / "release"
        if ready.exists():
            return
        started = self.target / "release.copying"
        shutil.rmtree(started, ignore_errors=True)
        for part in (".fingerprint", "build", "deps"):
            shutil.copytree(TARGET / "release" / part, started / part, symlinks=True)
        started.rename(ready)

    def finish(self):
        """Waits for the build and looks at what it linked."""
        if children.wait(self.child) != 0:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            print("\n".join(lines), file=sys.stderr, flush=True)
            return "the CUDA variant does not build; the log above is %s" % self.log
        worker = self.target / "release/locdiff-worker"
        direct = elf.needed(worker)
        if "libtorch_cuda.so" not in direct:
            return "%s does not need libtorch_cuda.so, only %s" % (worker, ", ".join(direct))
        # What libtorch_cuda.so needs in turn is not all there: the `link` set is for linking.
        return not_found(worker, direct)


def not_found(binary, names=None):
    missing = sorted({name for name, place in elf.resolve(binary) if place is None and (names is None or name in names)})
    return "%s: the loader does not find %s" % (binary, ", ".join(missing)) if missing else None


def check_binaries():
    """The launcher starts without libtorch; the worker finds all of it with no environment set."""
    launcher = TARGET / "release/locdiff-launch"
    linked = [name for name in elf.needed(launcher) if name.startswith(LIBTORCH_NAMES)]
    if linked:
        return "%s links %s; the control plane must not" % (launcher, ", ".join(linked))
    return not_found(TARGET / "release/locdiff-worker")


# --- the stages ------------------------------------------------------------------------------------------


def test_commands():
    """The tests of every run, and those that a run with nothing changed leaves out: endurance, and gangs of processes."""
    if shutil.which("cargo-nextest"):
        nextest = ["cargo", "nextest", "run", "--release", "--locked", "--workspace", "-E"]
        long = " or ".join("test(/(^|::)%s::/)" % module for module in LONG_MODULES)
        return command(*nextest, "not (%s)" % long), command(*nextest, long)
    test = ["cargo", "test", "--release", "--locked", "--workspace", "--all-targets", "--"]
    skips = [word for module in LONG_MODULES for word in ("--skip", module + "::")]
    return command(*test, *skips), command(*test, *(module + "::" for module in LONG_MODULES))


def prepare(libtorch_set):
    """libtorch and GeoCLIP's weights; what needs neither compiles meanwhile, as far as it comes: the build takes it over."""
    words = ["cargo", "build", "--release", "--locked", "--lib"] + [word for name in EARLY_LIBRARIES for word in ("--package", name)]
    TARGET.mkdir(parents=True, exist_ok=True)
    with open(TARGET / "early.log", "w") as log:
        early = children.start(("nice", *words), stdout=log, stderr=subprocess.STDOUT)
    for name, options in (("libtorch", ["--set", libtorch_set]), ("geoclip", [])):
        if children.wait(children.start([sys.executable, "-B", "setup/%s.py" % name, *options])) != 0:
            raise Failed("cannot prepare %s; see above" % name)
    # It ends here: from now on torch-sys comes first, because the model waits for it.
    children.wait(early, 0)


def run(libtorch_set, cuda_link):
    timed("format", command("cargo", "fmt", "--all", "--check"))
    prepare(libtorch_set)
    set_up_stamp = Stamp("set-up", files_below("setup/*", "tests/*_test.py", "deny.toml"))
    python_tests = ["-B", "-m", "unittest", "discover", "-s", "tests", "-p", "*_test.py"]
    set_up = None if set_up_stamp.passed else Beside("set-up", sys.executable, *python_tests)
    audit = Beside("audit", sys.executable, "-B", "setup/audit.py", "--installed")
    packages = Beside("python-packages", sys.executable, "-B", "setup/python_tools.py")
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
    # Before the tests, some of which measure time: they get a machine with nothing else to do.
    if cuda:
        timed("CUDA link", cuda.finish)
    else:
        say("CUDA link: nothing to do beside this variant")
    quick, long = test_commands()
    timed("tests", quick)
    unless_unchanged("long-tests", whole_project(), long)
    timed("doc tests", command("cargo", "test", "--release", "--locked", "--workspace", "--doc"))


def main():
    parser = argparse.ArgumentParser(description="Runs every check of the project.")
    parser.add_argument("--cuda-link", action="store_true", help="also compile and link the CUDA variant from .libtorch/cuda")
    parser.add_argument("--libtorch", default="auto", help="the set of setup/libtorch.py to prepare first")
    arguments = parser.parse_args()
    os.chdir(PROJECT)
    # Tests that run Python take the one that its packages are installed for.
    os.environ["PYTHON"] = sys.executable
    children.end_all_on_signals()
    start = time.monotonic()
    try:
        run(arguments.libtorch, arguments.cuda_link)
    except Failed as failure:
        say(str(failure))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        children.end_all()
    say("all passed in %.0f s" % (time.monotonic() - start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
