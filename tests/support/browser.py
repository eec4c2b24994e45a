"""A headless Chromium that is spoken to over a pipe: opens pages at a width, in light or dark, and moves the pointer."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def find_browser():
    """Return the path of a browser; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(folder):
    """Start a browser with a profile in a folder and yield a Browser."""
    to_read, to_write = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-sync"]
    # Chromium reads commands from descriptor 3 and replies on 4.
    words = [find_browser(), *options, *offline, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    script = f'exec 3<&{to_read[0]} 4>&{to_write[1]}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words], pass_fds=(to_read[0], to_write[1]), stderr=subprocess.DEVNULL
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        with os.fdopen(to_read[1], "wb", buffering=0) as commands, os.fdopen(to_write[0], "rb") as answers:
            yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(30)


class Browser:
    """One page of a browser."""

    def __init__(self, commands, answers):
        self._commands, self._answers, self._numbers, self._session = commands, answers, itertools.count(1), None
        self.messages = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Return the result of a command of the DevTools protocol; notices on the way are kept."""
        number = next(self._numbers)
        words = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            words["sessionId"] = self._session
        self._commands.write(json.dumps(words).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, *, width, height=900, scheme="light"):
        """Open a file at a width and in a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.messages.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(message["method"] == "Page.loadEventFired" for message in self.messages):
            self._read()

    def evaluate(self, expression):
        """Return the value of JavaScript, which the page itself could not run."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def hover(self, x, y):
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, *, is_whole=True):
        """Write a picture of the page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self):
        """Return the next message."""
        parts = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts += byte
        message = json.loads(parts)
        if "method" in message:
            self.messages.append(message)
        return message
