#!/usr/bin/env python3
"""Installs the two binaries and the libraries that the worker needs, so that they work without the checkout.

    PREFIX/bin/{locdiff-launch,locdiff-worker}
    PREFIX/lib/locdiff/{torch/lib,nvidia/...}     first on the worker's run path, relative to it

libtorch's libraries find each other by `$ORIGIN`-relative run paths: the layout of the site folder is kept.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import elf  # noqa: E402 (the line above must come first)

BINARIES = ("locdiff-launch", "locdiff-worker")


def put(source, target, mode):
    """Writes beside and renames: a running worker keeps the file it has open."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".new")
    shutil.copyfile(source, beside)
    beside.chmod(mode)
    os.replace(beside, target)


def libraries(worker):
    """The files to install, as `(source, path under lib/locdiff)`."""
    places = {name: Path(place) for name, place in elf.resolve(worker) if place}
    lib = places["libtorch_cpu.so"].resolve().parent
    nvidia = lib.parent.parent / "nvidia"
    if "libtorch_cuda.so" in places:
        # libtorch opens some libraries by name at run time (cuDNN's engines, NVRTC's builtins): ldd does not show them.
        found = [path for path in lib.glob("*.so*") if path.name != "libtorch_python.so"] + list(nvidia.glob("*/lib/*.so*"))
    else:
        found = [place.resolve() for place in places.values()]
    for path in found:
        if lib in path.parents:
            yield path, Path("torch/lib", path.name)
        elif nvidia in path.parents:
            yield path, Path("nvidia", path.relative_to(nvidia))


def install(binaries, root):
    worker = binaries / "locdiff-worker"
    missing = [name for name, place in elf.resolve(worker) if place is None]
    if missing:
        raise OSError(0, "the loader does not find %s; run `make setup build`" % ", ".join(missing), str(worker))
    size_bytes = 0
    for source, name in libraries(worker):
        put(source, root / "lib/locdiff" / name, 0o644)
        size_bytes += source.stat().st_size
    for name in BINARIES:
        put(binaries / name, root / "bin" / name, 0o755)
    return size_bytes


def main():
    parser = argparse.ArgumentParser(description="Installs the binaries and the libraries of the worker.")
    parser.add_argument("--binaries", type=Path, required=True, metavar="DIR", help="where cargo put them")
    parser.add_argument("--prefix", required=True, metavar="DIR", help="where they will be used")
    parser.add_argument("--destdir", default="", metavar="DIR", help="put before the prefix, for packagers")
    arguments = parser.parse_args()
    if not os.path.isabs(arguments.prefix):
        parser.error("--prefix is `%s`, wanted an absolute path" % arguments.prefix)
    root = Path(arguments.destdir + arguments.prefix)
    try:
        size_bytes = install(arguments.binaries, root)
    except OSError as error:
        print("install: %s: %s" % (error.filename2 or error.filename or root, error.strerror), file=sys.stderr)
        return 1
    print("install: %s in %s/bin, %d MB of libraries in %s/lib/locdiff" % (" and ".join(BINARIES), root, size_bytes // 10**6, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
