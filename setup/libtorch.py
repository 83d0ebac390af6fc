#!/usr/bin/env python3
"""Prepares libtorch in `.libtorch/` from the wheels that the lock files pin; needs pip, no CUDA toolkit.

A run may be killed at any moment: a wheel counts as installed only once its marker, written last, lists
files that are all there with their sizes. Whatever else is found is leftover, and the next run repairs it.

    .libtorch/site/{torch,nvidia}/   what the wheels hold: libraries, headers, licences
    .libtorch/cpu/                   LIBTORCH of the CPU variant: links without libtorch_cuda.so
    .libtorch/cuda/                  LIBTORCH of the CUDA variant: the wheel's own folders
    .libtorch/installed/NAME.json    one marker for each wheel: its hash, its files and their sizes

torch-sys turns CUDA on where it sees `lib/libtorch_cuda.so`, which is why the CPU variant needs a prefix of its own.
"""

import argparse
import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

sys.dont_write_bytecode = True
from locks import SETS, WANTED_MEMBER, load_set, sha256_of  # noqa: E402 (the line above must come first)

LIBTORCH_VERSION = "2.11.0"
PROJECT = Path(__file__).resolve().parent.parent

# Whatever Python runs pip, the wheels are those of CPython 3.11: the libraries inside do not depend on Python.
# The tags are those that the locked wheels carry.
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_25", "manylinux_2_18", "manylinux2014", "manylinux2010", "manylinux1"]
PIP_DOWNLOAD = ["download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes"]
PIP_DOWNLOAD += ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
PIP_DOWNLOAD += [word for tag in PLATFORMS for word in ("--platform", tag + "_x86_64")]

# The C library that manylinux_2_28 wheels are built for.
GLIBC_MIN = (2, 28)
PR_SET_PDEATHSIG = 1


class SetupError(Exception):
    """Something that can be expected to go wrong; its text is all that the user sees."""


def say(text):
    for line in text.splitlines():
        print("setup: " + line, file=sys.stderr, flush=True)


def make_room(base):
    return "free some space, or make %s a link to a larger disk, and run again" % base.name


