#!/usr/bin/env python3
"""Sends requests to `locdiff-launch serve` from many clients at once, and prints latencies, errors and the memory of the service.

    python3 tests/bench/serve.py http://127.0.0.1:8787/ [--clients 64] [--seconds 60] [--rows 1]

Each client sends its next request as soon as it has the answer to the last one, over one connection. The embeddings are random. The memory
(VmRSS) of the launcher and of its worker is read from /proc, a few seconds after the start and at the end, so the service must run on this
machine. Exit status 1 if a request failed, or if p99 is more than 3 times p50. Needs only Python's standard library.
"""
import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.parse
from pathlib import Path

WARM_UP_S = 5


def listener(port):
    """The process that listens at a TCP port of this machine, or None."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and int(cells[1].rsplit(":", 1)[1], 16) == port:
                inodes.add("socket:[%s]" % cells[9])
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    return None


def memory_mib(pid):
    """The resident memory of the launcher and of its workers."""
    workers = Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()
    names = ["launcher"] + ["worker"] * len(workers)
    for name, process in zip(names, [str(pid)] + workers):
        status = Path("/proc/%s/status" % process).read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        yield name, kib / 1024


class Client(threading.Thread):
    def __init__(self, address, width, rows, deadline, seed):
        super().__init__(daemon=True)
        self.address, self.width, self.rows, self.deadline = address, width, rows, deadline
        self.random, self.times_s, self.errors = random.Random(seed), [], []

    def run(self):
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        while time.monotonic() < self.deadline:
            embeddings = [[round(self.random.gauss(0, 1), 3) for _ in range(self.width)] for _ in range(self.rows)]
            body = json.dumps({"embeddings": embeddings})
            begun = time.monotonic()
            try:
                connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                text = reply.read().decode()
                if reply.status != 200 or len(json.loads(text)["rows"]) != self.rows:
                    self.errors.append("%d %s" % (reply.status, text.strip()))
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
            self.times_s.append(time.monotonic() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rows", type=int, default=1, help="embeddings in each request")
    arguments = parser.parse_args()
    url = urllib.parse.urlsplit(arguments.url)
    address = (url.hostname, url.port or 80)
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/healthz")
    facts = json.loads(connection.getresponse().read())
    connection.close()
    pid = listener(address[1])
    begun = time.monotonic()
    clients = [Client(address, facts["width"], arguments.rows, begun + arguments.seconds, seed) for seed in range(arguments.clients)]
    for client in clients:
        client.start()
    time.sleep(min(WARM_UP_S, arguments.seconds / 2))
    before = dict(memory_mib(pid)) if pid else {}
    for client in clients:
        client.join()
    took_s = time.monotonic() - begun
    after = dict(memory_mib(pid)) if pid else {}
    times_s = sorted(time_s for client in clients for time_s in client.times_s)
    errors = [error for client in clients for error in client.errors]
    p50, p99 = (times_s[min(len(times_s) - 1, int(len(times_s) * share))] * 1e3 for share in (0.5, 0.99))
    print("%d clients, %.0f s: %d requests (%.0f/s), %d errors" % (arguments.clients, took_s, len(times_s), len(times_s) / took_s, len(errors)))
    print("p50 %.0f ms, p99 %.0f ms (%.2f times p50), longest %.0f ms" % (p50, p99, p99 / p50, times_s[-1] * 1e3))
    for name in before:
        print("memory of the %s: %.1f MiB after %d s, %.1f MiB at the end" % (name, before[name], WARM_UP_S, after[name]))
    for error in errors[:5]:
        print("error: " + error)
    return 1 if errors or p99 > 3 * p50 else 0


if __name__ == "__main__":
    sys.exit(main())
