#!/usr/bin/env python3
"""Makes golden spherical harmonics in 80 digits from the closed form of the paper, which needs no recursion.

Run from the repository root, with mpmath, numpy and safetensors installed:

    python3 tests/golden/make_harmonics.py tests/golden/harmonics.safetensors

Y_lm follows the paper's appendix "Computation of Spherical Harmonics". P_l^m is a sum of binomials, computed in exact
fractions except for the powers of x. With a_lm = sqrt((2l + 1) / 4 pi * (l - |m|)! / (l + |m|)!), Y_lm is
    m < 0: (-1)^m sqrt(2) a_lm P_l^|m|(cos theta) sin |m| phi
    m = 0:                a_lm P_l^0  (cos theta)
    m > 0: (-1)^m sqrt(2) a_lm P_l^m  (cos theta) cos m phi
P_l^m has another factor (-1)^m, so the signs cancel: Y_11 is sqrt(3 / 4 pi) x, and Y_1-1 is sqrt(3 / 4 pi) y. The x
axis points to longitude 0 on the equator, the z axis to the north pole. Y_lm has the index l * l + l + m. At l = 47 the
sum would have no correct digit in f64, so it is computed in 80 digits. The file holds
  points      [5, 3] f64, unit vectors: two ordinary places, a place on the date line, a place 11 m from the north
              pole, and the south pole
  harmonics   [5, 2304] f64, all harmonics up to degree 47 at each point, rounded to f64 at the end
"""
import sys
from fractions import Fraction
from math import comb, factorial

import numpy as np
from mpmath import atan2, cos, hypot, mp, mpf, pi, sin, sqrt
from safetensors.numpy import save_file

DEGREE = 47
# Latitude and longitude in degrees.
PLACES = [(48.858, 2.294), (-33.857, 151.215), (-16.8, 180.0), (89.9999, 45.0), (-90.0, 0.0)]
mp.dps = 80


def half_binomial(numerator, count):
    """The binomial coefficient "numerator / 2 choose count". The numerator may be negative."""
    result = Fraction(1)
    for i in range(count):
        result *= Fraction(numerator - 2 * i, 2 * (i + 1))
    return result


def legendre_sum(l, m):
    """The terms of the paper's sum for P_l^m: pairs of a power of x and the coefficient of that power."""
    return [(k - m, 2**l * factorial(k) // factorial(k - m) * comb(l, k) * half_binomial(l + k - 1, l)) for k in range(m, l + 1)]


def fraction(value):
    return mpf(value.numerator) / mpf(value.denominator)


def harmonics(point):
    x, y, z = (mpf(float(value)) for value in point)
    theta, phi = atan2(hypot(x, y), z), atan2(y, x)
    height, ring = cos(theta), sin(theta)
    out = np.zeros((DEGREE + 1) ** 2)
    for l in range(DEGREE + 1):
        for m in range(l + 1):
            legendre = (-1) ** m * ring**m * sum(fraction(c) * height**power for power, c in legendre_sum(l, m) if c)
            value = sqrt((2 * l + 1) / (4 * pi) * mpf(factorial(l - m)) / factorial(l + m)) * legendre
            if m == 0:
                out[l * l + l] = float(value)
            else:
                value *= (-1) ** m * sqrt(mpf(2))
                out[l * l + l + m], out[l * l + l - m] = float(value * cos(m * phi)), float(value * sin(m * phi))
    return out


def main(path):
    latitudes, longitudes = np.radians(np.array(PLACES)).T
    points = np.stack([np.cos(latitudes) * np.cos(longitudes), np.cos(latitudes) * np.sin(longitudes), np.sin(latitudes)], 1)
    points[-1] = [0.0, 0.0, -1.0]
    values = np.stack([harmonics(point) for point in points])
    save_file({"points": points, "harmonics": values}, path)
    print("sum of squares / ((L + 1)^2 / 4 pi) - 1:", (values**2).sum(1) * 4 * np.pi / (DEGREE + 1) ** 2 - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
