"""Limits on one request: bytes, seconds and threads.

Owns the reading of a body under its limits, the watch for a client that disconnects, and the
bounded pool in which prompts are parsed, rendered and tokenized. ``connection`` has the
connection's limits.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.types import Receive, Scope

from fairlead_runtime.api.errors import ApiError

MAX_BODY = 2 * 1024 * 1024  # bytes
BODY_SECONDS = 30.0  # for a whole body
POOL_WORKERS = 2
POOL_NICE = 10  # so much nicer are they: the engine and the event loop go first
# Of bodies that wait for a worker; the limit on connections bounds their number.
POOL_BYTES = 64 * 1024 * 1024

Params = ParamSpec("Params")
Value = TypeVar("Value")


class ClientDisconnected(Exception):  # noqa: N818 - not an error: no client is left to get one
    """The client closed its connection before the answer was complete."""


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The request's JSON bytes. Keeps at most MAX_BODY and one message of them in memory.

    Raises ApiError 413, 408 or 415, and ClientDisconnected.
    """
    _check_headers(scope)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        reason = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, reason, headers={"connection": "close"}) from None


def _check_headers(scope: Scope) -> None:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "send the body as JSON with the header Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "send the body without a Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > MAX_BODY:
        raise _too_large()


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is larger than {MAX_BODY} bytes", headers={"connection": "close"}
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Run ``work``, and cancel it at once when the client disconnects. Raises ClientDisconnected
    then, else what ``work`` raises.

    The body must have been read: the next message of ``receive`` is then the disconnect.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _go_last() -> None:
    """Give this thread a lower priority; on Linux each thread has its own."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + POOL_NICE)


class PromptPool:
    """A few threads for work that would block the event loop, with a limit on the bytes that wait
    for them.
    """

    def __init__(self, workers: int = POOL_WORKERS, max_bytes: int = POOL_BYTES) -> None:
        self._executor = ThreadPoolExecutor(
            workers, thread_name_prefix="prepare", initializer=_go_last
        )
        self._free_bytes = max_bytes

    async def run(
        self,
        work: Callable[Concatenate[bytes, Params], Value],
        body: bytes,
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Value:
        """Run ``work`` on ``body``. Raises ApiError 429 when too many bytes wait already, else what
        ``work`` raises.
        """
        if self._free_bytes < len(body):
            message = "too many prompts wait to be tokenized; retry"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self._free_bytes -= len(body)
        try:
            return await asyncio.wrap_future(self._executor.submit(work, body, *args, **kwargs))
        finally:
            self._free_bytes += len(body)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
