#!/usr/bin/env python3
"""Compares the speed of `locdiff-launch` with PyTorch, on one GPU or on the CPU, in one run.

    python3 tests/bench/speed.py target/cuda/release/locdiff-launch
    python3 tests/bench/speed.py target/release/locdiff-launch --device cpu

For training and sampling, this script runs `bench train` or `bench sample` and every mode of `tests/bench/pytorch.py`
with the same sizes, several times in turn. It prints the median times and how many times faster `locdiff-launch` is. On
the CPU, it compares only a training step of the preset `demo`, with one and with two threads. If the interpreter has no
torch, it runs `locdiff-launch` alone.
"""
import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PEER = Path(__file__).with_name("pytorch.py")


def last_json(command):
    """Runs a command. Returns the JSON object on the last line of its output, or None if the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print("failed: %s\n%s" % (" ".join(map(str, command)), done.stderr[-2000:]), file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def product(options, what, case):
    command = [options.launcher, "--json", "--config", options.config, "--workers", "1", "--device", options.device]
    if what == "train":
        settings = {"model.degree": case["degree"], "train.global_batch": case["batch"], "loss.anchors": case["anchors"]}
        settings["model.dropout"] = case["dropout"]
        settings["train.threads"] = case.get("threads", "auto")
        settings["train.precision"] = case["precision"]
        verb = ["bench", "train", "--steps", str(case["iterations"])]
    else:
        settings = {"model.degree": case["degree"], "eval.samples": case["samples"], "eval.sampler_steps": case["steps"]}
        verb = ["bench", "sample", "--images", str(case["images"])]
    for name, value in settings.items():
        command += ["--set", "%s=%s" % (name, value)]
    return last_json(command + verb)


def peer(options, mode, what, case):
    command = [sys.executable, PEER, what, "--mode", mode, "--device", options.device]
    for name, value in case.items():
        command += ["--" + name, str(value)]
    return last_json(command)


def milliseconds(what, run):
    """The time per step or image. For `bench sample`, the mean, because it includes the preparation of the sampler."""
    if "s_per_image" in run:
        return 1e3 * run["s_per_image"]
    return run[{"train": "ms_per_step", "sample": "ms_per_image"}[what]]


def compare(options, what, case, modes):
    """Prints one table, and returns its numbers."""
    times = {}
    for _ in range(options.rounds):
        for name in ("locdiff-launch",) + modes:
            found = product(options, what, case) if name == "locdiff-launch" else peer(options, name, what, case)
            if found is not None:
                times.setdefault(name, []).append(found)
    print("%s, %s" % (what, ", ".join("%s %s" % pair for pair in case.items())))
    medians = {name: statistics.median(milliseconds(what, run) for run in runs) for name, runs in times.items()}
    for name, runs in times.items():
        spread = "%.3f to %.3f" % (min(run["ms_lo"] for run in runs), max(run["ms_hi"] for run in runs))
        ratio = "%.2f times" % (medians[name] / medians["locdiff-launch"]) if "locdiff-launch" in medians else ""
        print("  %-16s %9.3f ms  (%s)  %s" % (name, medians[name], spread, ratio), flush=True)
    return {"what": what, "case": case, "runs": times}


def cuda_cases():
    common = {"anchors": 2048, "dropout": 0.0, "precision": "bf16", "iterations": 200}
    cases = [("train", {"degree": degree, "batch": batch, **common}) for degree, batch in ((47, 512), (47, 4096), (95, 512))]
    return cases + [
        ("sample", {"degree": 47, "images": 2997, "samples": 16, "steps": steps}) for steps in (20, 200)
    ]


def cpu_cases(options):
    """A training step of the preset `demo`."""
    config = last_json([options.launcher, "--json", "--config", options.config, "config", "show"])
    model, train = config["model"], config["train"]
    sizes = {"degree": model["degree"], "batch": train["global_batch"], "anchors": config["loss"]["anchors"]}
    common = {**sizes, "dropout": model["dropout"], "precision": "f32", "iterations": 50}
    return [("train", {**common, "threads": threads}) for threads in (1, 2) if threads <= os.cpu_count()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("launcher", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, help="default: 2 on a GPU, and 5 on the CPU, where times vary more")
    parser.add_argument("--work", default="train,sample", help="what to compare, separated by commas: train, sample")
    parser.add_argument("--modes", default="", help="modes of PyTorch, separated by commas; default: all that the device supports")
    parser.add_argument("--out", type=Path, help="file for all numbers as JSON")
    options = parser.parse_args()
    options.launcher = options.launcher.resolve()
    is_cuda = options.device == "cuda"
    options.config = "l47" if is_cuda else "demo"
    options.rounds = options.rounds or (2 if is_cuda else 5)
    modes = tuple(options.modes.split(",")) if options.modes else ("eager", "compile", "reduce-overhead", "whole") if is_cuda else ("eager",)
    if importlib.util.find_spec("torch") is None:
        print("this Python has no torch, so there is nothing to compare with")
        modes = ()
    cases = cuda_cases() if is_cuda else cpu_cases(options)
    found = [compare(options, what, case, modes) for what, case in cases if what in options.work.split(",")]
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
