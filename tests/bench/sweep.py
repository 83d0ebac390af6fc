#!/usr/bin/env python3
"""Measures the cost of a training step over batch sizes and degrees, and draws it beside its floor.

    python3 tests/bench/sweep.py target/cuda/release/locdiff-launch --out docs/images/step-cost

Runs `bench train` on one GPU, once for each batch size at L = 47 and once for each degree at batch 512. The floor of a
step is the time of its matrix products at the speed of large products, plus the time of the update of the parameters at
the speed of a copy in memory. Both speeds are measured in the same run. Writes the numbers to `OUT.json` and a picture
to `OUT.svg`. With `--numbers FILE`, draws the numbers of an earlier run.
"""
import argparse
import json
import math
import subprocess
from pathlib import Path

BATCHES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DEGREES = (15, 23, 31, 47, 63, 79, 95)
WIDTH, HEIGHT, LEFT, TOP, GAP = 460, 340, 70, 40, 90


def measure(launcher, degree, batch):
    command = [launcher, "--json", "--config", "l47", "--workers", "1", "--device", "cuda"]
    for name, value in {"model.degree": degree, "train.global_batch": batch, "loss.anchors": 2048, "model.dropout": 0}.items():
        command += ["--set", "%s=%s" % (name, value)]
    done = subprocess.run(command + ["bench", "train", "--steps", "100"], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    products_ms = found["tflops"] * found["ms_per_step"] / found["ceilings"]["product_tflops"]
    update_ms = found["gb_per_s"] * found["ms_per_step"] / found["ceilings"]["memory_gb_per_s"]
    row = {"degree": degree, "batch": batch, "ms_per_step": found["ms_per_step"], "products_ms": products_ms, "update_ms": update_ms}
    print("L = %d, batch %d: %.3f ms, floor %.3f ms (products %.3f, update %.3f)" % (degree, batch, row["ms_per_step"], products_ms + update_ms, products_ms, update_ms), flush=True)
    return row


def panel(rows, x_of, x_title, x_offset):
    """One plot with logarithmic axes: the measured time, the floor, and the part of the floor that is the update."""
    xs = [x_of(row) for row in rows]
    lines = [
        ("measured", "#1f4e79", [row["ms_per_step"] for row in rows]),
        ("floor", "#c0504d", [row["products_ms"] + row["update_ms"] for row in rows]),
        ("update alone", "#999999", [row["update_ms"] for row in rows]),
    ]
    every = [value for _, _, values in lines for value in values]
    low, high = math.floor(math.log10(min(every)) * 3) / 3, math.ceil(math.log10(max(every)) * 3) / 3

    def px(x):
        return x_offset + (math.log(x) - math.log(xs[0])) / (math.log(xs[-1]) - math.log(xs[0])) * WIDTH

    def py(y):
        return TOP + HEIGHT - (math.log10(y) - low) / (high - low) * HEIGHT

    parts = ['<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#333"/>' % (x_offset, TOP, WIDTH, HEIGHT)]
    for x in xs:
        parts.append('<text x="%.1f" y="%d" text-anchor="middle">%d</text>' % (px(x), TOP + HEIGHT + 18, x))
    for y in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50):
        if low <= math.log10(y) <= high:
            parts.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/>' % (x_offset, x_offset + WIDTH, py(y), py(y)))
            parts.append('<text x="%d" y="%.1f" text-anchor="end">%g</text>' % (x_offset - 6, py(y) + 4, y))
    for index, (name, colour, values) in enumerate(lines):
        points = " ".join("%.1f,%.1f" % (px(x), py(y)) for x, y in zip(xs, values))
        parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>' % (points, colour))
        parts += ['<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>' % (px(x), py(y), colour) for x, y in zip(xs, values)]
        parts.append('<text x="%d" y="%d" fill="%s">%s</text>' % (x_offset + 12, TOP + 20 + 18 * index, colour, name))
    parts.append('<text x="%d" y="%d" text-anchor="middle">%s</text>' % (x_offset + WIDTH / 2, TOP + HEIGHT + 40, x_title))
    parts.append('<text x="%d" y="%d">ms per step</text>' % (x_offset - 50, TOP - 12))
    return parts


def draw(rows):
    by_batch = [row for row in rows if row["degree"] == 47]
    by_degree = sorted((row for row in rows if row["batch"] == 512), key=lambda row: row["degree"])
    second = LEFT + WIDTH + GAP
    parts = panel(by_batch, lambda row: row["batch"], "rows of a batch, L = 47", LEFT)
    parts += panel(by_degree, lambda row: row["degree"], "degree L, batch 512", second)
    size = (second + WIDTH + 30, TOP + HEIGHT + 60)
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">' % size
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>'] + parts + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, required=True, help="path of the results without its ending")
    parser.add_argument("--numbers", type=Path, help="draw the numbers of this file instead of measuring")
    options = parser.parse_args()
    if options.numbers:
        rows = json.loads(options.numbers.read_text())
    else:
        sizes = [(47, batch) for batch in BATCHES] + [(degree, 512) for degree in DEGREES if degree != 47]
        rows = [measure(options.launcher.resolve(), degree, batch) for degree, batch in sizes]
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    options.out.with_suffix(".svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
