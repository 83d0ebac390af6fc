#!/usr/bin/env python3
"""Makes golden embeddings of world 2, the simulated world of `shards simulate --world 2`, from its specification.

Run from the repository root:

    python3 -m venv VENV && VENV/bin/pip install geoclip==1.3.0 torch==2.11.0 safetensors==0.8.0 numpy
    VENV/bin/python tests/golden/make_world2.py tests/golden/world2.safetensors

GeoCLIP's location encoder and gallery are those of the package; everything else is NumPy in float64, and shares no code
with the program. The gallery is cut to its first GALLERY places, as in the program's tests. The file holds
  places                         [4, 2] latitude and longitude of four photos: one near the 180th meridian, one near
                                 a pole, and two at the same place
  sources                        [4, 6, 2] the places that each photo looks like
  weights                        [4, 6] weights of these places
  embeddings                     [4, 2, 768] the embeddings of views 0 and 15, before they are rounded to float16
"""
import csv
import sys
from pathlib import Path

import geoclip
import numpy as np
import torch
from geoclip.model.location_encoder import LocationEncoder
from safetensors.numpy import save_file

WEIGHTS = Path(geoclip.__file__).parent / "model"
GALLERY = 4096
PLACES = np.array([[-16.8, 179.97], [89.9, 12.5], [48.2082, 16.3738], [48.2082, 16.3738]])
VIEWS = (0, 15)
SEED = 11
RADIUS_KM = 6371.0088
EDGES_KM = np.array([0.05, 1, 25, 200, 750, 2500, 20000])
CUMULATIVE = np.cumsum([0.15, 0.03, 0.09, 0.28, 0.20])
WORD = 2**64


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def key(seed, first, second):
    k = mix((seed + 0x9E3779B97F4A7C15) % WORD)
    k = mix(((k ^ first) + 0x9E3779B97F4A7C15) % WORD)
    return mix(((k ^ second) + 0x9E3779B97F4A7C15) % WORD)


def uniform(k, j):
    return ((mix((k + (j + 1) * 0x9E3779B97F4A7C15) % WORD) >> 11) + 0.5) / 2**53


def uniforms(k, first, count):
    return np.array([uniform(k, first + j) for j in range(count)])


def normals(k, first, count):
    u = uniforms(k, first, count)
    rho, theta = np.sqrt(-2 * np.log(u[: count // 2])), 2 * np.pi * u[count // 2 :]
    return np.concatenate([rho * np.cos(theta), rho * np.sin(theta)])


def vector(latlon):
    latitude, longitude = np.radians(latlon)
    return np.array([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)])


def degrees(xyz):
    return np.degrees([np.arctan2(xyz[2], np.hypot(xyz[0], xyz[1])), np.arctan2(xyz[1], xyz[0])])


def distance_km(a, b):
    return RADIUS_KM * np.arctan2(np.linalg.norm(np.cross(a, b)), a @ b)


def displace(xyz, beta, km):
    """Goes `km` from `xyz` towards cos(beta) north - sin(beta) east."""
    east = np.array([-xyz[1], xyz[0], 0]) / np.hypot(xyz[0], xyz[1])
    north = np.cross(xyz, east)
    angle = km / RADIUS_KM
    return np.cos(angle) * xyz + np.sin(angle) * (np.cos(beta) * north - np.sin(beta) * east)


def simplex(u):
    exponentials = -np.log(u)
    return exponentials / exponentials.sum()


def photo(number, place, gallery):
    """Returns the sources of a photo as latitude and longitude, and their weights."""
    k = key(SEED, number, 0)
    u = uniforms(k, 0, 24)
    here = vector(place)
    scale_bin = int((CUMULATIVE <= u[0]).sum())
    scale_km = EDGES_KM[scale_bin] * (EDGES_KM[scale_bin + 1] / EDGES_KM[scale_bin]) ** u[1]
    centre = displace(here, 2 * np.pi * u[2], scale_km * np.sqrt(u[3]))
    reach_km = max(scale_km / 4, 0.05)
    sources = [degrees(displace(here, 2 * np.pi * u[4], 0.05 * (reach_km / 0.05) ** (u[5] ** 2)))]
    rows = np.arange(number % 12, len(gallery), 12)
    vectors = np.array([vector(latlon) for latlon in gallery[rows]])
    for j in range(5):
        there = displace(centre, 2 * np.pi * u[6 + 2 * j], 1.2 * scale_km * np.sqrt(u[7 + 2 * j]))
        nearest = np.argmin(((vectors - there) ** 2).sum(1))
        snaps = distance_km(centre, vectors[nearest]) <= 1.6 * scale_km
        sources.append(gallery[rows[nearest]] if snaps else degrees(there))
    return np.array(sources), simplex(u[18:24])


def look(number, view, weights, embeddings):
    k, kv = key(SEED, number, 0), key(SEED, number, 1 + view)
    mixed = (0.4 * weights + 0.6 * simplex(uniforms(kv, 0, 6))) @ embeddings
    y = np.sqrt(512) * mixed / np.linalg.norm(mixed) + 0.4 * normals(k, 32, 512) + 1.6 * normals(kv, 32, 512)
    return np.concatenate([y, normals(k, 544, 128), normals(kv, 544, 128)])


def main(out):
    with open(WEIGHTS / "gps_gallery" / "coordinates_100K.csv") as file:
        gallery = np.array([[float(row["LAT"]), float(row["LON"])] for row in csv.DictReader(file)])[:GALLERY]
    a = np.array([normals(key(7, i, 1), 0, 768) for i in range(1024)]) / np.sqrt(768)
    b = np.array([normals(key(7, i, 3), 0, 2)[0] for i in range(1024)])
    c = np.array([normals(key(7, i, 2), 0, 1024) for i in range(768)]) / np.sqrt(1024)
    encoder = LocationEncoder(from_pretrained=True).eval()
    drawn = [photo(number, place, gallery) for number, place in enumerate(PLACES)]
    stored = np.zeros((len(PLACES), len(VIEWS), 768))
    for number, (sources, weights) in enumerate(drawn):
        with torch.no_grad():
            embeddings = torch.nn.functional.normalize(encoder(torch.tensor(sources, dtype=torch.float32)), dim=1)
        for at, view in enumerate(VIEWS):
            x = look(number, view, weights, embeddings.double().numpy())
            stored[number, at] = c @ np.maximum(a @ x + 0.5 * b, 0)
    tensors = {
        "places": PLACES, "sources": np.array([sources for sources, _ in drawn]),
        "weights": np.array([weights for _, weights in drawn]), "embeddings": stored.astype(np.float32),
    }
    save_file(tensors, out)
    print("embeddings from %.3f to %.3f" % (stored.min(), stored.max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
