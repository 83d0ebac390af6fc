#!/usr/bin/env python3
"""Runs docs/deploy/train.sbatch on a small Slurm cluster, whose two nodes are network namespaces of this machine.

    python3 tests/bench/nodes/slurm.py target/release/locdiff-launch

Needs root, and Debian's packages slurm-wlm and iproute2. The job is queued again twice while it trains: by `scontrol requeue`, and after
SIGUSR1, which Slurm sends when the time limit is near. Each time it must stop with a checkpoint and resume from it. This takes six minutes.
The last line of the output has the numbers as JSON.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
from small_run import SmallRun  # noqa: E402 (the line above must come first)

SCRIPT = HERE.parents[3] / "docs/deploy/train.sbatch"
NODES = ("n0", "n1")
CONTROLLER = "10.78.0.254"
ADDRESSES = {"n0": "10.78.0.1", "n1": "10.78.0.2"}
STEPS, EVERY = 3000, 250
PATIENCE_S = 240
CONFIGURATION = """
ClusterName=locdiff
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class SlurmCluster:
    """A controller and two nodes, each in a network namespace of its own."""

    def __init__(self, folder, programs):
        self.folder, self.daemons, self.prefix = folder, [], "slurm%d-" % os.getpid()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": "%s:%s" % (programs, os.environ["PATH"])}
        host = os.uname().nodename
        text = CONFIGURATION.format(host=host, controller=CONTROLLER, folder=folder)
        for number, node in enumerate(NODES):
            text += "NodeName=%s NodeHostname=%s NodeAddr=%s Port=%d CPUs=1\n" % (node, host, ADDRESSES[node], 17001 + number)
        (folder / "slurm.conf").write_text(text)
        for name in ("controller", *NODES):
            (folder / name).mkdir()

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def inside(self, name, *words, **options):
        """Starts a program in a network namespace. `ip netns exec` would hide the control groups that slurmd needs."""
        script = 'mount --bind "$0" /etc/hosts && exec nsenter --net="$1" "${@:2}"'
        arguments = [self.folder / "hosts", "/run/netns/" + self.prefix + name, *words]
        return subprocess.Popen(["unshare", "--mount", "bash", "-c", script, *map(str, arguments)], env=self.environment, **options)

    def start(self):
        subprocess.run(["service", "munge", "start"], check=True, stdout=subprocess.DEVNULL)
        switch = self.prefix + "switch"
        names = "127.0.0.1 localhost\n%s %s\n" % (CONTROLLER, os.uname().nodename) + "".join("%s %s\n" % (ADDRESSES[node], node) for node in NODES)
        (self.folder / "hosts").write_text(names)
        for name in ("switch", *NODES):
            ip("netns", "add", self.prefix + name)
            ip("-n", self.prefix + name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "address", "add", CONTROLLER + "/24", "dev", "br0")
        ip("-n", switch, "link", "set", "br0", "up")
        self.daemons.append(self.inside("switch", "slurmctld", "-D", stderr=subprocess.DEVNULL))
        for node in NODES:
            namespace = self.prefix + node
            ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", node, "netns", switch)
            ip("-n", namespace, "address", "add", ADDRESSES[node] + "/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", switch, "link", "set", node, "master", "br0", "up")
            self.daemons.append(self.inside(node, "slurmd", "-D", "-N", node, stderr=subprocess.DEVNULL))
        self.wait_for("both nodes are idle", lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle")

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()
        for name in ("switch", *NODES):
            subprocess.run(["ip", "netns", "delete", self.prefix + name])

    def ask(self, *words):
        """Runs a command of Slurm beside the controller, and returns its output."""
        asked = self.inside("switch", *words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, error = asked.communicate()
        if error:
            print("%s: %s" % (" ".join(words), error.strip()))
        return out.strip()

    def wait_for(self, what, holds):
        end = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > end:
                log = self.folder / "slurm-1.out"
                sys.exit("not within %d s: %s\n%s" % (PATIENCE_S, what, log.read_text()[-3000:] if log.exists() else ""))
            time.sleep(0.1)


def main(launcher):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = SmallRun(launcher, folder, settings=["train.steps=%d" % STEPS, "checkpoint.every=%d" % EVERY, "train.log_every=10", "train.threads=1"])
        settings = [word for setting in small.settings for word in ("--set", setting)]
        log = folder / "slurm-1.out"
        found = lambda pattern: re.findall(pattern, log.read_text() if log.exists() else "")
        checkpoints = lambda: sorted(path.name for path in (folder / "checkpoints/job").glob("step-*"))
        with SlurmCluster(folder, small.launcher.parent) as cluster:
            state = lambda: re.search(r"JobState=(\w+).*?ExitCode=(\d+)", cluster.ask("scontrol", "show", "job", "1"), re.S).groups()
            print(cluster.ask("sbatch", "--nodes=2", str(SCRIPT), "--workers", "1", "--device", "cpu", "--run", "job", *settings, "train"))
            for number, stop in enumerate((("scontrol", "requeue", "1"), ("scancel", "--signal=USR1", "1")), 1):
                count = len(checkpoints())
                cluster.wait_for("training goes on", lambda: len(checkpoints()) > count or state()[0] == "COMPLETED")
                cluster.ask(*stop)
                cluster.wait_for("training stops", lambda: len(found("stopped after step")) == number)
                cluster.wait_for("the job is queued again", lambda: state()[0] == "PENDING")
                # Slurm holds the job back for two minutes.
                cluster.wait_for("training resumes", lambda: len(found("resuming from")) == number)
            cluster.wait_for("the job ends", lambda: state()[0] not in ("RUNNING", "COMPLETING"))
            result = {
                "state": state()[0], "exit_code": int(state()[1]),
                "stopped_after": [int(step) for step in found(r"stopped after step (\d+) with a checkpoint")],
                "resumed_from": [int(step) for step in found(r"resuming from \S*step-0*(\d+)")],
                "last_checkpoint": checkpoints()[-1],
            }
        print(json.dumps(result))
        wanted = {"state": "COMPLETED", "exit_code": 0, "last_checkpoint": "step-%08d" % STEPS}
        stops = result["stopped_after"]
        if any(result[key] != value for key, value in wanted.items()) or len(stops) != 2 or result["resumed_from"] != stops:
            sys.exit("the job did not resume twice and end well:\n" + log.read_text()[-3000:])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
