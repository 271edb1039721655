"""Limits on one request and on all together: bytes, seconds and threads.

Owns the reading of a body under its limits, the watch for a client that disconnects, the budgets
of bytes that all requests share, and the pool in which prompts are parsed, rendered and tokenized.
``connection`` has the connection's limits.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from starlette.types import Receive, Scope

from fairlead_runtime.child.threads import be_nicer
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.turns import TenantExecutor
from fairlead_runtime.sizing.traffic import ALL_BODIES, BODY

# For a whole body: these seconds, and one more for each LINK_RATE bytes of its first BODY bytes and
# for each LONG_RATE bytes of the rest. BODY may take 94 s, which is 22 KiB/s, a slow mobile link;
# 16 MiB, for a million tokens, 108 s. To keep ALL_BODIES full with bodies that slow, a client must
# send more than 0.5 MiB/s.
BODY_SECONDS = 30.0
LINK_RATE, LONG_RATE = 32 * 1024, 1024 * 1024
# Less than this, over RATE_SECONDS, is no link but a client that holds its place.
BODY_RATE = 1024  # bytes a second
RATE_SECONDS = 10.0
POOL_WORKERS = 2
POOL_NICE = 10  # so much nicer are they: the engine and the event loop go first
TEMPLATE = b'"chat_template"'
LARGE_BODY = 32 * 1024  # bytes; its text is tokenized by another process, and others do not wait
POOL_SECONDS = 30.0  # for a prompt, from the last byte of its body, the wait for a thread included
ENCODE_NICE = 1  # of the thread that encodes log-probabilities, for which readers wait
ENCODE_SECONDS = 10.0  # for one piece
# Of all log-probabilities that answers hold: together, of one token, and of each entry of a token.
ANSWER_BYTES = 128 * 1024 * 1024
TOKEN_BYTES = 256
LOGPROB_BYTES = 160

Params = ParamSpec("Params")
Value = TypeVar("Value")


class ClientDisconnected(Exception):  # noqa: N818 - not an error: no client is left to get one
    """The client closed its connection before the answer was complete."""


class ByteBudget:
    """Bytes that all requests share. ``full`` is the message of the refusal when they are taken."""

    def __init__(self, size: int, full: str) -> None:
        self._size = self._free = size
        self._full = full

    @property
    def taken_bytes(self) -> int:
        return self._size - self._free

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Call the result with each number of bytes to take; all are given back at the end. It
        raises ApiError 429 when fewer are free.
        """
        request_bytes = 0

        def take(size: int) -> None:
            nonlocal request_bytes
            if size > self._free:
                headers = {"retry-after": "1", "connection": "close"}
                raise ApiError(429, self._full, code="queue_full", headers=headers)
            self._free -= size
            request_bytes += size

        try:
            yield take
        finally:
            self._free += request_bytes


class LogprobBytes(NamedTuple):
    """``tokens`` whose log-probabilities an answer holds, each with its own and the ``top``
    likeliest. ``count_formula`` shows how their number comes about, ``param`` is the field.
    """

    param: str
    count_formula: str
    tokens: int
    top: int

    @property
    def size(self) -> int:
        return self.tokens * (TOKEN_BYTES + (self.top + 1) * LOGPROB_BYTES)

    @property
    def formula(self) -> str:
        bytes_per_token = (
            f"({TOKEN_BYTES} + ({self.top} + 1) log-probabilities * {LOGPROB_BYTES} bytes)"
        )
        return f"{self.count_formula} * {bytes_per_token}"


def answer_bytes(chunks: Sequence[LogprobBytes]) -> int:
    """The bytes to hold for the log-probabilities of one answer.

    Raises ApiError 400 when that is more than those of all answers may take together.
    """
    needed = sum(chunk.size for chunk in chunks)
    if needed > ANSWER_BYTES:
        largest = max(chunks, key=lambda chunk: chunk.size)
        formula = " + ".join(chunk.formula for chunk in chunks)
        raise ApiError(
            400,
            f"{largest.param}: {formula} = {needed} bytes, but all answers that are held whole "
            f"may take {ANSWER_BYTES}: lower max_tokens, n or the log-probabilities, send shorter "
            "prompts, or stream a completion",
            param=largest.param,
        )
    return needed


