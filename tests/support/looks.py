"""Looks at something again and again while a test does something else."""

import threading
from collections.abc import Callable
from typing import Self


class Looks:
    """What ``look`` returned, every so many seconds in a thread of its own while the block runs."""

    def __init__(self, look: Callable[[], int], every: float = 0.2) -> None:
        self._look, self._every = look, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[int] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.seen.append(self._look())
