"""Debian's headless Chromium, driven through its DevTools protocol over a pipe.

https://chromedevtools.github.io/devtools-protocol: messages are JSON, each ended by a zero byte.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or ""
MISSING = "no Chromium: apt-get install chromium-headless-shell"
WITHIN = 120.0  # seconds; a limit for a hung browser, long enough for a busy machine


class Tab:
    """A page. ``events`` has all messages that are no answers, in order."""

    def __init__(self, reading: int, writing: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._writing = writing
        self._session: str | None = None
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as pipe:
            rest = b""
            while part := pipe.read1(1 << 16):
                *messages, rest = (rest + part).split(b"\0")
                with self._changed:
                    for text in messages:
                        message = json.loads(text)
                        if "id" in message:
                            self._answers[message["id"]] = message
                        else:
                            self.events.append(message)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._numbers), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(
                lambda: message["id"] in self._answers or self._ended, WITHIN
            ), f"no answer to {method}"
        answer = self._answers.pop(message["id"], {"error": "the browser ended"})
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")

    def value(self, expression: str) -> Any:
        """What the script gives in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until the expression is true, looked at with each frame."""
        self.value(
            "new Promise((done) => { const look = () => "
            f"({condition}) ? done(true) : requestAnimationFrame(look); look(); }})"
        )

    def screenshot(self, width: int, height: int, *, scheme: str) -> bytes:
        """A PNG of the page in this size, in the color scheme ``light`` or ``dark``."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        # Two frames: the page draws again in the first.
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def tab() -> Iterator[Tab]:
    """A page in a browser of its own, which ends with the block."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    renamed = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'

    # A browser that was killed may leave processes that still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [
                *("bash", "-c", renamed, "bash"),
                CHROMIUM,
                "--headless",
                "--no-sandbox",  # it needs user namespaces, which a container may not have
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-background-networking",
                f"--user-data-dir={Path(profile) / 'profile'}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        )
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        try:
            page = Tab(ours_in, ours_out)
            yield page
            page.close()
            browser.wait(WITHIN)
        finally:
            browser.kill()
            browser.wait()
            os.close(ours_out)
