#!/usr/bin/env python3
"""Trains, tunes and scores LocDiff, LocDiff-H and GeoCLIP in the two simulated worlds, on one GPU.

    python3 tests/bench/worlds.py LAUNCHER DATA OUT [--without-degrees] [--quick]

DATA has `mp16_500k.npy`, `im2gps3k.csv` and the lists of places that `world_lists.py` writes. Run `geoclip import` in
a new folder with 75 GB of free space, then this script. Each report and `table.json` is copied to OUT; `OUT/log` has
each command with its duration and exit code. Simulations, trainings and evaluations run side by side. `--quick` does
everything with few rows and steps, on the CPU, to test this script. Results: docs/experiments/world-2.md.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CELLS = "0.73"
TEST_SEEDS, VALIDATION_SEEDS = range(2091, 2095), range(2071, 2079)
# Five minutes of training each, by the milliseconds per step that `bench train` measures.
STEPS = {23: 463100, 47: 103500, 95: 17500}
RECIPE = {"shards.mean_views": 3, "shards.density_alpha": 0.5, "train.learning_rate": 4e-4, "loss.kl_weight": 0}


def settings(values):
    return [word for name, value in values.items() for word in ("--set", "%s=%s" % (name, value))]


class Experiment:
    def __init__(self, arguments):
        self.launcher, self.data, self.out, self.quick = arguments.launcher, arguments.data, arguments.out, arguments.quick
        self.with_degrees = not arguments.without_degrees
        self.begin, self.lock = time.monotonic(), threading.Lock()
        self.out.mkdir(parents=True, exist_ok=True)

    def say(self, words):
        with self.lock, open(self.out / "log", "a") as log:
            print("%6.0f s  %s" % (time.monotonic() - self.begin, words), file=log)

    def launch(self, name, *words, nice=0):
        """Runs the launcher. Its output goes to `OUT/NAME.txt` if it fails."""
        device = ["--workers", "2", "--device", "cpu"] if self.quick else ["--gpus", "1"]
        if words[-1] == "train" or "eval" in words:
            words = [*device, *words]
        begin = time.monotonic()
        done = subprocess.run(["nice", "-n", str(nice), self.launcher, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.say("%s: %.0f s, exit code %d" % (name, time.monotonic() - begin, done.returncode))
        if done.returncode:
            (self.out / (name + ".txt")).write_text(done.stdout)
            os.killpg(0, signal.SIGTERM)  # the other queues would go on for minutes

    def simulate(self, world, name, seed, views, coordinates, *extra, nice=10):
        rows = ["--rows", 3000] if self.quick and "--rows" in extra else ["--rows", 40] if self.quick else []
        extra = [word for word in extra if not (self.quick and (word == "--rows" or str(word).isdigit()))]
        self.launch("simulate-%s" % name, "shards", "simulate", "--world", world, "--seed", seed, "--views", views, "--coordinates", self.data / coordinates, *extra, *rows, "--out", "shards/" + name, nice=nice)

    def training_photos(self, world, **options):
        held_out = ["--held-out", "0.15"] if world == 2 else []
        self.simulate(world, "train%d" % world, 2011, 3, "mp16_500k.npy", "--cells", CELLS, *held_out, "--part", "train", "--rows", 4720000, **options)

    def other_photos(self, world):
        """Simulates the validation and test photos."""
        self.simulate(world, "V%d" % world, 2051, 16, "V.csv")
        for seed in VALIDATION_SEEDS:
            self.simulate(world, "Tv%d-%d" % (world, seed), seed, 16, "thinned-validation.csv")
        tests = {"I": "im2gps3k.csv", "T": "thinned.csv"} | ({"O": "held-out.csv"} if world == 2 else {})
        for name, file in tests.items():
            for seed in TEST_SEEDS:
                self.simulate(world, "%s%d-%d" % (name, world, seed), seed, 16, file)

    def train(self, run, config, world, values, name=None):
        quick = {"train.steps": 30, "train.warmup_steps": 5} if self.quick else {}
        quick |= {"model.degree": 7, "train.global_batch": 64, "model.bottleneck": 0} if self.quick and config != "geoclip" else {}
        self.launch("train-" + run, "--config", config, *settings({"shards.train": "shards/" + (name or "train%d" % world)} | values | quick), "--run", run, "train")

    def evaluate(self, name, run, values, *words):
        begin = time.time()
        self.launch(name, "--run", run, *settings(values), "eval", *words)
        folder = Path("checkpoints") / run / "eval"
        for file in ("report.txt", "table.json", "tuned.toml", "tuned-even.toml"):
            # Files of earlier evaluations are older.
            if (folder / file).exists() and (folder / file).stat().st_mtime >= begin:
                shutil.copy(folder / file, self.out / ("%s-%s" % (name, file)))

    def score(self, run, head, world):
        """Tunes LocDiff-H for both priors and scores it on the test sets."""
        base = {"retrieval.head": "trained", "retrieval.run": head, "eval.samples": 64}
        self.evaluate("w%d-tune-V" % world, run, base | {"shards.validation": "shards/V%d" % world}, "--tune")
        self.evaluate("w%d-I" % world, run, base | {"shards.test": "shards/I%d-*/*.parquet" % world}, "--hybrid")
        even = base | {"eval.prior": "even"}
        self.evaluate("w%d-tune-T" % world, run, even | {"shards.validation": "shards/Tv%d-*/*.parquet" % world}, "--tune")
        for name in ("T", "O") if world == 2 else ("T",):
            self.evaluate("w%d-%s" % (world, name), run, even | {"shards.test": "shards/%s%d-*/*.parquet" % (name, world)}, "--hybrid")

    def degree(self, degree):
        """Scores LocDiff alone on V and on one seed of the validation places of T."""
        for name, test in ("V", "shards/V2"), ("T", "shards/Tv2-%d" % VALIDATION_SEEDS[0]):
            self.evaluate("degree-%d-%s" % (degree, name), "L%d" % degree, {"shards.test": test, "eval.samples": 16})

    def degrees(self, after, photos_needed):
        for degree in (23, 95):
            self.train("L%d" % degree, "l%d" % degree, 2, RECIPE | {"train.steps": STEPS[degree]})
            after(photos_needed, (self.degree, degree))

    def heads(self, seed):
        """Trains and scores the head of world 2 as in its calibration, on single views."""
        self.simulate(2, "head-%d" % seed, seed, 1, "mp16_500k.npy", "--rows", 200000)
        self.simulate(2, "head-I-%d" % seed, seed + 1, 16, "im2gps3k.csv")
        self.train("head-%d" % seed, "geoclip", 2, {"train.steps": 977, "train.weight_decay": 0.1}, "head-%d" % seed)
        test = {"shards.test": "shards/head-I-%d" % seed}
        self.evaluate("head-%d-16-views" % seed, "head-%d" % seed, test)
        self.simulate(2, "head-I1-%d" % seed, seed + 1, 1, "im2gps3k.csv")
        self.evaluate("head-%d-one-view" % seed, "head-%d" % seed, {"shards.test": "shards/head-I1-%d" % seed})

    def run(self):
        self.training_photos(2, nice=0)
        with ThreadPoolExecutor(1) as photos, ThreadPoolExecutor(1) as evaluations, ThreadPoolExecutor(1) as others:
            tests = photos.submit(self.other_photos, 2)
            world1 = photos.submit(lambda: (self.training_photos(1), self.other_photos(1)))
            left = [photos.submit(self.heads, seed) for seed in (2001, 3001)]

            def after(photos_needed, *work):
                left.append(evaluations.submit(lambda: (photos_needed.result(), [call(*values) for call, *values in work])))

            self.train("head2", "geoclip", 2, {"shards.mean_views": 3, "train.steps": 5000, "train.weight_decay": 0.1})
            self.train("L47", "l47", 2, RECIPE | {"train.steps": STEPS[47]})
            after(tests, (self.score, "L47", "head2", 2), (self.degree, 47))
            degrees = others.submit(self.degrees, after, tests) if self.with_degrees else None
            world1.result()
            self.train("head1", "geoclip", 1, {"train.steps": 4000, "train.weight_decay": 0.1})
            self.train("L47-world-1", "l47", 1, {"train.steps": 24000, "shards.density_alpha": 0.2})
            after(world1, (self.score, "L47-world-1", "head1", 1))
            if degrees:
                degrees.result()
            for work in left:
                work.result()
        self.say("all done")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without-degrees", action="store_true", help="leave out L = 23 and 95")
    parser.add_argument("--quick", action="store_true")
    if os.getpid() != os.getpgrp():
        os.setpgrp()  # a failure ends the commands of all queues
    Experiment(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
