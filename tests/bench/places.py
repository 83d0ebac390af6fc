#!/usr/bin/env python3
"""Lists the places of one file that are in none of the others, each place once.

    python3 tests/bench/places.py ALL.csv [SEEN.csv ...] > NEW.csv

Every file has the columns `lat` and `lon`, as `truth.csv` in the folder `eval` of a run. Two places are the same if their
coordinates are equal. With this script, a test set gets no place that an earlier experiment has used.
"""
import csv
import sys


def places(path):
    with open(path, newline="") as file:
        return [(float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file)]


def main(arguments):
    if not arguments:
        sys.exit(__doc__)
    seen = {place for path in arguments[1:] for place in places(path)}
    new = [place for place in dict.fromkeys(places(arguments[0])) if place not in seen]
    print("lat,lon", *("%r,%r" % place for place in new), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
