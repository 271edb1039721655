"""A stand-in of a GPU's two streams on a CPU, whose work runs as late and in as bad an order as the
events allow.

What is queued on either lane is kept. ``DelayedStreams`` runs one piece of it after the other, from
a lane that a function chooses; a lane that waits for an event stands still until the other has
reached it. A step computes at once on a CPU, so before it everything on its own lane must have run,
and of the side lane only what its events demand: the rest stays for later steps. So a wait that is
missing lets a transfer read what is not there yet, or write over what is still needed, and the
bytes are wrong.
"""

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.memory.streams import Streams
from fairlead_runtime.scheduling.plan import Work

# Of so many lanes, which goes on.
Choose = Callable[[int], int]


class Event:
    def __init__(self) -> None:
        self.came = False

    def come(self) -> None:
        self.came = True


class DelayedLane:
    """``streams.Lane``: entries are work, or an event to wait for."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object] | Event] = deque()

    def run(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.queue.append(event.come)
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event)

    @property
    def stands(self) -> bool:
        """Whether nothing is left, or what is waits for another lane."""
        return not self.queue or (isinstance(self.queue[0], Event) and not self.queue[0].came)

    def go_on(self) -> None:
        entry = self.queue.popleft()
        if not isinstance(entry, Event):
            entry()


class DelayedStreams:
    """Two lanes, and when they run."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._steps, self._side = DelayedLane(), DelayedLane()
        self.lanes = Streams(self._steps, self._side)

    @property
    def delayed(self) -> int:
        """Entries of the side lane that have not run."""
        return len(self._side.queue)

    def catch_up(self) -> None:
        """A step follows: all that was queued before it on its lane runs."""
        while self._steps.queue:
            ready = [lane for lane in (self._steps, self._side) if not lane.stands]
            if not ready:
                raise AssertionError("each lane waits for the other")
            ready[self._choose(len(ready))].go_on()

    def some_run(self) -> None:
        """While a step computes, the side lane goes on for as long as it happens to."""
        while not self._side.stands and self._choose(2):
            self._side.go_on()


class DelayedCache(CacheStorage):
    """A cache as on a GPU, on delayed streams. ``piece_bytes``: of the staging buffer's pieces."""

    def __init__(
        self, *arguments: Any, choose: Choose, piece_bytes: int = 1 << 14, **options: Any
    ) -> None:
        self.delayed = DelayedStreams(choose)
        with patch("fairlead_runtime.sizing.offload_space.PIECE_BYTES", piece_bytes):
            super().__init__(*arguments, streams=self.delayed.lanes, **options)

    def copy(self, work: Work) -> None:
        self.delayed.some_run()
        super().copy(work)
        self.delayed.catch_up()
