#!/usr/bin/env python3
"""Measures the radii, the grids, the speed of `predict` and the latency of `serve`, with one model of world 2.

    python3 tests/bench/answers.py LAUNCHER DATA OUT [--only photos,models,...] [--rows 1000000] [--seconds 60] [--quick]

DATA has `mp16_500k.npy`, an N x 2 list of places, and `im2gps3k.csv`. Run `geoclip import` in a new folder, then this
script. It cuts the list into training, validation and test places that share no cell of 0.1 degrees, simulates photos,
trains an image head and a LocDiff (L = 47), tunes and calibrates them on validation photos, and evaluates them on the
test places, on Im2GPS3k and on one test place per cell of 1 degree. Then it predicts many rows, and sends requests from
64 clients to `serve`, and checks that an answer has the same bytes however it is asked for. The results are in OUT; `OUT/log` has each command with its duration and exit code. `--only`
names the parts to run, which use the files of earlier parts. `--quick` does everything with few rows and steps on the
CPU, to test this script. Results: docs/BENCHMARKS.md, "Predict".
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

SHARES = "train=0.89,validation=0.05,test=0.06"
SEEDS = {"train": 2201, "validation": 2202, "test": 2203, "im2gps3k": 2204, "uniform": 2205, "tune": 2206}
RECIPE = {"train.learning_rate": 4e-4, "loss.kl_weight": 0}
SERVE_SCRIPT = Path(__file__).with_name("serve.py")


class Experiment:
    def __init__(self, arguments):
        self.launcher, self.data, self.out, self.quick = arguments.launcher, arguments.data, arguments.out, arguments.quick
        self.rows, self.seconds = (2000, 3) if self.quick else (arguments.rows, arguments.seconds)
        self.device = ["--workers", "2", "--device", "cpu"] if self.quick else ["--gpus", "1"]
        self.one_worker = self.device[2:] if self.quick else self.device
        self.begin = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)

    def say(self, words):
        with open(self.out / "log", "a") as log:
            print("%6.0f s  %s" % (time.monotonic() - self.begin, words), file=log)

    def launch(self, name, *words):
        """Runs the launcher, and keeps its output and its result in OUT. Returns the result and the seconds."""
        begin = time.monotonic()
        command = [self.launcher, "--json", *map(str, words)]
        with open(self.out / (name + ".txt"), "w") as told:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=told, text=True)
        seconds = time.monotonic() - begin
        self.say("%s: %.1f s, exit code %d: %s" % (name, seconds, done.returncode, " ".join(command[1:])))
        if done.returncode:
            sys.exit("%s failed; see %s" % (name, self.out / (name + ".txt")))
        (self.out / (name + ".json")).write_text(done.stdout)
        return json.loads(done.stdout.splitlines()[-1]), seconds

    def simulate(self, name, places, *extra, rows=None):
        rows = 400 if self.quick else rows
        rows = ["--rows", rows] if rows else []
        words = ["--world", 2, "--seed", SEEDS.get(name, 2207), "--coordinates", places, *extra, *rows]
        self.launch("simulate-" + name, "shards", "simulate", *words, "--out", "shards/" + name)

    def train(self, run, config, values):
        values = values | {"eval.every": 0, "eval.after_train": "false"}
        if self.quick:
            values = values | {"train.steps": 20, "train.warmup_steps": 5, "train.global_batch": 64}
            values |= {} if config == "geoclip" else {"model.degree": 9}
        self.launch("train-" + run, *self.device, "--config", config, *settings(values), "--run", run, "train")

    def evaluate(self, name, values, *words):
        self.launch(name, *self.device, "--run", "model", *settings(values), "eval", *words)
        folder = Path("checkpoints/model/eval")
        for file in ("table.json", "calibration.svg", "report.txt"):
            if (folder / file).exists():
                shutil.copy(folder / file, self.out / ("%s-%s" % (name, file)))

    def predict(self, name, photos, *words):
        result, seconds = self.launch(name, *self.device, "--run", "model", "predict", "shards/" + photos, *words, "--overwrite")
        return result["rows"] / seconds

    def photos(self):
        """Divides the places and simulates photos."""
        self.launch("split", "shards", "split", self.data / "mp16_500k.npy", "--parts", SHARES, "--out", "places")
        train, validation, test = ("places/%s.npy" % name for name in ("train", "validation", "test"))
        self.simulate("train", train, rows=2000000)
        self.simulate("tune", validation, rows=1200)
        self.simulate("validation", validation, rows=20000)
        self.simulate("test", test)
        self.simulate("im2gps3k", self.data / "im2gps3k.csv")
        self.simulate("uniform", test, "--cells", 1, "--part", "thinned")

    def models(self):
        shards = {"shards.train": "shards/train", "shards.validation": "shards/validation"}
        self.train("head", "geoclip", shards | {"train.steps": 2000, "train.weight_decay": 0.1})
        head = {"retrieval.head": "trained", "retrieval.run": "head"}
        self.train("model", "l47", shards | head | RECIPE | {"train.steps": 14000})

    def radii(self):
        """Calibrates LocDiff and LocDiff-H, and checks the radii on test places."""
        self.evaluate("tune", {"shards.validation": "shards/tune", "shards.test": "shards/test"}, "--tune")
        for name, words in ("radii", []), ("radii-hybrid", ["--hybrid"]):
            self.evaluate("calibrate-" + name, {}, "--calibrate", *words)
            for test in ("test", "im2gps3k", "uniform"):
                self.evaluate("%s-%s" % (name, test), {"shards.test": "shards/" + test}, *words)

    def speed(self):
        """Compares `predict` with `bench sample`."""
        self.simulate("many", "places/test.npy", rows=self.rows)
        words = ["--run", "model", "--config", "checkpoints/model/config.toml", "bench", "sample", "--images", self.rows]
        benched, _ = self.launch("bench-sample", *self.one_worker, *words)
        rates = {"bench sample": 1 / benched["s_per_image"]}
        for name in "many.parquet", "many.csv":
            rates["predict to " + name] = self.predict("predict-" + name, "many", "--out", name)
        rates["predict --hybrid"] = self.predict("predict-hybrid", "test", "--hybrid", "--out", "hybrid.parquet")
        self.say("photos per second: " + ", ".join("%s %.0f" % rate for rate in rates.items()))
        (self.out / "rates.json").write_text(json.dumps(rates))

    def load(self):
        """Sends requests from many clients to `serve`."""
        for name, words in ("serve", []), ("serve-hybrid", ["--hybrid"]):
            with self.service(name, words) as url:
                load = [sys.executable, str(SERVE_SCRIPT), url, "--clients", "64", "--seconds", str(self.seconds)]
                done = subprocess.run(load, stdout=subprocess.PIPE, text=True)
                self.say("%s: exit code %d of serve.py" % (name, done.returncode))
                (self.out / (name + "-load.txt")).write_text(done.stdout)

    @contextmanager
    def service(self, name, words):
        """Runs `serve`, and gives its address."""
        with open(self.out / (name + ".txt"), "w") as told:
            command = [self.launcher, "--json", *self.one_worker, "--run", "model", "serve", *words, "--bind", "127.0.0.1:0"]
            service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
            facts = json.loads(service.stdout.readline())
            self.launcher_pid = facts["pid"]
            yield facts["url"]
            service.terminate()
            self.say("%s: exit code %d of serve" % (name, service.wait()))

    def bytes(self):
        """Compares the answers to the same embeddings: by 1, 2 and 4 workers, alone, and from `serve`."""
        source, region = random.Random(1), [[-20, 30], [60, 30], [60, 75], [-20, 75], [-20, 30]]
        rows = [[round(source.gauss(0, 1), 3) for _ in range(768)] for _ in range(300)]
        Path("rows.csv").write_text(",".join("x%d" % i for i in range(768)) + "".join("\n" + ",".join(map(str, row)) for row in rows))
        Path("region.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [region]}))
        for name, words in ("plain", ["--density", "cells.parquet"]), ("hybrid", ["--hybrid"]), ("prior", ["--prior", "region.geojson"]):
            found = []
            for workers in 1, 2, 4:
                device = ["--workers", workers, "--device", "cpu"] if self.quick else ["--gpus", workers, "--share-gpu"]
                self.launch("bytes-" + name, *device, "--run", "model", "predict", "rows.csv", "--samples", *words, "--out", "rows-out.csv", "--overwrite")
                found.append(Path("rows-out.csv").read_bytes() + (Path("cells.parquet").read_bytes() if name == "plain" else b""))
            self.say("bytes of 1, 2 and 4 workers, %s: %s" % (name, "the same" if len(set(found)) == 1 else "DIFFERENT"))
        command = [self.launcher, *self.one_worker, "--run", "model", "predict", "-", "--samples"]
        ask = lambda some: subprocess.run(command, input="".join("%s\n" % row for row in some), stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        answers = [without_id(line) for line in ask(rows)]
        self.say("bytes alone: %s" % ("the same" if all(without_id(ask([rows[i]])[0]) == answers[i] for i in (0, 150, 299)) else "DIFFERENT"))
        with self.service("serve-bytes", []) as url:
            served = [without_id(row) for start in range(0, 300, 50) for row in post(url, rows[start : start + 50])["rows"]]
            self.say("bytes of serve: %s" % ("the same" if served == answers else "DIFFERENT"))
            both, alone = post(url, rows[:8], density=True)["rows"], post(url, rows[3:4], density=True)["rows"]
            self.say("densities of serve: %s" % ("the same" if without_id(both[3]) == without_id(alone[0]) else "DIFFERENT"))
            worker = int(Path("/proc/%d/task/%d/children" % ((self.launcher_pid,) * 2)).read_text().split()[0])
            os.kill(worker, signal.SIGKILL)
            killed, statuses, again = time.monotonic(), set(), None
            while again is None:
                try:
                    again = post(url, rows[:1])["rows"]
                except urllib.error.HTTPError as error:
                    statuses.add(error.code)
                    time.sleep(0.01)
            same = "the same" if without_id(again[0]) == answers[0] else "DIFFERENT"
            self.say("worker killed: %s, then back after %.2f s; bytes %s" % (statuses, time.monotonic() - killed, same))

    def grids(self):
        """Compares the gallery with even grids of up to a million points."""
        grids = ["--grids", "500,1000"] if self.quick else []
        self.evaluate("generalizability", {"shards.test": "shards/im2gps3k"}, "--suite", "generalizability", *grids)


PARTS = ("photos", "models", "radii", "speed", "load", "grids", "bytes")


def post(url, rows, **options):
    body = json.dumps({"embeddings": rows, "samples": True} | options).encode()
    request = urllib.request.Request(url + "predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def without_id(row):
    """An answer as JSON text without the id, which is the number of the row."""
    row = json.loads(row) if isinstance(row, str) else row
    return json.dumps({name: value for name, value in row.items() if name != "id"})


def settings(values):
    return [word for name, value in values.items() for word in ("--set", "%s=%s" % (name, value))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1000000, help="number of rows to predict (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=60, help="duration of the load on `serve` (default: %(default)s)")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    experiment = Experiment(arguments)
    for part in arguments.only.split(","):
        if part not in PARTS:
            parser.error("--only: there is no part %r; wanted some of %s" % (part, ", ".join(PARTS)))
        getattr(experiment, part)()
    experiment.say("all done")


if __name__ == "__main__":
    sys.exit(main())