class BodyPace:
    """How long a body may take. ``due``: when it is given up unless more of it, or its end, arrives
    before; ``late`` says why then. Times in seconds.
    """

    def __init__(self, began: float) -> None:
        self._began = self._enough_at = began
        self._enough = self._size = 0  # bytes, at the last time of enough of them, and now

    def arrived(self, size: int, now: float) -> float:
        """``size`` bytes of the body are there. Returns ``due``."""
        self._size = size
        if size - self._enough >= BODY_RATE * RATE_SECONDS:
            self._enough, self._enough_at = size, now
        return self.due

    @property
    def due(self) -> float:
        return min(self._enough_at + RATE_SECONDS, self._began + self._allowed)

    @property
    def late(self) -> str:
        if self._enough_at + RATE_SECONDS <= self._began + self._allowed:
            return f"less than {BODY_RATE} bytes of the body arrived a second: send it faster"
        return f"the body did not arrive within {self._allowed:.0f} s: send it faster"

    @property
    def _allowed(self) -> float:
        first = min(self._size, BODY)
        return BODY_SECONDS + first / LINK_RATE + (self._size - first) / LONG_RATE


async def read_body(
    scope: Scope, receive: Receive, take: Callable[[int], None], most: int = BODY
) -> bytes:
    """The request's JSON bytes. Keeps at most ``most`` and one message of them in memory.
    ``take`` is called with the bytes of each message, from the first until a worker has read all.

    Raises ApiError 413, 408 or 415, and ClientDisconnected.
    """
    _check_headers(scope, most)
    body = bytearray()
    now = asyncio.get_running_loop().time
    pace = BodyPace(now())
    try:
        async with asyncio.timeout_at(pace.due) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > most:
                    raise _too_large(most)
                take(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
                limit.reschedule(pace.arrived(len(body), now()))
    except TimeoutError:
        raise ApiError(408, pace.late, headers={"connection": "close"}) from None


def _check_headers(scope: Scope, most: int) -> None:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "send the body as JSON with the header Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "send the body without a Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > most:
        raise _too_large(most)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", headers={"connection": "close"})


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
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_large(body: bytes) -> bool:
    """Whether its text is tokenized by another process."""
    return len(body) > LARGE_BODY


def waits_apart(body: bytes) -> bool:
    """Whether no other request may wait for its work: it is large, or brings a template, which is a
    program of the client's.
    """
    return is_large(body) or TEMPLATE in body


class PromptPool:
    """A few threads for work that would block the event loop, and the budgets of all requests.
    ``seconds``: for one prompt.
    """

    def __init__(
        self,
        workers: int = POOL_WORKERS,
        max_bytes: int = ALL_BODIES,
        seconds: float = POOL_SECONDS,
    ) -> None:
        self._executor = ThreadPoolExecutor(
            workers, thread_name_prefix="prepare", initializer=lambda: be_nicer(POOL_NICE)
        )
        self._large = TenantExecutor("prepare-large", lambda: be_nicer(POOL_NICE))
        self._encoder = ThreadPoolExecutor(
            1, thread_name_prefix="encode", initializer=lambda: be_nicer(ENCODE_NICE)
        )
        self._seconds = seconds
        self.bodies = ByteBudget(max_bytes, "too many prompts are being read; retry")
        self.answers = ByteBudget(
            ANSWER_BYTES,
            f"answers with log-probabilities that are held whole take {ANSWER_BYTES} bytes "
            "together; retry, or stream a completion",
        )

    async def run(
        self,
        tenant: str | None,
        work: Callable[Concatenate[bytes, Params], Value],
        body: bytes,
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Value:
        """Run ``work`` on a body in a thread; one that ``waits_apart`` waits for such ones only, of
        which the tenants' take turns. Raises what it raises, and ApiError 429 when it takes too
        long, waiting included; work that has begun goes on to its end.
        """
        late = f"the prompt was not read and tokenized within {self._seconds:g} s: retry"
        if waits_apart(body):
            future = self._large.submit(tenant or "", lambda: work(body, *args, **kwargs))
        else:
            future = self._executor.submit(work, body, *args, **kwargs)
        return await _within(self._seconds, future, late, 429)

    async def encode(
        self, work: Callable[Params, Value], *args: Params.args, **kwargs: Params.kwargs
    ) -> Value:
        """Run ``work`` on a part of an answer in a thread. Raises what it raises, and ApiError 503
        when it takes too long.
        """
        late = f"the answer was not encoded within {ENCODE_SECONDS:g} s: retry"
        return await _within(ENCODE_SECONDS, self._encoder.submit(work, *args, **kwargs), late, 503)

    def close(self) -> None:
        self._large.close()
        for executor in (self._executor, self._encoder):
            executor.shutdown(wait=False, cancel_futures=True)


async def _within(seconds: float, future: "Future[Value]", late: str, status: int) -> Value:
    """The future's result; ApiError with the message ``late`` when it comes too late."""
    result = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({result}, timeout=seconds)
        if not done:
            raise ApiError(status, late, code="too_late", headers={"retry-after": "1"})
        return result.result()
    finally:
        result.cancel()
