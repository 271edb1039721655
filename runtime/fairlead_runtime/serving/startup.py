"""What a start has done so far: the seconds of each part, and how far the present one is.

Owns the measurement and its words. The parts are named in ``settings.startup_parts``.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fairlead_runtime.serving import wire
from fairlead_runtime.settings.startup_parts import PARTS, Part

TELL_SECONDS = 0.1  # between two messages about one part
_WORDS = {"self_test": "self-test"}
_GIB = 2**30


class Startup:
    """A start whose process is ``age`` seconds old. ``now``: the machine's monotonic clock, in
    seconds.
    """

    def __init__(self, age: float = 0.0, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._since = now() - age
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._ended_at: float | None = None
        self.part: Part = "imports"
        self.done = self.total = 0

    def reach(self, part: Part, done: int = 0, total: int = 0, *, at: float | None = None) -> None:
        """The start is in ``part`` since ``at`` (None: now), or further in it. A part that comes
        again goes on. Ignored once the start has ended.
        """
        if self._ended_at is not None:
            return
        if part != self.part:
            self._close(self._now() if at is None else at)
            self.part = part
        self.done, self.total = min(done, total), total

    def end(self) -> None:
        """The server is ready; a second call does nothing."""
        if self._ended_at is None:
            self._ended_at = self._now()
            self._close(self._ended_at)
            self.done = self.total = 0

    def _close(self, at: float) -> None:
        at = max(at, self._since)
        self._seconds[self.part] += at - self._since
        self._since = at

    @property
    def ended(self) -> bool:
        return self._ended_at is not None

    @property
    def elapsed(self) -> float:
        """Seconds of the whole start, until now while it lasts."""
        return (self._now() if self._ended_at is None else self._ended_at) - self._began

    @property
    def seconds(self) -> Mapping[Part, float]:
        """The seconds of each part, in the order of PARTS, with those of the present one."""
        if self._ended_at is not None:
            return dict(self._seconds)
        running = max(0.0, self._now() - self._since)
        return {**self._seconds, self.part: self._seconds[self.part] + running}

    @property
    def as_dict(self) -> dict[str, Any]:
        """The body of /debug/startup."""
        return {
            "ready": self.ended,
            "phase": "" if self.ended else self.part,
            "done": self.done,
            "total": self.total,
            "seconds": {part: round(value, 3) for part, value in self.seconds.items()},
            "elapsed": round(self.elapsed, 3),
            "uptime": round(self._now() - self._began, 3),
        }

    def line(self) -> str:
        """What it does now, on one line."""
        name = _WORDS.get(self.part, self.part)
        return f"Starting: {name}{self._progress()} {self.seconds[self.part]:.1f} s"

    def summary(self) -> str:
        """The parts that took time, in words."""
        parts = (
            f"{_WORDS.get(part, part)} {value:.1f} s"
            for part, value in self.seconds.items()
            if value >= 0.05
        )
        return ", ".join(parts)

    def _progress(self) -> str:
        if not self.total:
            return ""
        if self.part in ("download", "weights"):
            return f", {self.done / _GIB:.2f} of {self.total / _GIB:.2f} GiB,"
        return f", layer {self.done} of {self.total},"


class Teller:
    """The Report of the engine's process: a message to the other one for each part, and within a
    part at most one each TELL_SECONDS.
    """

    def __init__(
        self,
        send: Callable[[wire.Progress], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._now = send, now
        self._part = ""
        self._told = 0.0

    def __call__(self, part: Part, done: int = 0, total: int = 0, /) -> None:
        now = self._now()
        if part == self._part and now - self._told < TELL_SECONDS:
            return
        self._part, self._told = part, now
        with suppress(OSError):  # the other process is gone: what comes next finds out
            self._send(wire.Progress(part, done, total, now))
