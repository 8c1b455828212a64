"""A Chromium that tests drive by its own protocol: clicks, keys, pictures, complaints."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-extensions", "--remote-debugging-pipe",
]  # fmt: skip

START = """
import os, sys
orders, answers = int(sys.argv[1]), int(sys.argv[2])
answers = os.dup(answers) if answers == 3 else answers
os.dup2(orders, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads its orders from descriptor 3, and answers on 4."""


class NoBrowserError(Exception):
    """Chromium does not start, or does not answer in time."""


class Browser:
    """One page of a headless Chromium. `complaints` are errors of scripts, console and network."""

    def __init__(self, profile, *, patience=60.0):
        self.complaints = []
        self._patience, self._numbers, self._rest = patience, itertools.count(1), b""
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs), str(ours), *command],
            pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self._session = None
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        """End the browser."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        for descriptor in (self._in, self._out):
            os.close(descriptor)

    def call(self, method, **parameters):
        """Give an order and return its result; what happens meanwhile is kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise NoBrowserError(f"Chromium does not start: {error}") from error
        deadline = time.monotonic() + self._patience
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._look_at(answer)

    def open(self, address, *, width=1400, height=1000, dark=False):
        """Load a page at a width, and wait until its scripts have run."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        """Return the value of an expression of JavaScript."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, condition, *, seconds=30.0):
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # a page that is being replaced
                if value := self.value(condition):
                    return value
            assert time.monotonic() < deadline, f"never came true: {condition}"
            time.sleep(0.1)

    def click(self, selector):
        """Press the mouse in the middle of the first visible element that a selector finds."""
        find = f"""(() => {{
            const found = [...document.querySelectorAll({json.dumps(selector)})]
                .filter(each => each.getClientRects().length);
            if (!found.length) return null;
            found[0].scrollIntoView({{block: "center", behavior: "instant"}});
            const box = found[0].getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        before, place = None, self.until(find)
        while place != before:  # until it has stopped moving
            time.sleep(0.15)
            before, place = place, self.until(find)
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def write(self, text):
        """Type a text where the cursor is."""
        self.call("Input.insertText", text=text)
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Shift", code="ShiftLeft")

    def picture(self, path, *, whole=False):
        """Save what is seen, or the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self, deadline, waiting_for):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise NoBrowserError(f"Chromium does not answer {waiting_for}")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _look_at(self, event):
        about = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"].get("exception", about)))
        elif event.get("method") == "Runtime.consoleAPICalled" and about["type"] == "error":
            self.complaints.append(str(about["args"]))
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
