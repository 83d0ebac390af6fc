#!/usr/bin/env python3
"""Installs libtorch in `.libtorch/` from the wheels pinned by the lock files. Needs pip, but no CUDA toolkit.

The script may be killed at any moment. Each wheel has a marker, which lists its files and is written last. A wheel counts as installed
only if the marker exists and all files in the list exist with the right sizes. Otherwise the next run installs the wheel again.

    .libtorch/site/{torch,nvidia}/   contents of the wheels: libraries, headers, licences
    .libtorch/cpu/                   LIBTORCH of the CPU variant: links without libtorch_cuda.so
    .libtorch/cuda/                  LIBTORCH of the CUDA variant: the folders of the wheel
    .libtorch/installed/NAME.json    one marker per wheel: its hash, its files and their sizes

torch-sys enables CUDA if `lib/libtorch_cuda.so` exists in LIBTORCH, so the CPU variant needs a separate folder without this file.
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

# pip always downloads the wheels for CPython 3.11, even if another Python version runs pip, because the libraries in the wheels do not
# depend on Python. The platform tags are those of the locked wheels.
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_25", "manylinux_2_18", "manylinux2014", "manylinux2010", "manylinux1"]
PIP_DOWNLOAD = ["download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes"]
PIP_DOWNLOAD += ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
PIP_DOWNLOAD += [word for tag in PLATFORMS for word in ("--platform", tag + "_x86_64")]

# The oldest glibc that manylinux_2_28 wheels support.
GLIBC_MIN = (2, 28)
PR_SET_PDEATHSIG = 1


class SetupError(Exception):
    """An expected error. The user sees only its text, without a traceback."""


def log(text):
    for line in text.splitlines():
        print("setup: " + line, file=sys.stderr, flush=True)


def space_advice(base):
    return "free some space, or make %s a symbolic link to a larger disk, and run again" % base.name


def megabytes(size_bytes):
    return "%d MB" % (-(-size_bytes // 10**6))


# --- choice of the variant -------------------------------------------------------------------------------


def choose_variant(root):
    """Returns `cpu` or `cuda`, and the user's own LIBTORCH or None."""
    requested = os.environ.get("LOCDIFF_CUDA", "")
    if requested not in ("", "0", "1"):
        raise SetupError("LOCDIFF_CUDA is `%s`, wanted 0 or 1" % requested)
    given = os.environ.get("LIBTORCH", "")
    if not given:
        return ("cuda" if requested == "1" or (not requested and gpu_present()) else "cpu"), None
    libtorch = Path(given)
    if not libtorch.is_absolute():
        raise SetupError("LIBTORCH is `%s`, wanted an absolute path, because cargo builds each crate in its own folder" % given)
    if libtorch.parent.resolve() == (root / ".libtorch").resolve():
        return ("cuda" if libtorch.name == "cuda" else "cpu"), None
    check_user_libtorch(libtorch)
    variant = "cuda" if (libtorch / "lib/libtorch_cuda.so").exists() else "cpu"
    if requested and requested != ("1" if variant == "cuda" else "0"):
        raise SetupError(
            "LOCDIFF_CUDA=%s, but LIBTORCH=%s is a %s libtorch; unset one of the two" % (requested, libtorch, variant.upper())
        )
    return variant, libtorch


def gpu_present():
    if os.path.exists("/dev/nvidia0"):
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_user_libtorch(libtorch):
    """Checks that the user's LIBTORCH is a libtorch of the right version."""
    advice = "; point LIBTORCH at a libtorch %s, or unset it to download one" % LIBTORCH_VERSION
    header = libtorch / "include/torch/headeronly/version.h"
    try:
        text = header.read_text(errors="replace")
    except OSError as error:
        raise SetupError("LIBTORCH=%s: cannot read %s: %s%s" % (libtorch, header, error.strerror, advice))
    parts = [re.search(r"#define TORCH_VERSION_%s (\d+)" % part, text) for part in ("MAJOR", "MINOR", "PATCH")]
    found = ".".join(part.group(1) if part else "?" for part in parts)
    if found != LIBTORCH_VERSION:
        raise SetupError("LIBTORCH=%s is libtorch %s, wanted %s%s" % (libtorch, found, LIBTORCH_VERSION, advice))
    if not (libtorch / "lib/libtorch_cpu.so").exists():
        raise SetupError("LIBTORCH=%s has no lib/libtorch_cpu.so%s" % (libtorch, advice))


def check_platform():
    machine = "%s %s" % (platform.system(), platform.machine())
    if machine != "Linux x86_64":
        raise SetupError("no wheels for %s, only for Linux x86_64; install libtorch %s by hand and set LIBTORCH to its folder"
                         % (machine, LIBTORCH_VERSION))
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC_MIN:
        found = ("%s %s" % (name, version)).strip() or "unknown"
        raise SetupError("the C library is %s, wanted glibc %d.%d or newer; install libtorch %s by hand and set LIBTORCH to its folder"
                         % ((found,) + GLIBC_MIN + (LIBTORCH_VERSION,)))


