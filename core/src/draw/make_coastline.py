#!/usr/bin/env python3
"""Makes coastline.txt from `land-110m.json` of the npm package world-atlas 2.0.2 (Natural Earth 1:110m, public domain).

    curl -sSL https://registry.npmjs.org/world-atlas/-/world-atlas-2.0.2.tgz | tar xz
    python3 make_coastline.py package/land-110m.json > coastline.txt
"""
import json
import sys

HEAD = """\
# Land of the Earth, from Natural Earth 1:110m (public domain, naturalearthdata.com), as packaged by world-atlas 2.0.2.
# One closed ring per line: longitude,latitude in hundredths of a degree. Longitudes continue beyond 180 degrees where a ring
# crosses that meridian. The ring around the south pole is closed along latitude -90. Made by make_coastline.py."""
TURN = 36000


def unwrapped(ring):
    """Shifts longitudes by whole turns, so that successive points are at most half a turn apart.

    A ring around the south pole is closed along the bottom edge of the map.
    """
    found = [ring[0]]
    for longitude, latitude in ring[1:] + ring[:1]:
        turns = round((longitude - found[-1][0]) / TURN)
        found.append((longitude - turns * TURN, latitude))
    around = found[-1][0] - found[0][0]
    return found + [(found[-1][0], -9000), (found[0][0], -9000)] if around else found[:-1]


def main():
    with open(sys.argv[1]) as file:
        topology = json.load(file)
    scale, translate = topology["transform"]["scale"], topology["transform"]["translate"]

    def points(index):
        arc, x, y, found = topology["arcs"][index if index >= 0 else ~index], 0, 0, []
        for dx, dy in arc:
            x, y = x + dx, y + dy
            found.append(tuple(round(100 * (v * s + t)) for v, s, t in zip((x, y), scale, translate)))
        return found if index >= 0 else found[::-1]

    print(HEAD)
    for geometry in topology["objects"]["land"]["geometries"]:
        for polygon in geometry["arcs"]:
            for arcs in polygon:
                ring = []
                for arc in arcs:
                    ring += [point for point in points(arc) if not ring or point != ring[-1]]
                if ring[0] == ring[-1]:
                    ring.pop()
                print(" ".join("%d,%d" % point for point in unwrapped(ring)))


if __name__ == "__main__":
    main()
