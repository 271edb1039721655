"""What one request may take of the server: bytes, seconds and threads.

Owns the reading of a body under its limits, the watch for a client that leaves, and the bounded
pool in which prompts are parsed, rendered and tokenized. The connection's own limits are in
``protocol``.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.types import Receive, Scope

from fairlead_runtime.api.errors import ApiError

MAX_BODY = 2 * 1024 * 1024  # bytes
BODY_SECONDS = 30.0  # for a whole body, however it trickles
POOL_WORKERS = 2
POOL_BYTES = (
    64 * 1024 * 1024
)  # of bodies that may wait for a worker; their number is bounded by the connections

Params = ParamSpec("Params")
Value = TypeVar("Value")


class ClientGone(Exception):  # noqa: N818 - it is no error: nobody is left to be told
    """The client closed its connection before the answer was complete."""


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The request's JSON bytes, never more than MAX_BODY of them in memory.

    Raises ApiError 413, 408 or 415, and ClientGone.
    """
    _check_headers(scope)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        late = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, late, headers={"connection": "close"}) from None


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
    """Run ``work`` and cancel it at once when the client goes. Raises ClientGone then, else what
    ``work`` raises.

    The body must have been read: what ``receive`` still gives is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Pool:
    """A few threads for work that would hold up the event loop, with a bound on the bytes that wait
    for them.
    """

    def __init__(self, workers: int = POOL_WORKERS, room: int = POOL_BYTES) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="prepare")
        self._room = room

    async def run(
        self,
        work: Callable[Concatenate[bytes, Params], Value],
        body: bytes,
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Value:
        """``work`` of ``body``. Raises ApiError 429 when too much waits already, else what ``work``
        raises.
        """
        if self._room < len(body):
            message = "too many prompts wait to be tokenized"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self._room -= len(body)
        try:
            return await asyncio.wrap_future(self._executor.submit(work, body, *args, **kwargs))
        finally:
            self._room += len(body)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
