#!/usr/bin/env python3
"""Opens a page (a file, or a URL of this machine) in headless Chromium without network, uses it, and prints what happened as JSON.

    browse.py PAGE STEPS.json [--size WIDTHxHEIGHT] [--dark]
    browse.py --find

Without a browser, the exit status is 77. With --find, the script only looks for the browser.

STEPS is a list of steps: {"click": [x, y]}, {"move": [x, y]}, {"wheel": [x, y, delta]}, {"drag": [x, y, x2, y2]}, {"key": "Tab"}, {"eval":
EXPRESSION}, {"screenshot": FILE}. Positions are in pixels, or a CSS selector stands for the middle of an element: {"click": "button"}.
Prints {"problems": [...], "requests": [...], "values": [...]}: errors and warnings of the console, requests for anything but the page, and
the values of the expressions. The browser is controlled through a pipe (`--remote-debugging-pipe`), so only Python itself is needed.
"""

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--proxy-server=127.0.0.1:9",
         "--hide-scrollbars", "--remote-debugging-pipe"]
NO_BROWSER = 77
TIMEOUT_S = 60


def find_browser():
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """Chromium, with one page."""

    def __init__(self, profile, size):
        to_browser, self.out = os.pipe()
        self.inp, from_browser = os.pipe()

        def move_pipes():  # Chromium reads from descriptor 3 and writes to descriptor 4.
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        arguments = [find_browser(), *FLAGS, "--user-data-dir=%s" % profile, "--window-size=%d,%d" % size, "about:blank"]
        self.process = subprocess.Popen(arguments, preexec_fn=move_pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.events, self.session = b"", 0, [], None

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.inp, 1 << 20)
            if not piece:
                raise SystemExit("browse.py: the browser ended with %s" % self.process.wait())
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self.receive()
            if found.get("id") == self.number:
                if "error" in found:
                    raise SystemExit("browse.py: %s: %s" % (method, found["error"]))
                return found["result"]
            self.events.append(found)

    def wait_for(self, method):
        while True:
            seen = [event for event in self.events if event.get("method") == method]
            if seen:
                return
            self.events.append(self.receive())

    def evaluate(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise SystemExit("browse.py: %s: %s" % (expression, found["exceptionDetails"]["exception"].get("description")))
        return found["result"].get("value")

    def at(self, where):
        if not isinstance(where, str):
            return where
        box = "(() => { const e = document.querySelector(%s); e.scrollIntoView({ block: 'center', behavior: 'instant' });" \
              " const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        return self.evaluate(box % json.dumps(where))

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def do(self, step):
        """Does one step. Returns the value of an expression, else None."""
        (kind, value), = step.items()
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        if kind == "eval":
            return self.evaluate(value)
        if kind == "screenshot":
            Path(value).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        elif kind == "key":
            text = {"text": value} if len(value) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=value, code=value, windowsVirtualKeyCode=9 if value == "Tab" else 0, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=value, code=value)
        elif kind == "move":
            self.mouse("mouseMoved", *self.at(value))
        elif kind == "wheel":
            self.mouse("mouseWheel", value[0], value[1], deltaX=0, deltaY=value[2])
        elif kind in ("click", "drag"):
            first = self.at(value) if isinstance(value, str) else value[:2]
            last = value[2:] if kind == "drag" else first
            self.mouse("mouseMoved", *first)
            self.mouse("mousePressed", *first, **held)
            if kind == "drag":
                self.mouse("mouseMoved", *last, button="left", buttons=1)
            self.mouse("mouseReleased", *last, **held)
        else:
            raise SystemExit("browse.py: unknown step %r" % kind)
        # Two frames: the first draws what the step changed.
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return None

    def open(self, address, size, is_dark):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")

    def report(self, address):
        problems, requests = [], []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                problems.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                problems.append(" ".join(str(part.get("value", part.get("description"))) for part in parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                problems.append(parameters["entry"]["text"])
            elif method == "Page.javascriptDialogOpening":
                problems.append("dialog: " + parameters["message"])
            elif method == "Network.requestWillBeSent" and parameters["request"]["url"] != address:
                requests.append(parameters["request"]["url"])
        return {"problems": problems, "requests": requests}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?")
    parser.add_argument("steps", type=Path, nargs="?")
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--size", default="1280x900")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    if not find_browser():
        print("no Chromium found, so no page is opened in a browser; install it to test the pages (Debian, Ubuntu: apt install chromium)",
              file=sys.stderr)
        return NO_BROWSER
    if arguments.find:
        return 0
    signal.alarm(TIMEOUT_S)
    size = tuple(int(part) for part in arguments.size.split("x"))
    address = arguments.page if arguments.page.startswith("http://127.0.0.1:") else Path(arguments.page).resolve().as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile, size)
        try:
            browser.open(address, size, arguments.dark)
            values = [browser.do(step) for step in json.loads(arguments.steps.read_text())]
            print(json.dumps({**browser.report(address), "values": [value for value in values if value is not None]}))
        finally:
            browser.process.kill()
            browser.process.wait()


if __name__ == "__main__":
    sys.exit(main())
