"""The one way from the service to an engine: requests in, one list of events per step out.

Owns the protocol, and the form in which the engine runs in a thread of this process. The other form
runs it in a process of its own (``remote_engine``).
"""

import asyncio
import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.outputs import (
    CacheReset,
    CacheView,
    ChoiceEvent,
    EngineDead,
    EngineState,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics

log = logging.getLogger("fairlead.service")

ViewT = TypeVar("ViewT")
Deliver = Callable[[list[ChoiceEvent]], None]


class EngineLink(Protocol):
    """One engine as the service sees it. Every method is called on the event loop, and calls back
    on it.
    """

    @property
    def bounds(self) -> Bounds: ...

    def start(self, deliver: Deliver, ended: Callable[[str], None]) -> None:
        """Let the engine step. ``deliver`` gets the events of each step; ``ended`` is called once,
        with the reason, when the engine gives up or is lost, and nothing is delivered after it.
        """
        ...

    async def stop(self, max_wait: float) -> None:
        """End the engine after its current step, or after ``max_wait`` seconds."""
        ...

    def submit(self, request: Request, *, bounded: bool) -> None:
        """Queue a request; canaries pass ``bounded`` False. A full queue and a dead engine are
        raised (QueueFull, EngineDead) or delivered as the request's only event.
        """
        ...

    def abort(self, request_id: str, error: ServiceError | None = None) -> None:
        """End a request. Ignores unknown ids."""
        ...

    def finish(self, request_id: str, choice: int) -> None:
        """End a choice because its text contains a stop text. Ignores unknown ids."""
        ...

    def state(self) -> EngineState: ...

    async def requests(self) -> list[RequestView] | None:
        """A view of every live request; None when making the views failed. Waits for the running
        step.
        """
        ...

    async def cache(self, start: int) -> CacheView | None:
        """The map of the blocks from unit ``start`` on, or of WHOLE_CACHE, else as ``requests``."""
        ...

    async def reset_cache(self) -> CacheReset | None:
        """Evict all cached units that no request holds; else as ``requests``."""
        ...

    async def report(self) -> EngineReport: ...


class LocalEngine:
    """The engine in a thread of this process. ``measurements`` are those of its observer."""

    def __init__(self, engine: Engine, measurements: RequestMetrics | None = None) -> None:
        self._engine = engine
        self._measurements = measurements or RequestMetrics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def bounds(self) -> Bounds:
        return self._engine.bounds

    def start(self, deliver: Deliver, ended: Callable[[str], None]) -> None:
        settle_memory()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(deliver, ended), name="engine", daemon=True
        )
        self._thread.start()

    async def stop(self, max_wait: float) -> None:
        self._engine.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, max_wait)
        gc.unfreeze()

    def submit(self, request: Request, *, bounded: bool) -> None:
        if self._engine.dead_reason:
            raise EngineDead(self._engine.dead_reason)
        self._engine.submit(request, bounded=bounded)

    def abort(self, request_id: str, error: ServiceError | None = None) -> None:
        self._engine.abort(request_id, error=error)

    def finish(self, request_id: str, choice: int) -> None:
        self._engine.finish(request_id, choice)

    def state(self) -> EngineState:
        return self._engine.state()

    async def requests(self) -> list[RequestView] | None:
        return await self._inspected(self._engine.inspect)

    async def cache(self, start: int) -> CacheView | None:
        copy = await self._inspected(functools.partial(self._engine.copy_cache, start))
        return None if copy is None else await asyncio.to_thread(copy.view)

    async def reset_cache(self) -> CacheReset | None:
        return await self._inspected(self._engine.reset_cache)

    async def _inspected(
        self, inspect: Callable[[Callable[[ViewT | None], None]], None]
    ) -> ViewT | None:
        answer: asyncio.Future[ViewT | None] = asyncio.get_running_loop().create_future()

        def resolve(view: ViewT | None) -> None:
            if not answer.done():
                answer.set_result(view)

        inspect(lambda view: self._call_on_loop(resolve, view))
        return await answer

    async def report(self) -> EngineReport:
        return EngineReport(self._engine.snapshot(), self._measurements.read())

    def _run(self, deliver: Deliver, ended: Callable[[str], None]) -> None:
        """The engine's thread."""
        run_engine(self._engine, lambda events: self._call_on_loop(deliver, events))
        if self._engine.dead_reason:
            self._call_on_loop(ended, self._engine.dead_reason)

    def _call_on_loop(self, callback: Callable[..., None], *args: object) -> None:
        """Call ``callback`` on the event loop; do nothing when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)


def run_engine(engine: Engine, publish: Deliver) -> None:
    """Run the engine until it stops; however it ends otherwise, it has a ``dead_reason``."""
    try:
        engine.run(publish)
    except BaseException as error:
        log.exception("the engine thread ended")
        engine.dead_reason = f"the engine thread ended: {type(error).__name__}"


def settle_memory() -> None:
    """Keep the garbage collector from walking over the objects of the model and the libraries,
    which live as long as the process, and give back what reading them took: of a tokenizer several
    times its size.
    """
    release_memory()
    gc.freeze()