# --- installed wheels ------------------------------------------------------------------------------------


class Store:
    """The folder `.libtorch`. The caller must hold its lock."""

    def __init__(self, base):
        self.base = base
        self.site = base / "site"
        self.download = base / "download"
        self.unpack = base / "unpack"
        self.markers = base / "installed"

    def marker(self, wheel):
        return self.markers / (wheel.name + ".json")

    def problem(self, wheel):
        """Returns why the wheel must be installed, or None if it is intact. Checks only sizes, because this runs before every build."""
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

    def remove_unlisted(self, listed):
        """Removes the files of wheels that are in no lock file, such as those of an older version."""
        hashes = {wheel.sha256 for wheel in listed}
        for path in sorted(self.markers.glob("*.json")):
            marker = read_marker(path)
            if marker is not None and marker["sha256"] in hashes:
                continue
            for name in marker["files"] if marker else []:
                (self.site / name).unlink(missing_ok=True)
            path.unlink()

    def clear_leftovers(self):
        """Removes incomplete files of an interrupted run. Complete wheels in the download folder are kept and used."""
        shutil.rmtree(self.unpack, ignore_errors=True)
        shutil.rmtree(self.download / "tmp", ignore_errors=True)

    def install(self, wheel, archive):
        """Unpacks the wheel into a temporary folder, moves its files to the site folder, and writes the marker last."""
        import zipfile  # Imported only here: the import is slow, and most runs unpack nothing.

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
        write_atomically(self.marker(wheel), json.dumps({"sha256": wheel.sha256, "files": files}))
        archive.unlink()
        shutil.rmtree(self.unpack)


def read_marker(path):
    try:
        marker = json.loads(path.read_text())
        return marker if {"sha256", "files"} <= marker.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def write_atomically(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def link_atomically(path, target):
    if os.path.islink(path) and os.readlink(path) == target:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)


def write_prefixes(base):
    """Creates the two folders that LIBTORCH can point at."""
    for variant in ("cpu", "cuda"):
        link_atomically(base / variant / "include", "../site/torch/include")
    link_atomically(base / "cuda/lib", "../site/torch/lib")
    for library in ("libtorch_cpu.so", "libc10.so", "libgomp.so.1"):
        link_atomically(base / "cpu/lib" / library, "../../site/torch/lib/" + library)
    # The libtorch.so of the wheel needs libtorch_cuda.so. The CPU variant replaces this libtorch.so with a linker script that names the CPU
    # libraries. A linker script is enough, because torch-sys uses libtorch.so only to link with `-ltorch`.
    for name, text in (("lib/libtorch.so", "INPUT(-ltorch_cpu -lc10)\n"), ("build-version", LIBTORCH_VERSION + "\n")):
        path = base / "cpu" / name
        if not path.is_file() or path.read_text(errors="replace") != text:
            write_atomically(path, text)


# --- download --------------------------------------------------------------------------------------------


def fetch(wheel, store):
    """Returns the file of a wheel. If no earlier run has left the file, pip downloads it. The hash of the file is checked in both cases."""
    for archive in store.download.glob("*.whl"):
        if archive.stat().st_size == wheel.download_bytes and sha256_of(archive) == wheel.sha256:
            return archive
    if find_spec("pip") is None:
        raise SetupError("%s has no pip; install it (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; elsewhere: "
                         "python3 -m ensurepip) and run again" % sys.executable)
    log("downloading %s %s (%s)" % (wheel.name, wheel.version, megabytes(wheel.download_bytes)))
    requirement = store.download / "requirement.txt"
    write_atomically(requirement, "%s==%s --hash=sha256:%s\n" % (wheel.name, wheel.version, wheel.sha256))
    status, output = run_pip(PIP_DOWNLOAD + ["-r", str(requirement), "-d", str(store.download)], store.download / "tmp")
    if status != 0:
        raise SetupError(explain_pip(wheel, output))
    for archive in store.download.glob("*.whl"):
        if sha256_of(archive) == wheel.sha256:
            return archive
    raise SetupError("the file that pip downloaded for %s does not have the sha256 in %s" % (wheel.name, wheel.lock))


