#!/usr/bin/env python3
"""Trains on two nodes that share one GPU, and kills one of them in the middle.

    python3 tests/bench/nodes/gpu.py LAUNCHER OUT [--device cpu]

Both launchers run on this machine. Their workers meet over NCCL, through the store that the launchers serve. The
losses must be those of one launcher with two workers. Run `geoclip import` in a new folder, then this script there.
OUT gets the logs and `result.json`.
"""
import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STEPS, EVERY = {"cuda": 600, "cpu": 120}, {"cuda": 100, "cpu": 20}


class Experiment:
    def __init__(self, arguments):
        self.launcher, self.out, self.device = arguments.launcher, arguments.out, arguments.device
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        self.steps, self.every = STEPS[self.device], EVERY[self.device]
        self.result, self.launchers = {}, []

    def command(self, *words):
        device = ["--device", self.device] + (["--share-gpu"] if self.device == "cuda" else [])
        return [self.launcher, *device, *map(str, words)]

    def launch(self, name, *words):
        begin = time.monotonic()
        done = subprocess.run(self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (self.out / (name + ".log")).write_text(done.stdout)
        self.result[name] = {"seconds": round(time.monotonic() - begin, 1), "exit_code": done.returncode}
        if done.returncode:
            sys.exit("%s ended with %d: %s" % (name, done.returncode, done.stdout[-2000:]))

    def start(self, node, name, *words):
        at = ["--nnodes", "2", "--node-rank", node, "--rendezvous", "127.0.0.1:%d" % self.port, "--token-file", "token"]
        log = open(self.out / (name + ".log"), "a")
        self.launchers.append(subprocess.Popen(self.command(*at, *words), stdout=log, stderr=subprocess.STDOUT))
        return self.launchers[-1]

    def train(self, run):
        small = [] if self.device == "cuda" else ["--set", "model.degree=7", "--set", "train.global_batch=64"]
        values = {"shards.train": "shards/nodes", "train.steps": self.steps, "checkpoint.every": self.every, "loss.kl_weight": 0, "train.log_every": 1, "train.threads": 1}
        values = [word for name, value in values.items() for word in ("--set", "%s=%s" % (name, value))]
        return ["--config", "l23", *small, *values, "--set", "supervise.node_timeout_s=3", "--run", run, "train"]

    def losses(self, run):
        """The loss of each step. A step that was repeated must give the same loss again."""
        found, differences = {}, []
        for line in (Path("checkpoints") / run / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "progress":
                before = found.setdefault(event["step"], event["loss"])
                differences.append(abs(before - event["loss"]) / abs(before))
        return found, max(differences)

    def run(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        token = subprocess.run([self.launcher, "token"], stdout=subprocess.PIPE, check=True).stdout
        Path("token").write_bytes(token)
        os.chmod("token", 0o600)
        self.launch("simulate", "--workers", 1, "shards", "simulate", "--rows", 20000, "--out", "shards/nodes", "--overwrite")
        for run in ("one", "two"):
            shutil.rmtree(Path("checkpoints") / run, ignore_errors=True)
        self.launch("one-node", "--workers", 2, *self.train("one"))

        collectives = ["--workers", 1, "bench", "collectives"]
        self.end("collectives", [self.start(node, "collectives-%d" % node, *collectives) for node in (0, 1)])

        begin, line = time.monotonic(), ["--workers", 1, *self.train("two")]
        nodes = [self.start(node, "two-nodes-%d" % node, *line) for node in (0, 1)]
        while not list(Path("checkpoints/two").glob("step-%08d" % (2 * self.every))):
            if any(node.poll() is not None for node in nodes) or time.monotonic() - begin > 200:
                sys.exit("no checkpoint after %.0f s" % (time.monotonic() - begin))
            time.sleep(0.02)
        nodes[1].kill()
        nodes[1].wait()
        killed = time.monotonic()
        nodes[1] = self.start(1, "two-nodes-1", *line)
        self.end("two-nodes", nodes)
        log = (self.out / "two-nodes-0.log").read_text()
        resumed = re.findall(r"resuming from \S*step-0*(\d+)", log)
        one, (two, repeated) = self.losses("one")[0], self.losses("two")
        worst = max(abs(one[step] - two[step]) / abs(one[step]) for step in one)
        self.result["two-nodes"].update({
            "killed_after_s": round(killed - begin, 1), "seconds": round(time.monotonic() - begin, 1),
            "resumed_from": resumed, "steps": len(two), "graphs": log.count("as a CUDA graph"),
            "loss_difference": worst, "repeated_loss_difference": repeated,
        })
        if self.device == "cuda" and log.count("as a CUDA graph") != 2:
            sys.exit("the step was not recorded before and after the loss")
        if len(resumed) != 1 or sorted(two) != sorted(one) or max(worst, repeated) > 1e-5:
            sys.exit("the losses differ, or training was not resumed once")

    def finish(self):
        """Ends all launchers and writes the result so far."""
        for launcher in self.launchers:
            launcher.kill()
        text = json.dumps(self.result, indent=2) + "\n"
        (self.out / "result.json").write_text(text)
        print(text, end="")

    def end(self, name, nodes):
        codes = [node.wait(timeout=300) for node in nodes]
        self.result[name] = {"exit_codes": codes}
        if any(codes):
            sys.exit("%s: the launchers ended with %s" % (name, codes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    experiment = Experiment(parser.parse_args())
    try:
        experiment.run()
    finally:
        experiment.finish()


if __name__ == "__main__":
    main()
