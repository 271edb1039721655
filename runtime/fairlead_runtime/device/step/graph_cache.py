"""Captured steps: which are kept, and how one is recorded and replayed.

Owns the interface of a recorder and of what it records, and the cache of graphs, least recently
used first. ``cuda_graphs`` records on NVIDIA GPUs; tests have a
recorder that replays on a CPU. Knows nothing of rows or tokens.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from fairlead_kernels.interface.not_available import fall_back

log = logging.getLogger("fairlead.graphs")

# Steps that a graph must have been out of use before another takes its place: capturing takes as
# long as many steps, and more keys than graphs would otherwise capture in each of them.
IDLE_STEPS = 1000


class Graph(Protocol):
    """One recorded step: work on fixed addresses of the device."""

    def replay(self) -> None:
        """Queue the work again. It reads its inputs where the recorded step read them."""
        ...

    def reset(self) -> None:
        """Give back what the graph alone holds. It is not replayed any more."""
        ...


class Recorder(Protocol):
    """Records steps. ``nbytes``: device memory that all records took so far, as measured."""

    nbytes: int

    def record(self, step: Callable[[], object]) -> Graph:
        """What ``step`` queues on the device, without running it. The step must have run before,
        must not wait for the device, and all tensors that it did not make itself must live as long
        as the graph, at their addresses.
        """
        ...


class GraphCache:
    """At most ``limit`` graphs, by key; one more while it takes another's place."""

    def __init__(self, recorder: Recorder, limit: int) -> None:
        self._recorder = recorder
        self.limit = limit
        self._graphs: OrderedDict[Hashable, tuple[Graph, int]] = OrderedDict()
        self._steps = 0
        self.failure = ""  # why nothing is recorded any more

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        return self._recorder.nbytes

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Replay the graph of ``key``; if there is none, run the step itself, and record it where
        there is room or another has been idle. Raises what the step raises.
        """
        self._steps += 1
        cached = self._graphs.pop(key, None)
        if cached is not None:
            self._graphs[key] = cached[0], self._steps
            cached[0].replay()
            return
        step()
        if not self.failure and self._has_room():
            self._record(key, step)
        # Afterwards: graphs share one pool of memory, into which torch captures no other once all
        # that were there are gone.
        while len(self._graphs) > self.limit:
            self._drop(next(iter(self._graphs)))

    def clear(self, which: Callable[[Any], bool] = lambda _key: True) -> None:
        """Drop all graphs, or those of ``which`` keys."""
        for key in [key for key in self._graphs if which(key)]:
            self._drop(key)

    def _has_room(self) -> bool:
        if len(self._graphs) < self.limit:
            return True
        _, used = next(iter(self._graphs.values()), (None, self._steps))
        return self._steps - used >= IDLE_STEPS

    def _drop(self, key: Hashable) -> None:
        self._graphs.pop(key)[0].reset()

    def _record(self, key: Hashable, step: Callable[[], object]) -> None:
        try:
            self._graphs[key] = self._recorder.record(step), self._steps
        except Exception as error:  # noqa: BLE001 - the step itself has run, and goes on without
            fall_back(error)
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.warning("no further CUDA graph is captured: %s", self.failure)
