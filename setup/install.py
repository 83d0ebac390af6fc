#!/usr/bin/env python3
"""Installs the two binaries with all that they need, so that they work without the checkout. `--uninstall` removes them.

    PREFIX/bin/{locdiff-launch,locdiff-worker}
    PREFIX/lib/locdiff/{torch/lib,nvidia/...}     the worker's run path starts with these folders, relative to the worker
    PREFIX/share/{bash-completion,zsh,fish}/...   completions, where the shells look for them
    PREFIX/share/doc/locdiff-launch/              documents and licences
    PREFIX/share/locdiff-launch/installed.txt     the installed files and the folders that were created for them

`lib/locdiff` has the same layout as `.libtorch/site`, because libtorch's libraries find each other by run paths relative to `$ORIGIN`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import elf  # noqa: E402 (the line above must come first)

PROJECT = Path(__file__).resolve().parent.parent
BINARIES = ("locdiff-launch", "locdiff-worker")
COMPLETIONS = {
    "bash": "share/bash-completion/completions/locdiff-launch",
    "zsh": "share/zsh/site-functions/_locdiff-launch",
    "fish": "share/fish/vendor_completions.d/locdiff-launch.fish",
}
# The launcher's help refers to OPERATIONS.md in this folder.
DOCUMENTS = "share/doc/locdiff-launch/"
DOCUMENT_SOURCES = {
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "OPERATIONS.md": "docs/OPERATIONS.md",
    "configs/README.md": "configs/README.md",
    "LICENSE-MIT": "LICENSE-MIT",
    "LICENSE-APACHE": "LICENSE-APACHE",
}
LIST = "share/locdiff-launch/installed.txt"


def install_file(source, target, mode):
    """Writes a file under a temporary name and then renames it, so that a running worker keeps the old file open. `source` is a path or bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    try:
        if isinstance(source, bytes):
            temporary.write_bytes(source)
        else:
            shutil.copyfile(source, temporary)
        temporary.chmod(mode)
        os.replace(temporary, target)
    except BaseException:
        if temporary.exists():
            temporary.unlink()
        raise


def libraries(places):
    """Yields a pair `(source, path under lib/locdiff)` for each library to install."""
    lib = places["libtorch_cpu.so"].resolve().parent
    nvidia = lib.parent.parent / "nvidia"
    if "libtorch_cuda.so" in places:
        # libtorch opens some libraries by name at run time (cuDNN's engines, NVRTC's builtins). ldd does not list these libraries, so all
        # libraries except libtorch_python.so are copied.
        found = [path for path in lib.glob("*.so*") if path.name != "libtorch_python.so"] + list(nvidia.glob("*/lib/*.so*"))
    else:
        found = [place.resolve() for place in places.values()]
    for path in found:
        if lib in path.parents:
            yield path, Path("torch/lib", path.name)
        elif nvidia in path.parents:
            yield path, Path("nvidia", path.relative_to(nvidia))


def licences(places):
    """Yields the licences of the packages that the libraries come from, as `(source, path under DOCUMENTS)`."""
    site = places["libtorch_cpu.so"].resolve().parent.parent.parent
    for package in [*site.glob("torch-*.dist-info"), *site.glob("nvidia_*.dist-info")]:
        for path in package.rglob("*"):
            if path.is_file() and path.name.upper().startswith(("LICENSE", "NOTICE")):
                yield path, Path("licences", package.stem, path.name)


def planned_files(binaries):
    """Returns the files to install, as a dict. A key is a path under the prefix. Its value is the source of the content: a path or bytes."""
    worker = binaries / "locdiff-worker"
    resolved = elf.resolve(worker)
    missing = [name for name, place in resolved if place is None]
    if missing:
        raise OSError(0, "the loader does not find %s; run `make setup build`" % ", ".join(missing), str(worker))
    places = {name: Path(place) for name, place in resolved if place}
    files = {"lib/locdiff/%s" % name: source for source, name in libraries(places)}
    files.update(("%s%s" % (DOCUMENTS, name), source) for source, name in licences(places))
    files.update((DOCUMENTS + name, PROJECT / source) for name, source in DOCUMENT_SOURCES.items())
    for shell, name in COMPLETIONS.items():
        command = [str(binaries / "locdiff-launch"), "completions", shell]
        files[name] = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    files.update(("bin/" + name, binaries / name) for name in BINARIES)
    return files


