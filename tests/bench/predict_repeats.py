#!/usr/bin/env python3
"""Predicts the same photos again and again, with 1, 2 and 4 workers, and compares the answers byte by byte.

    python3 tests/bench/predict_repeats.py target/release/locdiff-launch [--repeats 100]

The script makes a small run and shards of random embeddings in a temporary folder. The predictions use a prior, because the weights of
the samples then have all digits, while places alone would hide a difference in the last bits. Two loops that only use time run beside the
predictions, so that threads meet in many orders. Exit status 1 if any answers differ. Needs only Python's standard library.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from hashlib import sha256
from pathlib import Path

from small_run import SmallRun

SETTINGS = ["eval.samples=4", "eval.sampler_steps=4"]
# West, south, east, north.
PRIOR = [160, -50, -150, 10]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("launcher")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    seen = Counter()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = SmallRun(arguments.launcher, folder, 1, SETTINGS)
            run.build("photos", 150)
            west, south, east, north = PRIOR
            ring = [[west, south], [east, south], [east, north], [west, north], [west, south]]
            (Path(folder) / "prior.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
            for _ in range(arguments.repeats):
                for workers in ("1", "2", "4"):
                    run.run("--workers", workers, "predict", "photos", "--prior", "prior.geojson", "--overwrite", "--out", "out.csv")
                    seen[sha256((Path(folder) / "out.csv").read_bytes()).hexdigest()[:16]] += 1
    finally:
        for process in busy:
            process.kill()
    print("%d predictions: %s" % (sum(seen.values()), ", ".join("%d with the answers %s" % (count, name) for name, count in seen.items())))
    return 0 if len(seen) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
