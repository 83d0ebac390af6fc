#!/usr/bin/env python3
"""Installs the two binaries and the worker's libraries, so that the binaries work without the checkout.

    PREFIX/bin/{locdiff-launch,locdiff-worker}
    PREFIX/lib/locdiff/{torch/lib,nvidia/...}     the worker's run path starts with these folders, relative to the worker

`lib/locdiff` has the same layout as `.libtorch/site`, because libtorch's libraries find each other by run paths relative to `$ORIGIN`.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import elf  # noqa: E402 (the line above must come first)

BINARIES = ("locdiff-launch", "locdiff-worker")


def install_file(source, target, mode):
    """Copies a file under a temporary name and then renames it, so that a running worker keeps the old file open."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    shutil.copyfile(source, temporary)
    temporary.chmod(mode)
    os.replace(temporary, target)


def libraries(worker):
    """Yields a pair `(source, path under lib/locdiff)` for each library to install."""
    places = {name: Path(place) for name, place in elf.resolve(worker) if place}
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


def install(binaries, root):
    worker = binaries / "locdiff-worker"
    missing = [name for name, place in elf.resolve(worker) if place is None]
    if missing:
        raise OSError(0, "the loader does not find %s; run `make setup build`" % ", ".join(missing), str(worker))
    size_bytes = 0
    for source, name in libraries(worker):
        install_file(source, root / "lib/locdiff" / name, 0o644)
        size_bytes += source.stat().st_size
    for name in BINARIES:
        install_file(binaries / name, root / "bin" / name, 0o755)
    return size_bytes


def main():
    parser = argparse.ArgumentParser(description="Installs the binaries and the worker's libraries.")
    parser.add_argument("--binaries", type=Path, required=True, metavar="DIR", help="folder with the built binaries")
    parser.add_argument("--prefix", required=True, metavar="DIR", help="installation prefix, an absolute path")
    parser.add_argument("--destdir", default="", metavar="DIR", help="staging folder, prepended to the prefix, for packagers")
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