def megabytes(size_bytes):
    return "%d MB" % (-(-size_bytes // 10**6))


# --- which variant ---------------------------------------------------------------------------------------


def choose_variant(root):
    """`cpu` or `cuda`, and the user's own LIBTORCH where there is one."""
    asked = os.environ.get("LOCDIFF_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SetupError("LOCDIFF_CUDA is `%s`, wanted 0 or 1" % asked)
    given = os.environ.get("LIBTORCH", "")
    if not given:
        return ("cuda" if asked == "1" or (not asked and gpu_present()) else "cpu"), None
    libtorch = Path(given)
    if not libtorch.is_absolute():
        raise SetupError("LIBTORCH is `%s`, wanted an absolute path: cargo builds each crate in a folder of its own" % given)
    if libtorch.parent.resolve() == (root / ".libtorch").resolve():
        return ("cuda" if libtorch.name == "cuda" else "cpu"), None
    check_own(libtorch)
    variant = "cuda" if (libtorch / "lib/libtorch_cuda.so").exists() else "cpu"
    if asked and asked != ("1" if variant == "cuda" else "0"):
        raise SetupError(
            "LOCDIFF_CUDA=%s, but LIBTORCH=%s is a %s libtorch; unset one of the two" % (asked, libtorch, variant.upper())
        )
    return variant, libtorch


def gpu_present():
    if os.path.exists("/dev/nvidia0"):
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_own(libtorch):
    """Refuses a LIBTORCH of the user's that is not a libtorch of the right version."""
    way_out = "; point LIBTORCH at a libtorch %s, or unset it to have one prepared" % LIBTORCH_VERSION
    header = libtorch / "include/torch/headeronly/version.h"
    try:
        text = header.read_text(errors="replace")
    except OSError as error:
        raise SetupError("LIBTORCH=%s: cannot read %s: %s%s" % (libtorch, header, error.strerror, way_out))
    parts = [re.search(r"#define TORCH_VERSION_%s (\d+)" % part, text) for part in ("MAJOR", "MINOR", "PATCH")]
    found = ".".join(part.group(1) if part else "?" for part in parts)
    if found != LIBTORCH_VERSION:
        raise SetupError("LIBTORCH=%s is libtorch %s, wanted %s%s" % (libtorch, found, LIBTORCH_VERSION, way_out))
    if not (libtorch / "lib/libtorch_cpu.so").exists():
        raise SetupError("LIBTORCH=%s has no lib/libtorch_cpu.so%s" % (libtorch, way_out))


def check_platform():
    machine = "%s %s" % (platform.system(), platform.machine())
    if machine != "Linux x86_64":
        raise SetupError("no wheels for %s, only for Linux x86_64; set LIBTORCH to a libtorch %s by hand" % (machine, LIBTORCH_VERSION))
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC_MIN:
        found = ("%s %s" % (name, version)).strip() or "another"
        raise SetupError("the C library is %s, wanted glibc %d.%d or newer; set LIBTORCH to a libtorch %s by hand"
                         % ((found,) + GLIBC_MIN + (LIBTORCH_VERSION,)))


# --- what is installed -----------------------------------------------------------------------------------


class Store:
    """The folder `.libtorch`; the caller holds its lock."""

    def __init__(self, base):
        self.base = base
        self.site = base / "site"
        self.download = base / "download"
        self.unpack = base / "unpack"
        self.markers = base / "installed"

    def marker(self, wheel):
        return self.markers / (wheel.name + ".json")

    def problem(self, wheel):
        """Why the wheel has to be installed again; None where it is whole. Sizes only: this runs before every build."""
        marker = read_marker(self.marker(wheel))
        if marker is None or marker["sha256"] != wheel.sha256:
            return "not installed"
        for name, size in marker["files"].items():
            try:
                found = os.stat(os.path.join(self.site, name)).st_size
            except OSError:
                return "%s is missing" % name
            if found != size:
                return "%s has %d bytes, wanted %d" % (name, found, size)
        return None

    def remove_strangers(self, known):
        """Removes the files of wheels that no lock file names any more, such as those of an older version."""
        hashes = {wheel.sha256 for wheel in known}
        for path in sorted(self.markers.glob("*.json")):
            marker = read_marker(path)
            if marker is not None and marker["sha256"] in hashes:
                continue
            for name in marker["files"] if marker else []:
                (self.site / name).unlink(missing_ok=True)
            path.unlink()

    def clear_leftovers(self):
        """Drops what an earlier run left half-done; whole wheels in the download folder are kept and used."""
        shutil.rmtree(self.unpack, ignore_errors=True)
        shutil.rmtree(self.download / "tmp", ignore_errors=True)

    def install(self, wheel, archive):
        """Unpacks beside the site folder, moves file by file into it, and writes the marker last."""
        import zipfile  # slow to import, and most runs have nothing to unpack

        self.marker(wheel).unlink(missing_ok=True)
        shutil.rmtree(self.unpack, ignore_errors=True)
        files = {}
        with zipfile.ZipFile(archive) as contents:
            for member in contents.infolist():
                if not member.is_dir() and WANTED_MEMBER.search(member.filename):
                    contents.extract(member, self.unpack)
                    files[member.filename] = member.file_size
        for folder in {os.path.dirname(name) for name in files}:
            (self.site / folder).mkdir(parents=True, exist_ok=True)
        for name in files:
            os.replace(self.unpack / name, self.site / name)
        write_whole(self.marker(wheel), json.dumps({"sha256": wheel.sha256, "files": files}))
        archive.unlink()
        shutil.rmtree(self.unpack)


def read_marker(path):
    try:
        marker = json.loads(path.read_text())
        return marker if {"sha256", "files"} <= marker.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def write_whole(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


def link_whole(path, target):
    if os.path.islink(path) and os.readlink(path) == target:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    os.replace(beside, path)


def write_prefixes(base):
    """The two folders that LIBTORCH may point at."""
    for variant in ("cpu", "cuda"):
        link_whole(base / variant / "include", "../site/torch/include")
    link_whole(base / "cuda/lib", "../site/torch/lib")
    for library in ("libtorch_cpu.so", "libc10.so", "libgomp.so.1"):
        link_whole(base / "cpu/lib" / library, "../../site/torch/lib/" + library)
    # The wheel's own libtorch.so needs libtorch_cuda.so; torch-sys links `-ltorch` and is content with a linker script.
    for name, text in (("lib/libtorch.so", "INPUT(-ltorch_cpu -lc10)\n"), ("build-version", LIBTORCH_VERSION + "\n")):
        path = base / "cpu" / name
        if not path.is_file() or path.read_text(errors="replace") != text:
            write_whole(path, text)


# --- download --------------------------------------------------------------------------------------------


def fetch(wheel, store):
    """The wheel's file, checked against its hash: one that an earlier run left, or a new download."""
    for archive in store.download.glob("*.whl"):
        if archive.stat().st_size == wheel.download_bytes and sha256_of(archive) == wheel.sha256:
            return archive
    if find_spec("pip") is None:
        raise SetupError("%s has no pip; install it (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; elsewhere: "
                         "python3 -m ensurepip) and run again" % sys.executable)
    say("downloading %s %s (%s)" % (wheel.name, wheel.version, megabytes(wheel.download_bytes)))
    requirement = store.download / "requirement.txt"
    write_whole(requirement, "%s==%s --hash=sha256:%s\n" % (wheel.name, wheel.version, wheel.sha256))
    status, output = run_pip(PIP_DOWNLOAD + ["-r", str(requirement), "-d", str(store.download)], store.download / "tmp")
    if status != 0:
        raise SetupError(explain_pip(wheel, output))
    for archive in store.download.glob("*.whl"):
        if sha256_of(archive) == wheel.sha256:
            return archive
    raise SetupError("pip downloaded no file with the sha256 that %s wants for %s" % (wheel.lock, wheel.name))


def run_pip(arguments, scratch):
    """Runs pip with its scratch files on the disk that was checked for space; it dies with this process."""
    scratch.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, TMPDIR=str(scratch), PIP_REQUIRE_VIRTUALENV="0", PIP_DISABLE_PIP_VERSION_CHECK="1", LC_ALL="C.UTF-8")
    libc = ctypes.CDLL(None)
    # A person sees pip's progress bar; a log does not. Errors go to stderr, which is kept for the message.
    watched = sys.stderr.isatty()
    pip = subprocess.run(
        [sys.executable, "-m", "pip"] + ([] if watched else ["--quiet"]) + arguments,
        stdin=subprocess.DEVNULL, stdout=sys.stderr if watched else subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment, errors="replace", universal_newlines=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    return pip.returncode, pip.stderr


def explain_pip(wheel, output):
    name = "%s %s" % (wheel.name, wheel.version)
    got = re.search(r"^\s*Got\s+([0-9a-f]{64})", output, re.MULTILINE)
    if got:
        return ("%s: sha256 is %s, %s wants %s; the package source is damaged or not to be trusted\n"
                "nothing was unpacked; try another source (pip's index settings) and run again"
                % (name, got.group(1), wheel.lock, wheel.sha256))
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, "no space left")
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    # pip's last line is only that it found nothing; the reason is in its warnings about retries.
    broken = re.search(r"broken by '(?:.*: )?(.+)'", output)
    detail = " (%s)" % broken.group(1).rstrip("')") if broken else ""
    detail = (lines[-1] if lines else "nothing") + detail
    return ("cannot download %s: pip says: %s\n"
            "check the network and pip's settings (`python3 -m pip config list`) and run again; what is done is kept" % (name, detail))


def check_space(base, missing):
    """Wheels come one at a time, and pip holds two copies of the one it downloads."""
    needed = sum(wheel.unpacked_bytes for wheel in missing) + 2 * max(wheel.download_bytes for wheel in missing)
    free = shutil.disk_usage(base).free
    if free < needed:
        raise SetupError("%s has %s free, %s wanted for %s; %s"
                         % (base, megabytes(free), megabytes(needed), ", ".join(wheel.name for wheel in missing), make_room(base)))


# --- the whole -------------------------------------------------------------------------------------------


def hold_lock(base):
    """Waits for another set-up in the same folder. The kernel drops the lock when its holder dies."""
    lock = open(base / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is at work in %s; waiting for it" % base)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def prepare(base, set_name, locks):
    known = [wheel for name in SETS for wheel in load_set(locks, name, whole=False)]
    wanted = load_set(locks, set_name)
    base.mkdir(parents=True, exist_ok=True)
    with hold_lock(base):
        store = Store(base)
        store.clear_leftovers()
        store.remove_strangers(known)
        missing = []
        for wheel in wanted:
            problem = store.problem(wheel)
            if problem:
                missing.append(wheel)
                if problem != "not installed":
                    say("repairing %s: %s" % (wheel.name, problem))
        if missing:
            check_platform()
            check_space(base, missing)
        for wheel in missing:
            store.install(wheel, fetch(wheel, store))
        write_prefixes(base)
        shutil.rmtree(store.download, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description="Prepares libtorch in .libtorch/ from the wheels that the lock files pin.")
    parser.add_argument("--set", choices=[*SETS, "auto"], default="auto", help="auto: cuda with a GPU or LOCDIFF_CUDA=1, else cpu")
    parser.add_argument("--root", type=Path, default=PROJECT, metavar="DIR", help="where .libtorch/ lies (default: the project)")
    parser.add_argument("--locks", type=Path, default=PROJECT / "setup", metavar="DIR", help="where the lock files are (default: setup/)")
    parser.add_argument("--print-variant", action="store_true", help="print cpu or cuda, as `--set auto` would choose, and stop")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    base = root / ".libtorch"

    def work():
        variant, own = choose_variant(root)
        if arguments.print_variant:
            print(variant)
        elif own:
            say("using LIBTORCH=%s (%s, %s)" % (own, LIBTORCH_VERSION, variant))
        else:
            set_name = variant if arguments.set == "auto" else arguments.set
            prepare(base, set_name, arguments.locks)
            say("libtorch %s (%s) is ready in %s" % (LIBTORCH_VERSION, set_name, base))

    return guarded(base, work)


def guarded(base, work):
    """Runs a set-up that writes into `base`; what can be expected to go wrong is said, and the exit code returned."""
    try:
        work()
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            Store(base).clear_leftovers()
            free = megabytes(shutil.disk_usage(base if base.exists() else base.parent).free)
            say("the disk of %s filled up (%s free now that leftovers are removed); %s" % (base, free, make_room(base)))
        else:
            say("%s: %s" % (error.filename or base, error.strerror or error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
