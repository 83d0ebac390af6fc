"""Writes healpix.csv: centres of HEALPix cells, and the cells of random points, from the PyPI package healpy.

Run: pip install healpy==1.20.1 numpy && python3 tests/golden/make_healpix.py
"""
from pathlib import Path

import healpy
import numpy

random = numpy.random.default_rng(6)
lines = ["order,cell,lat,lon,is_centre"]


def add(order, cell, lon, lat, is_centre):
    lines.append("%d,%d,%.17g,%.17g,%d" % (order, cell, lat, (lon + 180) % 360 - 180, is_centre))


for order in [0, 1, 3, 6, 11, 20]:
    side = 1 << order
    count = 12 * side * side
    for cell in sorted({0, count - 1, *(int(cell) for cell in random.integers(0, count, 60))}):
        add(order, cell, *healpy.pix2ang(side, cell, nest=True, lonlat=True), True)
    heights, longitudes = random.uniform(-1, 1, 100), random.uniform(-180, 180, 100)
    # A third of the points are close to a pole.
    latitudes = numpy.degrees(numpy.arcsin(numpy.where(numpy.arange(100) % 3, heights, numpy.sign(heights) * (1 - heights**2 / 1e4))))
    for lat, lon in [(90, 0), (-90, 0), (0, -180), *zip(latitudes, longitudes)]:
        add(order, int(healpy.ang2pix(side, float(lon), float(lat), nest=True, lonlat=True)), float(lon), float(lat), False)
Path(__file__).with_name("healpix.csv").write_text("\n".join(lines) + "\n")
