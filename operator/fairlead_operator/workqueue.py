"""A keyed queue: one worker at a time handles a key, and wakes meanwhile cause one more pass.

Owns when a key is due, including the back-off after a failure.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0


class WorkQueue(Generic[K]):
    """A queue of keys. ``work(key)`` returns the seconds until the key is due again, or None."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        settle: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._work, self._settle, self._clock = work, settle, clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter of retries, not security
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._active: dict[
            K, float | None
        ] = {}  # value: when it is due again, if it was woken meanwhile
        self._failures: dict[K, int] = {}
        self._rescheduled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due) + len(self._active)

    def wake(self, key: K, after: float | None = None) -> None:
        """Make the key due, by default after ``settle`` seconds, so that several causes become one
        pass.

        The earlier of two wakes counts, but no wake shortens the back-off after a failure.
        """
        due = self._clock() + (self._settle if after is None else after)
        if key in self._active:
            woken_for = self._active[key]
            self._active[key] = due if woken_for is None else min(woken_for, due)
        elif key in self._due and (key in self._failures or self._due[key] <= due):
            return
        else:
            self._schedule(key, due)

    def forget(self, key: K) -> None:
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def run(self, workers: int) -> None:
        """Work until cancelled, on at most ``workers`` keys at a time."""
        free_workers = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await free_workers.acquire()
                key = await self._next()
                self._active[key] = None
                group.create_task(self._serve(key)).add_done_callback(
                    lambda _: free_workers.release()
                )

    def _schedule(self, key: K, due: float) -> None:
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._rescheduled.set()

    async def _next(self) -> K:
        while True:
            wait: float | None = None
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)  # rescheduled or forgotten since
                    continue
                wait = due - self._clock()
                if wait <= 0:
                    heapq.heappop(self._heap)
                    del self._due[key]
                    return key
                break
            self._rescheduled.clear()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._rescheduled.wait()

    async def _serve(self, key: K) -> None:
        requeue_after: float | None = None
        failure: Exception | None = None
        try:
            requeue_after = await self._work(key)
        except Exception as error:  # noqa: BLE001 - one resource's failure must not stop the others
            failure = error
        woken_for = self._active.pop(key)
        if failure is not None:
            self._back_off(key, failure)
            return
        self._failures.pop(key, None)
        if requeue_after is not None:
            self.wake(key, requeue_after)
        if woken_for is not None:
            self.wake(key, woken_for - self._clock())

    def _back_off(self, key: K, error: Exception) -> None:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(count, 8)) * self._rng.uniform(0.75, 1.0)
        wait = max(wait, getattr(error, "retry_after", 0.0))
        log.warning(
            "pass failed, retrying in %.1f s",
            wait,
            extra={"key": str(key), "error": str(error)[:1024]},
        )
        self._schedule(key, self._clock() + wait)
