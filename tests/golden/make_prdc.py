#!/usr/bin/env python3
"""Makes golden density and coverage with the PyPI package `prdc` 0.2 on great-circle distances.

Run from the repository root, with prdc, numpy and safetensors installed:

    python3 tests/golden/make_prdc.py tests/golden/prdc.safetensors

The script calls the published `prdc.compute_prdc` with k = 3. Only `compute_pairwise_distance`, which is Euclidean, is
replaced: the new function returns the great-circle angle between places. For each case NAME the file holds
  NAME.truth, NAME.predicted   [n, 2] f64, latitude and longitude in degrees
  NAME.result                  [2] f64, density and coverage
The cases are
  uniform    truth and predictions are independent and uniform on the sphere
  near       truth is in clusters, and each prediction is about 50 to 5000 km from its truth
  repeated   truth is drawn from 100 places and predictions from 60 of these places, so that distances tie and radii
             are 0; the numbers of true places and predictions differ
"""
import sys

import numpy as np
from prdc import prdc
from safetensors.numpy import save_file

NEAREST_K = 3


def vectors(degrees):
    latitude, longitude = np.radians(degrees).T
    return np.stack([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)], 1)


def great_circle(one, other=None):
    one, other = vectors(one), vectors(one if other is None else other)
    across = np.cross(one[:, None], other[None])
    return np.arctan2(np.linalg.norm(across, axis=2), one @ other.T)


def uniform(random, count):
    latitude = np.degrees(np.arcsin(random.uniform(-1, 1, count)))
    return np.stack([latitude, random.uniform(-180, 180, count)], 1)


def moved(random, degrees, scale):
    there = degrees + scale * random.standard_normal(degrees.shape)
    return np.stack([np.clip(there[:, 0], -90, 90), (there[:, 1] + 180) % 360 - 180], 1)


def cases():
    random = np.random.default_rng(3)
    yield "uniform", uniform(random, 400), uniform(random, 400)
    clusters = uniform(random, 20)
    truth = moved(random, clusters[random.integers(0, 20, 500)], 3.0)
    yield "near", truth, moved(random, truth, 10 ** random.uniform(-0.3, 1.7, (500, 1)))
    spots = np.round(uniform(random, 100), 2)
    yield "repeated", spots[random.integers(0, 100, 250)], spots[random.integers(0, 60, 150)]


def main():
    prdc.compute_pairwise_distance = great_circle
    tensors = {}
    for name, truth, predicted in cases():
        found = prdc.compute_prdc(truth, predicted, NEAREST_K)
        print(name, found)
        tensors |= {f"{name}.truth": truth, f"{name}.predicted": predicted}
        tensors[f"{name}.result"] = np.array([found["density"], found["coverage"]])
    about = "density and coverage by PyPI prdc 0.2, its own code on great-circle distances (make_prdc.py)"
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, sys.argv[1], {"about": about})


main()
