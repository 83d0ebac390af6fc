#!/usr/bin/env python3
"""Downloads the wheel with GeoCLIP's weights and gallery into `.geoclip/`, pinned by `geoclip.lock`.

Every run checks the hash of the wheel, which takes 30 ms. A truncated or modified wheel is downloaded again. The script may be killed at
any moment: pip writes into `.geoclip/download/`, and the wheel is moved to its final place only if its hash is correct.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
from libtorch import PROJECT, Store, check_space, fetch, hold_lock, log, run_guarded  # noqa: E402 (the line above must come first)
from locks import load_lock, sha256_of  # noqa: E402


def prepare(base, lock):
    (wheel,) = load_lock(lock)
    target = base / ("%s-%s-py3-none-any.whl" % (wheel.name, wheel.version))
    base.mkdir(parents=True, exist_ok=True)
    with hold_lock(base):
        store = Store(base)
        store.clear_leftovers()
        if target.exists():
            found = sha256_of(target)
            if found == wheel.sha256:
                return
            log("repairing %s: sha256 is %s, %s wants %s" % (target.name, found, wheel.lock, wheel.sha256))
        check_space(base, [wheel])
        os.replace(fetch(wheel, store), target)
        shutil.rmtree(store.download, ignore_errors=True)
        log("%s %s is ready in %s" % (wheel.name, wheel.version, base))


def main():
    parser = argparse.ArgumentParser(description="Downloads GeoCLIP's wheel, which geoclip.lock pins, into .geoclip/.")
    parser.add_argument("--root", type=Path, default=PROJECT, metavar="DIR", help="folder that contains .geoclip/ (default: the project)")
    parser.add_argument("--locks", type=Path, default=PROJECT / "setup", metavar="DIR", help="folder that contains geoclip.lock (default: setup/)")
    arguments = parser.parse_args()
    base = arguments.root.resolve() / ".geoclip"
    return run_guarded(base, lambda: prepare(base, arguments.locks / "geoclip.lock"))


if __name__ == "__main__":
    sys.exit(main())
