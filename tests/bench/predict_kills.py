#!/usr/bin/env python3
"""Kills `predict` at random and checks that the output is the same bytes as without kills.

    python3 tests/bench/predict_kills.py target/release/locdiff-launch [--rows 100000] [--kills 10] [--workers 2] [--seed 0]

The script makes shards of random embeddings and a small run in a temporary folder, and predicts the shards once without kills. Then it
repeats the same command. At a random time within the time that the first command took, it sends SIGKILL to the launcher or to one of the
workers. After the death of a worker, the launcher goes on by itself; after its own death, the command is repeated. A kill after the end of
a command does not count. Exit status 1 if the bytes differ. Needs only Python's standard library.
"""
import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_run import SmallRun, workers


def kill_at_random(process, after_s, choose):
    """Waits, and kills the launcher or a worker. Returns what was killed, or None if the command ended before."""
    try:
        process.wait(after_s)
        return None
    except subprocess.TimeoutExpired:
        pass
    names = {process.pid: "launcher", **{pid: "worker" for pid in workers(process.pid)}}
    victim = choose(sorted(names))
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return None
    if victim == process.pid:
        process.wait()
    return names[victim]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("launcher")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, killed = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        # The kills must not use up the restarts of the launcher.
        run = SmallRun(arguments.launcher, folder, arguments.seed, ["eval.samples=2", "eval.sampler_steps=2", "supervise.max_restarts=100"])
        run.build("photos", arguments.rows)
        command = ["--workers", str(arguments.workers), "predict", "photos", "--samples", "--out"]
        begun = time.monotonic()
        run.run(*command, "whole.parquet")
        took_s = time.monotonic() - begun
        whole, out = (Path(folder) / name for name in ("whole.parquet", "out.parquet"))
        print("%d rows, %d bytes, %.1f s without kills" % (arguments.rows, whole.stat().st_size, took_s), flush=True)
        process, commands = run.start(*command, "out.parquet"), 1
        while True:
            if process.poll() is not None:
                if process.returncode == 0 and len(killed) < arguments.kills:
                    out.unlink()
                elif process.returncode == 0:
                    break
                elif process.returncode != -signal.SIGKILL:
                    raise SystemExit("the command ended with %d: %s" % (process.returncode, process.stderr.read()))
                process, commands = run.start(*command, "out.parquet"), commands + 1
            if len(killed) == arguments.kills:
                process.wait()
                continue
            victim = kill_at_random(process, draw.uniform(0, took_s), draw.choice)
            pieces = len(list(Path(folder).glob("out.parquet.partial/piece-*")))
            if victim:
                killed.append(victim)
                print("killed the %s; complete pieces: %d" % (victim, pieces), flush=True)
        same = whole.read_bytes() == out.read_bytes()
    counts = ", ".join("%d times the %s" % (killed.count(name), name) for name in ("launcher", "worker"))
    print("killed %s; %d commands; the bytes are %s" % (counts, commands, "the same" if same else "DIFFERENT"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