def run_pip(arguments, scratch):
    """Runs pip with its temporary files on the disk that was checked for space. pip is killed if this process dies."""
    scratch.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, TMPDIR=str(scratch), PIP_REQUIRE_VIRTUALENV="0", PIP_DISABLE_PIP_VERSION_CHECK="1", LC_ALL="C.UTF-8")
    libc = ctypes.CDLL(None)
    # pip prints its progress to stdout. Show the progress on our stderr, but only if our stderr is a terminal. The stderr of pip is
    # captured for the error message.
    on_terminal = sys.stderr.isatty()
    pip = subprocess.run(
        [sys.executable, "-m", "pip"] + ([] if on_terminal else ["--quiet"]) + arguments,
        stdin=subprocess.DEVNULL, stdout=sys.stderr if on_terminal else subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment, errors="replace", universal_newlines=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    return pip.returncode, pip.stderr


def explain_pip(wheel, output):
    name = "%s %s" % (wheel.name, wheel.version)
    got = re.search(r"^\s*Got\s+([0-9a-f]{64})", output, re.MULTILINE)
    if got:
        return ("%s: sha256 is %s, %s wants %s; the package source is damaged or not trustworthy\n"
                "nothing was unpacked; try another source (pip's index settings) and run again"
                % (name, got.group(1), wheel.lock, wheel.sha256))
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, "no space left")
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    # If the network fails, the last line of pip's output only says that pip found nothing. The reason is in earlier warnings about retries.
    broken = re.search(r"broken by '(?:.*: )?(.+)'", output)
    detail = " (%s)" % broken.group(1).rstrip("')") if broken else ""
    detail = (lines[-1] if lines else "nothing") + detail
    return ("cannot download %s: pip says: %s\n"
            "check the network and pip's settings (`python3 -m pip config list`) and run again; finished downloads are kept" % (name, detail))


def check_space(base, missing):
    """Checks that the disk has space for all unpacked wheels and for two copies of the largest wheel file. pip makes two copies during a download."""
    needed = sum(wheel.unpacked_bytes for wheel in missing) + 2 * max(wheel.download_bytes for wheel in missing)
    free = shutil.disk_usage(base).free
    if free < needed:
        raise SetupError("%s has %s free, wanted %s for %s; %s"
                         % (base, megabytes(free), megabytes(needed), ", ".join(wheel.name for wheel in missing), space_advice(base)))


# --- main ------------------------------------------------------------------------------------------------


def hold_lock(base):
    """Waits until no other set-up runs in the same folder. The kernel releases the lock if its holder dies."""
    lock = open(base / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log("another set-up is running in %s; waiting for it" % base)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def prepare(base, set_name, locks):
    listed = [wheel for name in SETS for wheel in load_set(locks, name, whole=False)]
    wanted = load_set(locks, set_name)
    base.mkdir(parents=True, exist_ok=True)
    with hold_lock(base):
        store = Store(base)
        store.clear_leftovers()
        store.remove_unlisted(listed)
        missing = []
        for wheel in wanted:
            problem = store.problem(wheel)
            if problem:
                missing.append(wheel)
                if problem != "not installed":
                    log("repairing %s: %s" % (wheel.name, problem))
        if missing:
            check_platform()
            check_space(base, missing)
        for wheel in missing:
            store.install(wheel, fetch(wheel, store))
        write_prefixes(base)
        shutil.rmtree(store.download, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description="Installs libtorch in .libtorch/ from the wheels pinned by the lock files.")
    parser.add_argument("--set", choices=[*SETS, "auto"], default="auto",
                        help="wheels to install; auto means cuda if there is a GPU or LOCDIFF_CUDA=1, else cpu")
    parser.add_argument("--root", type=Path, default=PROJECT, metavar="DIR", help="folder that contains .libtorch/ (default: the project)")
    parser.add_argument("--locks", type=Path, default=PROJECT / "setup", metavar="DIR", help="folder that contains the lock files (default: setup/)")
    parser.add_argument("--print-variant", action="store_true", help="print the set that `--set auto` chooses (cpu or cuda) and exit")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    base = root / ".libtorch"

    def work():
        variant, own = choose_variant(root)
        if arguments.print_variant:
            print(variant)
        elif own:
            log("using LIBTORCH=%s (%s, %s)" % (own, LIBTORCH_VERSION, variant))
        else:
            set_name = variant if arguments.set == "auto" else arguments.set
            prepare(base, set_name, arguments.locks)
            log("libtorch %s (%s) is ready in %s" % (LIBTORCH_VERSION, set_name, base))

    return run_guarded(base, work)


def run_guarded(base, work):
    """Runs a set-up that writes into `base`. Prints expected errors and returns the exit code."""
    try:
        work()
    except SetupError as error:
        log(str(error))
        return 1
    except KeyboardInterrupt:
        log("interrupted; the next run continues where this one stopped")
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            Store(base).clear_leftovers()
            free = megabytes(shutil.disk_usage(base if base.exists() else base.parent).free)
            log("the disk of %s is full (%s free after removing incomplete files); %s" % (base, free, space_advice(base)))
        else:
            log("%s: %s" % (error.filename or base, error.strerror or error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
