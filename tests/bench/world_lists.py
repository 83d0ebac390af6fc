#!/usr/bin/env python3
"""Writes the lists of places for worlds.py. Needs NumPy and pyarrow.

    python3 tests/bench/world_lists.py LAUNCHER mp16_500k.npy yfcc4k.csv OUT

Run `geoclip import` first. OUT gets `V.csv` (the places of YFCC4k that are not in the first list),
`thinned-validation.csv`, `thinned.csv` and `held-out.csv`. Choices were made on test places of 2,000 cells of 0.8 degrees
and of 700 such cells that are held out (docs/experiments/world-2.md, "Test places in random order"). These are in no
list. Of the other test places of CELLS, 2,000 random ones are for validation, and all others are in the two test lists.
"""
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from pyarrow import parquet

from worlds import CELLS


def simulated_places(launcher, coordinates, cells, part):
    with tempfile.TemporaryDirectory() as folder:
        words = ["--world", "2", "--seed", "1", "--coordinates", coordinates, "--cells", cells, "--held-out", "0.15", "--part", part]
        subprocess.run([launcher, "shards", "simulate", *words, "--out", folder + "/shards"], check=True)
        table = parquet.read_table(sorted(Path(folder, "shards").glob("*.parquet")), columns=["lat", "lon"])
    return list(zip(table["lat"].to_pylist(), table["lon"].to_pylist()))


def write(path, places):
    path.write_text("lat,lon\n" + "".join("%r,%r\n" % place for place in places))
    print("%s: %d places" % (path, len(places)))


def main(launcher, coordinates, other, out):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    training = set(map(tuple, numpy.load(coordinates).astype("f4").tolist()))
    with open(other, newline="") as file:
        places = dict.fromkeys((float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file))
    write(out / "V.csv", [place for place in places if tuple(numpy.float32(place).tolist()) not in training])

    used = set(simulated_places(launcher, coordinates, "0.8", "thinned")[:2000])
    used |= set(simulated_places(launcher, coordinates, "0.8", "held-out")[:700])
    thinned, held_out = (simulated_places(launcher, coordinates, CELLS, part) for part in ("thinned", "held-out"))
    unused = [place for place in thinned if place not in used]  # in random order
    write(out / "thinned-validation.csv", unused[:2000])
    write(out / "thinned.csv", unused[2000:])
    write(out / "held-out.csv", [place for place in held_out if place not in used])


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