def read_list(root):
    """Returns the paths in the list of an earlier installation, relative to the prefix. Paths of folders end in a slash."""
    path = root / LIST
    names = path.read_bytes().decode().splitlines() if path.exists() else []
    for name in names:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise OSError(0, "`%s` is not below the prefix; the list is damaged, correct it first" % name, str(path))
    return set(names)


def write_list(root, names):
    install_file("".join(name + "\n" for name in sorted(names)).encode(), root / LIST, 0o644)


def remove(root, names):
    """Removes the files, then the empty folders. Removes the list itself after all other files, so that an interrupted removal can be repeated."""
    for name in sorted(names, key=lambda name: name == LIST):
        path = root / name
        if not name.endswith("/") and (path.is_symlink() or path.is_file()):
            path.unlink()
    # In this order, a folder comes after the folders that it contains.
    for name in sorted((name for name in names if name.endswith("/")), reverse=True):
        path = root / name
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def install(binaries, root):
    """Installs all files. Removes the files of an earlier installation that are not part of this installation. Returns the total size of the libraries in bytes."""
    files = planned_files(binaries)
    before = read_list(root)
    names = {LIST, *files}
    parents = {folder for name in names for folder in Path(name).parents}
    created = {folder.as_posix() + "/" for folder in parents if not (root / folder).exists()}
    # The list is written first. If the installation is interrupted, the list already names everything to remove.
    # If a file of another program has the name of a new file, the list names it only after it has been replaced.
    new = {name for name in names if not (root / name).exists()}
    write_list(root, before | created | new)
    size_bytes = 0
    for name, source in files.items():
        install_file(source, root / name, 0o755 if name.startswith("bin/") else 0o644)
        size_bytes += (root / name).stat().st_size if name.startswith("lib/") else 0
    folders = {name for name in before | created if name.endswith("/")}
    remove(root, (before - names) | folders)
    write_list(root, names | {name for name in folders if (root / name).is_dir()})
    return size_bytes


def uninstall(root):
    """Removes the files of the installation, then those of its folders that are empty. Returns the number of files."""
    names = read_list(root)
    if not names:
        raise OSError(0, "no such list: nothing is installed here; give the PREFIX and DESTDIR of `make install`", str(root / LIST))
    remove(root, names)
    return sum(not name.endswith("/") for name in names)


def main():
    parser = argparse.ArgumentParser(description="Installs the binaries with all that they need, or removes them.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--binaries", type=Path, metavar="DIR", help="install the binaries that were built in this folder")
    action.add_argument("--uninstall", action="store_true", help="remove what was installed")
    parser.add_argument("--prefix", required=True, metavar="DIR", help="installation prefix, an absolute path")
    parser.add_argument("--destdir", default="", metavar="DIR", help="staging folder, prepended to the prefix, for packagers")
    arguments = parser.parse_args()
    if not os.path.isabs(arguments.prefix):
        parser.error("--prefix is `%s`, wanted an absolute path" % arguments.prefix)
    root = Path(arguments.destdir + arguments.prefix)
    verb = "uninstall" if arguments.uninstall else "install"
    try:
        if arguments.uninstall:
            print("uninstall: removed %d files from %s" % (uninstall(root), root))
            return 0
        size_bytes = install(arguments.binaries, root)
    except OSError as error:
        print("%s: %s: %s" % (verb, error.filename2 or error.filename or root, error.strerror), file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print("%s: `%s` exited with %d" % (verb, " ".join(error.cmd), error.returncode), file=sys.stderr)
        return 1
    print("install: %s in %s/bin, %d MB of libraries in %s/lib/locdiff" % (" and ".join(BINARIES), root, size_bytes // 10**6, root))
    print("install: documents and licences in %s/%s, completions for %s" % (root, DOCUMENTS.rstrip("/"), ", ".join(COMPLETIONS)))
    print("install: `make uninstall` with the same PREFIX and DESTDIR removes all of this")
    return 0


if __name__ == "__main__":
    sys.exit(main())
