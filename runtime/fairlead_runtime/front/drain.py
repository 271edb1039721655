"""The drain of a server: not ready at once, serving for a grace, refusing, and the end of streams.

Owns the order and the times. A signal ends the process after it; ``POST /drain`` does not, and can
be undone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import DrainResult

_CLOSE = (b"connection", b"close")
_log = logging.getLogger("fairlead.api")


class DrainTarget(Protocol):
    """What a server does when a drain says so. ``draining``: it is not ready."""

    draining: bool

    def begin_drain(self) -> None:
        """End readiness; new requests are still served."""

    def refuse_new(self) -> None:
        """Refuse new requests; those that were accepted go on."""

    def resume(self) -> None:
        """Be ready and serve new requests again."""

    async def answered(self) -> None:
        """Wait until every accepted request has its whole answer."""

    async def end_streams(self, timeout: float, waited: float) -> DrainResult:  # noqa: ASYNC109 - 0 is allowed, and its end is no error
        """Wait ``timeout`` seconds for running requests, then abort them; ``waited`` seconds went
        by before.
        """
        ...


class Drain:
    """``grace`` and ``timeout`` in seconds; the timeout counts from the end of the grace.
    ``close_idle`` closes the connections that wait for another request, at the end of the grace.

    Load balancers send requests for a while after a pod is not ready, so the grace applies to an
    idle server too.
    """

    def __init__(
        self,
        target: DrainTarget,
        *,
        grace: float,
        timeout: float,
        close_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._grace = grace
        self._timeout = timeout
        self._close_idle = close_idle
        self._task: asyncio.Task[DrainResult] | None = None
        self._process_ends = False
        self._hurried = asyncio.Event()  # the grace is over

    def skip_grace(self) -> None:
        """Serve no new requests from the start of the drain: only who ends the server would send
        any. A drain that is in its grace goes on without it.
        """
        self._grace = 0.0
        self._hurried.set()

    def begin(
        self, *, process_ends: bool = False, serving: bool = True
    ) -> "asyncio.Task[DrainResult]":
        """End readiness at once, and start the drain unless one runs. A signal handler may call
        it. ``serving``: whether requests are, for the log.
        """
        self._process_ends = self._process_ends or process_ends
        self._target.begin_drain()
        if self._task is None:
            if serving and self._grace:
                _log.info("draining: not ready, new requests are served for %g s", self._grace)
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def undo(self) -> None:
        """Serve again; streams that were cut stay cut. Raises ApiError 409 after a signal."""
        if self._process_ends:
            raise ApiError(409, "the process is ending; start another one", code="draining")
        self.cancel()
        self._target.resume()

    async def cut(self) -> DrainResult:
        """End the grace and the running streams now."""
        self.cancel()
        return await self._end_streams(0.0)

    def cancel(self) -> None:
        """Stop the drain where it is; its state stays."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> DrainResult:
        if self._grace:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await self._hurried.wait()
        return await self._end_streams(self._timeout)

    async def _end_streams(self, timeout: float) -> DrainResult:  # noqa: ASYNC109 - 0 is allowed, and its end is no error
        self._target.refuse_new()
        self._close_idle()
        _log.info("draining: new requests are refused")
        clock = asyncio.get_running_loop().time
        began = clock()
        # First what the service does not know: bodies that are read, answers that are sent.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._target.answered()
        waited = min(clock() - began, timeout)
        drained = await self._target.end_streams(timeout - waited, waited)
        _log.info("drained: %d requests finished, %d were aborted", *drained)
        return drained


class CloseWhileDraining:
    """Pure ASGI: closes each connection after its answer while the server drains, so that a client
    with a pool of connections sends its next request to another pod.
    """

    def __init__(self, app: ASGIApp, target: DrainTarget) -> None:
        self._app = app
        self._target = target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and self._target.draining:
                headers = [*message.get("headers", [])]
                message["headers"] = headers if _CLOSE in headers else [*headers, _CLOSE]
            await send(message)

        await self._app(scope, receive, answer)
