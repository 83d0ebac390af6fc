"""Child processes that never outlive the script that started them.

Each child runs in a separate session, so that a signal to the session reaches all descendants of the child (cargo, rustc, the C++
compiler).
"""

import ctypes
import os
import signal
import subprocess

PR_SET_PDEATHSIG = 1
GRACE_S = 5

_running = []
_libc = ctypes.CDLL(None)


def start(command, **options):
    """Starts a command without standard input. The kernel terminates the command if this process dies."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM), **options
    )
    _running.append(child)
    return child


def wait(child, timeout_s=None):
    """Waits for a child and returns its exit status. After a timeout, ends the child and its descendants and returns None."""
    try:
        status = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        end(child)
        status = None
    if child in _running:
        _running.remove(child)
    return status


def end(child):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(GRACE_S)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            pass


def end_all():
    for child in _running:
        end(child)
    _running.clear()


def end_all_on_signals():
    """Turns SIGTERM and SIGHUP into SystemExit, so that `finally: end_all()` also runs after these signals, as after Ctrl-C."""
    def exit_on_signal(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
