#!/usr/bin/env python3
"""A replacement for locdiff-worker in tests. It implements the protocol and misbehaves as FAKE_WORKER says.

The environment variable FAKE_WORKER is MODE for all ranks, or MODE@RANK for one rank.
"""
import json
import os
import signal
import socket
import struct
import sys
import time

RANK = int(os.environ["RANK"])
MODE, _, ONLY = os.environ.get("FAKE_WORKER", "good").partition("@")
if ONLY and int(ONLY) != RANK:
    MODE = "good"


def send(message):
    body = json.dumps(message).encode()
    control.sendall(struct.pack(">I", len(body)) + body)


def receive():
    (length,) = struct.unpack(">I", control.recv(4, socket.MSG_WAITALL))
    return json.loads(control.recv(length, socket.MSG_WAITALL))


def fail(message, exit_code, kind):
    send({"failed": {"message": message, "of_peer": False, "exit_code": exit_code, "kind": kind}})
    sys.exit(exit_code)


print(f"rank {RANK} has started", flush=True)
with open(os.environ["FAKE_PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\n")
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "silent":
    time.sleep(600)
if MODE == "not-loaded":
    print("locdiff-worker: error while loading shared libraries: libtorch_cpu.so: cannot open", file=sys.stderr)
    sys.exit(127)

control = socket.socket(socket.AF_UNIX)
control.connect(os.environ["LOCDIFF_CONTROL"])
if MODE == "garbage":
    control.sendall(b"GET / HTTP/1.1\r\n\r\n")
    time.sleep(600)
hello = {
    "protocol": 99 if MODE == "wrong-protocol" else int(os.environ["FAKE_PROTOCOL"]),
    "rank": RANK,
    "pid": os.getpid(),
    "version": os.environ["FAKE_VERSION"],
    "revision": "0000000" if MODE == "wrong-build" else os.environ["FAKE_REVISION"],
    "libtorch_built": "2.11.0",
    "libtorch_loaded": "2.10.0" if MODE == "wrong-libtorch" else "2.11.0",
    "cuda": None,
    "nccl": None,
}
send({"hello": hello})
if MODE == "die-unread":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
start = receive()["start"]
if MODE == "crash":
    print("about to crash", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if MODE == "talk":
    print(f"2026-11-16T10:00:00.00000{RANK + 1}Z  WARN slow disk", file=sys.stderr, flush=True)
    print(f"2026-11-16T10:00:00.00000{RANK + 2}Z  INFO ready", file=sys.stderr, flush=True)
if MODE == "fail-loudly":
    print("2026-11-16T10:00:00.000001Z ERROR another thing", file=sys.stderr, flush=True)
    print("2026-11-16T10:00:00.000002Z ERROR no such thing", file=sys.stderr, flush=True)
    fail("no such thing", 20, "final")
if MODE == "fail":
    fail("no such thing", 14, "crash")
if MODE == "outage" or MODE == "outage-twice" and start["meeting"]["attempt"] < 2:
    fail("part-0.parquet: Input/output error (os error 5)", 16, "outage")
if MODE == "full-disk":
    fail("part-0: No space left on device (os error 28)", 16, "final")
if MODE == "vanish":
    sys.exit(0)
if MODE in ("hang", "stubborn"):
    time.sleep(600)
if MODE == "hang-up":
    control.close()
    time.sleep(600)
if MODE == "same-line":
    print("the same line", flush=True)
if MODE == "malloc":
    print("malloc keeps", os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"], flush=True)
if MODE == "flood":
    for _ in range(200):
        os.write(1, b"x" * (1 << 20))
if MODE == "daemon" and os.fork() == 0:
    os.setsid()
    with open(os.environ["FAKE_PIDS"], "a") as pids:
        pids.write(f"{os.getpid()}\n")
    time.sleep(600)
if MODE == "leave-child":
    if os.fork() == 0:
        with open(os.environ["FAKE_PIDS"], "a") as pids:
            pids.write(f"{os.getpid()}\n")
        time.sleep(600)
if MODE == "other-result":
    send({"result": {"bench-shdd": []}})
elif "train" in start["job"]:
    with open(os.environ["FAKE_PIDS"] + ".rows", "a") as rows:
        rows.write("%d\n" % start["job"]["train"]["config"]["train"]["micro_batch"])
    summary = {"step": 4, "from_step": 0, "loss": 1.0, "skipped_steps": 0, "stopped": False, "evaluation": None}
    send({"result": {"train": summary}})
else:
    send({"result": {"self-check": {"device": "Cpu", "size": 1, "error_max": 0.0}}})
if MODE == "linger":
    time.sleep(600)
