#!/usr/bin/env python3
"""Compares the answers of two evaluations of the same photos.

    python3 tests/bench/paired.py TRUTH.csv OLD.csv NEW.csv

Every file has the columns `id` (or `path`), `lat` and `lon`, as in the folder `eval` of a run. For each distance, this
script prints the percentages of photos within that distance, and how many photos only one of the two evaluations
located within it. Only these photos tell the two apart. The last column is the exact probability (McNemar's test, both
sides) of a difference at least this large if both were equally accurate. With so few photos, an interval from
resampling is too narrow.

McNemar's test assumes that photos are independent. Photos of one place are not, so the probability is too small if many
photos share a place. The intervals of `locdiff-launch eval` resample places; where the two disagree, trust the
intervals.
"""
import csv
import math
import sys

EARTH_RADIUS_KM = 6371.0088
DISTANCES_KM = (1, 25, 200, 750, 2500)


def places(path):
    with open(path, newline="") as file:
        return {row.get("id") or row["path"]: (float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file)}


def distance_km(one, other):
    lat1, lon1, lat2, lon2 = map(math.radians, one + other)
    square = math.sin((lat1 - lat2) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon1 - lon2) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(square)))


def mcnemar(only_old, only_new):
    """The probability that this many fair coins split at least as unevenly."""
    coins = only_old + only_new
    tail = sum(math.comb(coins, count) for count in range(min(only_old, only_new) + 1)) / 2**coins
    return min(1.0, 2 * tail)


def main():
    truth, old, new = map(places, sys.argv[1:4])
    ids = [name for name in truth if name in old and name in new]
    moved = sum(old[name] != new[name] for name in ids)
    print("%d photos, %d with different answers" % (len(ids), moved))
    print("  km   old %   new %  only old  only new  probability")
    for limit in DISTANCES_KM:
        hits = [(distance_km(old[name], truth[name]) <= limit, distance_km(new[name], truth[name]) <= limit) for name in ids]
        before, after = (100 * sum(hit[side] for hit in hits) / len(ids) for side in (0, 1))
        only_old, only_new = hits.count((True, False)), hits.count((False, True))
        print("%4d  %6.2f  %6.2f  %8d  %8d  %11.3f" % (limit, before, after, only_old, only_new, mcnemar(only_old, only_new)))


if __name__ == "__main__":
    main()
