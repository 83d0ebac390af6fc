#!/usr/bin/env python3
"""Measures how much more memory `predict` takes for many rows than for few.

    python3 tests/bench/predict_memory.py target/release/locdiff-launch [--rows 10000,1000000] [--workers 2] [--out out.parquet]

The script makes a small run and shards of random embeddings in a temporary folder, and predicts them with one sample and one sampler step
per photo. The memory is the largest resident set (VmHWM) of the launcher plus that of each worker. Exit status 1 if the largest number of
rows takes more than 256 MB more than the smallest. Needs only Python's standard library.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

from small_run import SmallRun, workers

LIMIT_MB = 256


def peak_bytes(pid):
    """The largest resident set of a process so far, or 0 if the process has ended."""
    try:
        status = Path("/proc/%d/status" % pid).read_text()
    except OSError:
        return 0
    return max((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), default=0)


def measure(process):
    """The peak of the launcher and of each worker, in bytes, until the launcher ends."""
    peaks = {}
    while process.poll() is None:
        for pid in [process.pid] + workers(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_bytes(pid))
        time.sleep(0.05)
    if process.returncode != 0:
        raise SystemExit("the command ended with %d: %s" % (process.returncode, process.stderr.read()))
    return peaks.pop(process.pid), sorted(peaks.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("launcher")
    parser.add_argument("--rows", type=lambda text: [int(number) for number in text.split(",")], default=[10_000, 1_000_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="out.parquet", help="name of the output; its extension decides the format")
    arguments = parser.parse_args()
    totals = {}
    with tempfile.TemporaryDirectory() as folder:
        run = SmallRun(arguments.launcher, folder, 0, ["eval.samples=1", "eval.sampler_steps=1"])
        for rows in arguments.rows:
            name = "photos-%d" % rows
            run.build(name, rows)
            begun = time.monotonic()
            process = run.start("--workers", str(arguments.workers), "predict", name, "--overwrite", "--out", arguments.out)
            launcher, others = measure(process)
            totals[rows] = launcher + sum(others)
            took_s, parts = time.monotonic() - begun, " + ".join("%.1f" % (peak / 1e6) for peak in others)
            print("%d rows: %.1f s, launcher %.1f MB, workers %s MB, together %.1f MB"
                  % (rows, took_s, launcher / 1e6, parts, totals[rows] / 1e6), flush=True)
    more_mb = (totals[max(totals)] - totals[min(totals)]) / 1e6
    print("%d rows take %.1f MB more than %d rows; the limit is %d MB" % (max(totals), more_mb, min(totals), LIMIT_MB))
    return 0 if more_mb <= LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
