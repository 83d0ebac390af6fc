#!/usr/bin/env python3
"""Repeats the paper's experiments on simulated photos: trains the models that they need, runs every suite of `eval`, and
writes one report.

    python3 setup/paper.py LAUNCHER [--quick] [LAUNCHER FLAGS ...]

`make paper` calls this script. It runs the demo (the run `paper`), trains small variants of it for the suites `losses`
and `degree`, and writes `checkpoints/paper/eval/report.html`. Work that is done is not repeated: a training that was
interrupted is resumed, and a result that exists is kept. With --quick, the trainings are only a few steps long and the
grids small. All other flags go to the launcher (`--workers 2 --device cpu`, `--gpus 1`, `--set FIELD=VALUE`).
"""
import json
import subprocess
import sys
from pathlib import Path

RUN = "paper"
# The losses of the paper's table, each alone. The run `paper` has the default loss: the KL divergence and L2.
LOSSES = {
    "l1": {"loss.kl_weight": 0, "loss.l2_weight": 0, "loss.l1_weight": 1},
    "l2": {"loss.kl_weight": 0},
    "cosine": {"loss.kl_weight": 0, "loss.l2_weight": 0, "loss.cosine_weight": 1},
    "kl": {"loss.l2_weight": 0},
}
DEGREES = (7, 11)
# On two CPU cores, embedding the paper's grids of 500,000 and 1,000,000 points would take several minutes.
GRIDS_CPU = ["--grids", "21000,100000"]


class Paper:
    def __init__(self, launcher, flags, is_quick):
        self.launcher, self.flags, self.is_quick = launcher, flags, is_quick
        self.results = Path("checkpoints") / RUN / "experiments"

    def launch(self, *words, stdout=None):
        words = [self.launcher, *self.flags, *map(str, words)]
        print("+", *words, file=sys.stderr, flush=True)
        done = subprocess.run(words, stdout=stdout, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        return done.stdout

    def train(self, name, values):
        """Trains a variant of the run. A run that is complete ends at once."""
        run = "%s-%s" % (RUN, name)
        values = values | {"eval.after_train": "false", "eval.every": 0} | ({"train.steps": 4} if self.is_quick else {})
        folder = Path("checkpoints") / run
        own = ["--config", "checkpoints/%s/config.toml" % RUN, *sum((["--set", "%s=%s" % pair] for pair in values.items()), [])]
        new = [] if folder.exists() else own
        self.launch(*new, "--run", run, "train")
        return run

    def experiment(self, suite, *words):
        """Runs a suite and keeps its result."""
        file = self.results / ("%s.json" % suite)
        if not file.exists():
            result = self.launch("--json", *words, stdout=subprocess.PIPE).splitlines()[-1]
            assert json.loads(result)["suite"] == suite
            file.write_text(result + "\n")
        return file

    def run(self):
        quick = ["--set", "train.steps=6", "--set", "eval.every=0"] if self.is_quick else []
        self.launch(*([] if (Path("checkpoints") / RUN).exists() else quick), "--run", RUN, "demo")
        losses = [RUN] + [self.train("loss-" + name, values) for name, values in LOSSES.items()]
        degrees = [RUN] + [self.train("degree-%d" % degree, {"model.degree": degree}) for degree in DEGREES]
        self.results.mkdir(exist_ok=True)
        own = ("--run", RUN, "eval")
        self.launch(*own, "--calibrate", "--hybrid")
        uses_cpu = "cpu" in self.flags
        grids = ["--grids", "500,1000"] if self.is_quick else GRIDS_CPU if uses_cpu else []
        files = [
            self.experiment("generative", *own, "--hybrid", "--suite", "generative"),
            self.experiment("generalizability", *own, "--suite", "generalizability", *grids),
            self.experiment("gallery-bias", *own, "--suite", "gallery-bias"),
            self.experiment("perturbation", "eval", "--suite", "perturbation"),
            self.experiment("losses", "eval", "--suite", "losses", "--runs", ",".join(losses)),
            self.experiment("degree", "eval", "--suite", "degree", "--runs", ",".join(degrees)),
            self.experiment("time", *own, "--suite", "time"),
            # The last evaluation decides what the other sections of the report show.
            self.experiment("main", *own, "--hybrid", "--suite", "main"),
        ]
        shown = sum((["--experiment", str(file)] for file in [files[-1], *files[:-1]]), [])
        self.launch("report", Path("checkpoints") / RUN, *shown)


def main(arguments):
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    flags = [word for word in arguments[1:] if word != "--quick"]
    Paper(arguments[0], flags, "--quick" in arguments).run()


if __name__ == "__main__":
    main(sys.argv[1:])
