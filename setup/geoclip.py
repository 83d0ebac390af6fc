#!/usr/bin/env python3
"""Fetches the wheel that holds GeoCLIP's weights and gallery into `.geoclip/`, pinned by `geoclip.lock`.

The wheel is hashed every time (30 ms): one that is cut short or changed is fetched again. A run may be killed at any moment;
pip writes into `.geoclip/download/`, and a wheel gets its final name only when its hash fits.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
from libtorch import PROJECT, Store, check_space, fetch, guarded, hold_lock, say  # noqa: E402 (the line above must come first)
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
            say("repairing %s: its sha256 is %s, %s wants %s" % (target.name, found, wheel.lock, wheel.sha256))
        check_space(base, [wheel])
        os.replace(fetch(wheel, store), target)
        shutil.rmtree(store.download, ignore_errors=True)
        say("%s %s is ready in %s" % (wheel.name, wheel.version, base))


def main():
    parser = argparse.ArgumentParser(description="Fetches GeoCLIP's wheel into .geoclip/, pinned by geoclip.lock.")
    parser.add_argument("--root", type=Path, default=PROJECT, metavar="DIR", help="where .geoclip/ lies (default: the project)")
    parser.add_argument("--locks", type=Path, default=PROJECT / "setup", metavar="DIR", help="where geoclip.lock is (default: setup/)")
    arguments = parser.parse_args()
    base = arguments.root.resolve() / ".geoclip"
    return guarded(base, lambda: prepare(base, arguments.locks / "geoclip.lock"))


if __name__ == "__main__":
    sys.exit(main())
