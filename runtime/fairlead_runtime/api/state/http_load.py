"""What the HTTP process does by itself, for its metrics: connections, bytes it holds for requests,
and how late its event loop is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.serving.measurements import Histogram
from fairlead_runtime.settings import metric_names as names

LAG_SECONDS = 0.25  # between two looks at the event loop


class HttpLoad:
    """``connections`` has, by port, a function that counts the open ones."""

    def __init__(self, pool: PromptPool, connections: Mapping[str, Callable[[], int]]) -> None:
        self.loop_lag = Histogram(names.LAG_BUCKETS)
        self._pool = pool
        self._connections = connections

    @property
    def connections(self) -> dict[str, int]:
        return {port: count() for port, count in self._connections.items()}

    @property
    def body_bytes(self) -> int:
        return self._pool.bodies.taken_bytes

    @property
    def logprob_bytes(self) -> int:
        return self._pool.answers.taken_bytes

    async def watch_loop(
        self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> NoReturn:
        """Measure without end how much later than asked for the event loop wakes this task."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await sleep(LAG_SECONDS)
            self.loop_lag.add(max(0.0, loop.time() - due))
