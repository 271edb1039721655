"""The thread in which text is made, off the event loop: detokenizing and stop texts.

Owns the thread, the batches for it and their deadline. A batch holds what all waiting readers get
in one turn of the event loop, so a step costs one hop to the thread and one back, however many
tokens it has. There is one thread, so each stream's outputs keep their order.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fairlead_runtime.child.threads import be_nicer
from fairlead_runtime.outputs import TextLate

log = logging.getLogger("fairlead.service")

TEXT_SECONDS = 10.0  # from the moment at which a reader could get the text
TEXT_NICE = 1  # the engine and the event loop go first

EventsT = TypeVar("EventsT")
MadeT = TypeVar("MadeT")


class Source(Protocol[EventsT, MadeT]):
    """A reader for whom text is made. The thread calls ``make`` only, the event loop the others."""

    def take(self) -> EventsT:
        """The events whose text is made now."""
        ...

    def make(self, events: EventsT) -> MadeT: ...
    def deliver(self, outputs: MadeT) -> None: ...
    def fail(self, error: Exception) -> None:
        """Take the error of ``make``; called in place of ``deliver``."""
        ...


@dataclass(slots=True, eq=False)
class _Job(Generic[EventsT, MadeT]):
    source: Source[EventsT, MadeT]
    events: EventsT
    outputs: MadeT | None = None
    error: Exception | None = None
    late: bool = False


class TextThread:
    """``late`` is called with each source whose text was not made in time, after its ``fail``."""

    def __init__(self, late: Callable[[Any], None], seconds: float = TEXT_SECONDS) -> None:
        self._late = late
        self._seconds = seconds
        self._ready: list[Source[Any, Any]] = []
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="text", initializer=lambda: be_nicer(TEXT_NICE)
        )

    def make(self, source: Source[Any, Any]) -> None:
        """Make the text of its events, with that of all others of this turn of the event loop."""
        self._ready.append(source)
        if len(self._ready) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _send(self) -> None:
        ready, self._ready = self._ready, []
        jobs = [_Job(source, source.take()) for source in ready]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._give_up, jobs)

        def work() -> None:
            for job in jobs:
                _run(job)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._return, jobs, timer)

        self._executor.submit(work)

    def _return(self, jobs: list[_Job[Any, Any]], timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        for job in jobs:
            if job.late:
                continue
            if job.error is None:
                job.source.deliver(job.outputs)
            else:
                job.source.fail(job.error)

    def _give_up(self, jobs: list[_Job[Any, Any]]) -> None:
        for job in jobs:
            job.late = True
            job.source.fail(
                TextLate(f"the text of the answer was not made within {self._seconds:g} s: retry")
            )
            self._late(job.source)


def _run(job: _Job[Any, Any]) -> None:
    if job.late:
        return
    try:
        job.outputs = job.source.make(job.events)
    except Exception as error:
        log.exception("the text of an answer could not be made")
        job.error = error
