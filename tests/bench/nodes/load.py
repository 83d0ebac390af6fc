#!/usr/bin/env -S python3 -IS
"""Measures the launcher of node 0 with many nodes: the time until all workers have met, and the processor time afterwards.

    python3 tests/bench/nodes/load.py target/release/locdiff-launch [--nodes 64] [--workers 8]

All launchers run on this machine and are real, and so are their connections. Their workers are this script: they have no libtorch, meet
through the key-value store as NCCL does (one rank publishes an id per communicator, all others wait for it), and then send heartbeats. With
--gloo, they meet as Gloo does: each rank publishes its addresses, and reads those of all others.
"""
import json
import os
import socket
import struct
import sys
import time

COMMUNICATORS = 4


class Control:
    """The worker's end of the control socket."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["LOCDIFF_CONTROL"])
        self.requests = 0

    def send(self, message):
        body = json.dumps(message).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def receive(self):
        head = self.socket.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            sys.exit(0)
        return json.loads(self.socket.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))

    def ask(self, operation):
        self.requests += 1
        self.send({"store": {"id": self.requests, "operation": operation}})
        reply = self.receive()["stored"]
        assert reply["id"] == self.requests and "refused" not in reply["answer"], reply
        return reply["answer"]


def work():
    """The life of a worker."""
    rank, world, build = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), json.loads(os.environ["LOAD_BUILD"])
    control = Control()
    hello = {"rank": rank, "pid": os.getpid(), "libtorch_built": "2.11.0", "libtorch_loaded": "2.11.0", "cuda": None, "nccl": None}
    control.send({"hello": {**hello, **build}})
    seconds = control.receive()["start"]["meeting"]["heartbeat_s"]
    if os.environ["LOAD_GLOO"]:
        # Gloo's value in base64: an address, and eight bytes for each other rank.
        value = "A" * (4 * ((160 + 8 * world) // 3))
        control.ask({"set": {"key": "address-%d" % rank, "value": value}})
        for other in range(world):
            control.ask({"get": "address-%d" % other})
    for number in range(COMMUNICATORS):
        if rank == 0:
            control.ask({"set": {"key": "id-%d" % number, "value": "A" * 172}})
        assert len(control.ask({"get": "id-%d" % number})["value"]) == 172
        if control.ask({"add": {"key": "met-%d" % number, "amount": 1}})["sum"] == world:
            control.ask({"set": {"key": "all-%d" % number, "value": "MQ=="}})
        control.ask({"get": "all-%d" % number})
    ready = os.open(os.environ["LOAD_READY"], os.O_WRONLY | os.O_APPEND)
    os.write(ready, b".")
    spent, step = {"data_us": 0, "step_us": 0, "collective_us": 0}, 0
    while True:
        step += 1
        control.send({"beat": {"phase": "step", "step": step, "counter": step, "waits_in": None, "spent": spent}})
        time.sleep(seconds)


def processor_seconds(pid):
    """Processor time of a process and of each of its threads, seconds, by name of the thread."""
    found = {}
    for thread in os.listdir("/proc/%d/task" % pid):
        fields = open("/proc/%d/task/%s/stat" % (pid, thread)).read()
        name, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
        found[name] = found.get(name, 0) + (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")
    return found


def main():
    import argparse
    import re
    import shutil
    import signal
    import subprocess
    import tempfile

    parser = argparse.ArgumentParser()
    parser.add_argument("launcher")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    source = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "core", "src", "protocol", "mod.rs")).read()
    protocol = int(re.search(r"PROTOCOL_VERSION: u32 = (\d+)", source).group(1))
    first = subprocess.run([options.launcher, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.splitlines()[0]
    version, revision = re.match(r"locdiff-launch (\S+) \((\S+)\)", first).groups()
    with tempfile.TemporaryDirectory() as folder:
        launcher, ready, token = (os.path.join(folder, name) for name in ("locdiff-launch", "ready", "token"))
        shutil.copy(options.launcher, launcher)
        os.symlink(os.path.abspath(__file__), os.path.join(folder, "locdiff-worker"))
        open(ready, "w").close()
        with open(token, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(subprocess.run([launcher, "token"], stdout=subprocess.PIPE, text=True, check=True).stdout)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        build = json.dumps({"protocol": protocol, "version": version, "revision": revision})
        environment = {**os.environ, "LOAD_BUILD": build, "LOAD_READY": ready, "LOAD_GLOO": "1" if options.gloo else "", "XDG_RUNTIME_DIR": folder}
        line = [launcher, "--device", "cpu", "--workers", str(options.workers), "--nnodes", str(options.nodes)]
        line += ["--rendezvous", "127.0.0.1:%d" % port, "--token-file", token]
        began = time.monotonic()
        launchers = []
        for node in range(options.nodes):
            log = open(os.path.join(folder, "node-%d.log" % node), "w")
            command = line + ["--node-rank", str(node), "self-check"]
            launchers.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        wanted = options.nodes * options.workers
        while os.path.getsize(ready) < wanted:
            for node, launched in enumerate(launchers):
                if launched.poll() is not None:
                    log = open(os.path.join(folder, "node-%d.log" % node)).read()
                    sys.exit("the launcher of node %d ended with code %d:\n%s" % (node, launched.returncode, log[-3000:]))
            if time.monotonic() - began > 300:
                sys.exit("only %d of %d workers have met after 300 s" % (os.path.getsize(ready), wanted))
            time.sleep(0.05)
        print("%d nodes with %d workers each: all have met after %.1f s" % (options.nodes, options.workers, time.monotonic() - began))
        time.sleep(3)
        before, since = processor_seconds(launchers[0].pid), time.monotonic()
        other = processor_seconds(launchers[-1].pid)
        time.sleep(options.seconds)
        elapsed = time.monotonic() - since
        share = {name: (spent - before.get(name, 0)) / elapsed for name, spent in processor_seconds(launchers[0].pid).items()}
        of_other = sum(processor_seconds(launchers[-1].pid).values()) - sum(other.values())
        threads = ", ".join("%s %.1f %%" % (name, 100 * part) for name, part in sorted(share.items()) if part >= 0.0005)
        print("node 0: %.1f %% of a core (%s)" % (100 * sum(share.values()), threads))
        print("another node: %.1f %% of a core" % (100 * of_other / elapsed))
        ending = time.monotonic()
        launchers[0].send_signal(signal.SIGTERM)
        codes = {launched.wait() for launched in launchers}
        print("all launchers ended after %.1f s with the exit codes %s" % (time.monotonic() - ending, sorted(codes)))


if __name__ == "__main__":
    work() if "LOCDIFF_CONTROL" in os.environ else main()
