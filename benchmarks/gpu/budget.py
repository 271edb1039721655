"""The time of a whole benchmark: what does not fit any more is left out, and said."""

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class LeftOutError(Exception):
    """A part cannot run here; the message says why."""


class Budget:
    """``seconds`` from now on. ``left_out``: the reasons by the names of parts that did not run or
    failed, of each of which ``tell`` is told.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.tell: Callable[[str, str], object] = lambda _name, _reason: None
        self._ends = now() + seconds
        self.left_out: dict[str, str] = {}

    @property
    def left(self) -> float:
        return self._ends - self._now()

    def run(self, name: str, needs: float, work: Callable[[], Result]) -> Result | None:
        """What ``work`` returns; None where less than ``needs`` seconds are left, or it fails."""
        if self.left < needs:
            self._note(name, f"{max(0.0, self.left):.0f} s are left, it needs about {needs:.0f}")
            return None
        try:
            return work()
        except LeftOutError as error:
            self._note(name, str(error))
        except Exception as error:  # noqa: BLE001 - the other parts are still wanted
            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
            self._note(name, f"{type(error).__name__}: {text}")
        return None

    def _note(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self.tell(name, reason)
        print(f"left out: {name}: {reason}", flush=True)
