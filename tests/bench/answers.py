#!/usr/bin/env python3
"""Measures the radii, the grids, the speed of `predict` and the latency of `serve`, with one model of world 2.

    python3 tests/bench/answers.py LAUNCHER DATA OUT [--only photos,models,...] [--rows 1000000] [--seconds 60] [--quick]

DATA has `mp16_500k.npy`, an N x 2 list of places, and `im2gps3k.csv`. Run `geoclip import` in a new folder, then this
script. It cuts the list into training, validation and test places that share no cell of 0.1 degrees, simulates photos,
trains an image head and a LocDiff (L = 47), tunes and calibrates them on validation photos, and evaluates them on the
test places, on Im2GPS3k and on one test place per cell of 1 degree. Then it predicts many rows, and sends requests from
64 clients to `serve`. The results are in OUT; `OUT/log` has each command with its duration and exit code. `--only`
names the parts to run, which use the files of earlier parts. `--quick` does everything with few rows and steps on the
CPU, to test this script. Results: docs/BENCHMARKS.md, "Predict".
"""
import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

SHARES = "train=0.89,validation=0.05,test=0.06"
SEEDS = {"train": 2201, "validation": 2202, "test": 2203, "im2gps3k": 2204, "uniform": 2205, "tune": 2206}
RECIPE = {"train.learning_rate": 4e-4, "loss.kl_weight": 0, "eval.every": 0}
SERVE_SCRIPT = Path(__file__).with_name("serve.py")


class Experiment:
    def __init__(self, arguments):
        self.launcher, self.data, self.out, self.quick = arguments.launcher, arguments.data, arguments.out, arguments.quick
        self.rows, self.seconds = (2000, 3) if self.quick else (arguments.rows, arguments.seconds)
        self.device = ["--workers", "2", "--device", "cpu"] if self.quick else ["--gpus", "1"]
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
        device = self.device[2:] if self.quick else self.device
        words = ["--run", "model", "--config", "checkpoints/model/config.toml", "bench", "sample", "--images", self.rows]
        benched, _ = self.launch("bench-sample", *device, *words)
        rates = {"bench sample": 1 / benched["s_per_image"]}
        for name in "many.parquet", "many.csv":
            rates["predict to " + name] = self.predict("predict-" + name, "many", "--out", name)
        rates["predict --hybrid"] = self.predict("predict-hybrid", "test", "--hybrid", "--out", "hybrid.parquet")
        self.say("photos per second: " + ", ".join("%s %.0f" % rate for rate in rates.items()))
        (self.out / "rates.json").write_text(json.dumps(rates))

    def load(self):
        """Sends requests from many clients to `serve`."""
        device = self.device[2:] if self.quick else self.device
        for name, words in ("serve", []), ("serve-hybrid", ["--hybrid"]):
            with open(self.out / (name + ".txt"), "w") as told:
                command = [self.launcher, "--json", *device, "--run", "model", "serve", *words, "--bind", "127.0.0.1:0"]
                service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
                url = json.loads(service.stdout.readline())["url"]
                load = [sys.executable, str(SERVE_SCRIPT), url, "--clients", "64", "--seconds", str(self.seconds)]
                done = subprocess.run(load, stdout=subprocess.PIPE, text=True)
                service.terminate()
                self.say("%s: exit code %d of serve.py, %d of serve" % (name, done.returncode, service.wait()))
                (self.out / (name + "-load.txt")).write_text(done.stdout)

    def grids(self):
        """Compares the gallery with even grids of up to a million points."""
        grids = ["--grids", "500,1000"] if self.quick else []
        self.evaluate("generalizability", {"shards.test": "shards/im2gps3k"}, "--suite", "generalizability", *grids)


PARTS = ("photos", "models", "radii", "speed", "load", "grids")


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
