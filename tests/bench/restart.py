#!/usr/bin/env python3
"""Measures the time from the death of a worker to the next training step, for locdiff-launch and for torchrun.

    python3 tests/bench/restart.py target/release/locdiff-launch [--kills 5] [--workers 2]

Run it in the project's folder, after `make demo`, which simulates the shards. Both systems train the network of the demo (degree 15,
batch 512) on the CPU and write a checkpoint every ten steps. The script kills one worker with SIGKILL and waits until the next step is
complete. The torchrun script keeps its rows in memory, so it has less to do at a restart: it does not open shards. Needs PyTorch.
"""
import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"
CHECKPOINT_EVERY = 10


def train_with_torch(folder):
    """The script that torchrun runs in each worker."""
    sys.path.insert(0, str(EXAMPLES))
    import locdiff_torch
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # Without a different key prefix for each restart, Gloo finds the addresses of the dead workers in torchrun's store, and restarts take minutes.
    store = dist.PrefixStore("attempt-" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    model = locdiff_torch.CSUnet(256)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step = state["step"]
    parallel = DistributedDataParallel(model)
    (folder / ("pid-%d" % rank)).write_text(str(os.getpid()))
    points = torch.nn.functional.normalize(torch.randn(512 // world, 3), dim=1)
    anchors = locdiff_torch.spherical_harmonics(torch.nn.functional.normalize(torch.randn(512, 3), dim=1), 15)
    codes, images = locdiff_torch.spherical_harmonics(points, 15), torch.randn(512 // world, 768)
    while True:
        predicted = parallel(codes * locdiff_torch.CODE_SCALE, torch.randint(1, 200, (len(codes),)), images)
        optimiser.zero_grad()
        locdiff_torch.loss(predicted, codes, anchors, 0.04).backward()
        optimiser.step()
        step += 1
        if rank == 0:
            if step % CHECKPOINT_EVERY == 0:
                state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
                torch.save(state, str(saved) + ".new")
                os.replace(str(saved) + ".new", saved)
            with open(folder / "steps", "a") as steps:
                steps.write("%d\n" % step)


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the awaited steps were not completed within two minutes")
        time.sleep(0.002)


def measure(kills, steps_done, worker):
    """Kills a worker `kills` times; `worker()` returns its process id. Returns the seconds from each kill to the next step."""
    times = []
    for _ in range(kills):
        before = steps_done()
        wait_until(lambda: steps_done() >= before + 2 * CHECKPOINT_EVERY + 5)
        victim = worker()
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        # A step that was already complete may be reported just after the kill. It must not count.
        time.sleep(0.05)
        before = steps_done()
        wait_until(lambda: steps_done() > before)
        times.append(time.monotonic() - killed)
    return times


def product(folder, options):
    """For locdiff-launch, returns the command and the functions that `measure` needs."""
    settings = ["checkpoint.dir=%s" % folder, "checkpoint.every=%d" % CHECKPOINT_EVERY, "train.steps=100000", "train.log_every=1",
                "eval.after_train=false", 'shards.validation=""', "supervise.max_restarts=100"]
    command = [options.launcher, "--device", "cpu", "--workers", str(options.workers), "--run", "restart"]
    command += [part for setting in settings for part in ("--set", setting)] + ["train"]
    events = folder / "restart" / "events.jsonl"
    steps_done = lambda: events.read_text().count('"event":"progress"') if events.exists() else 0
    worker = lambda launcher: int(Path("/proc/%d/task/%d/children" % (launcher, launcher)).read_text().split()[1])
    return command, steps_done, worker


def torchrun(folder, options):
    """For torchrun, returns the command and the functions that `measure` needs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.workers)]
    command += ["--max-restarts", "100", __file__]
    steps = folder / "steps"
    steps_done = lambda: len(steps.read_text().splitlines()) if steps.exists() else 0
    return command, steps_done, lambda _: int((folder / "pid-1").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("launcher")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for name, system in (("locdiff-launch", product), ("torchrun", torchrun)):
        with tempfile.TemporaryDirectory() as folder:
            command, steps_done, worker = system(Path(folder), options)
            environment = {**os.environ, "LOCDIFF_BENCH_FOLDER": folder, "OMP_NUM_THREADS": "1"}
            launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                times = measure(options.kills, steps_done, lambda: worker(launcher.pid))
            finally:
                launcher.terminate()
                launcher.wait()
        middle = statistics.median(times)
        print("%-15s median %.2f s, %.2f to %.2f s (%d kills)" % (name, middle, min(times), max(times), len(times)), flush=True)


if __name__ == "__main__":
    if "LOCDIFF_BENCH_FOLDER" in os.environ:
        train_with_torch(Path(os.environ["LOCDIFF_BENCH_FOLDER"]))
    else:
        main()
