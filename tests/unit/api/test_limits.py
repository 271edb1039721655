"""Limits on one request's body and on the prompts that wait for a thread."""

import asyncio
import errno
import importlib
import threading
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message

from fairlead_runtime.front import limits, tls
from fairlead_runtime.front.deadline import TimedStream
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.limits import (
    BODY_RATE,
    BODY_SECONDS,
    RATE_SECONDS,
    BodyPace,
    ByteBudget,
    ClientDisconnected,
    PromptPool,
    read_body,
    while_connected,
)
from fairlead_runtime.sizing.traffic import BODY

JSON = (b"content-type", b"application/json")


def read(
    *parts: bytes | None, headers: tuple[tuple[bytes, bytes], ...] = (JSON,), most: int = BODY
) -> bytes:
    """The body from its parts; None: the client disconnects."""
    messages: Iterator[Message] = iter(
        {"type": "http.disconnect"}
        if part is None
        else {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)}
        for index, part in enumerate(parts)
    )

    async def receive() -> Message:
        return next(messages)

    return asyncio.run(read_body({"headers": headers}, receive, lambda _: None, most))


def status(*parts: bytes | None, **more: Any) -> int:
    with pytest.raises(ApiError) as refusal:
        read(*parts, **more)
    return refusal.value.status


def test_a_body_may_have_exactly_its_limit_in_any_number_of_parts() -> None:
    whole = b"x" * BODY
    assert read(whole[:-1], whole[-1:]) == whole
    assert status(whole, b"x") == 413
    assert read(whole, b"x", most=BODY + 1) == whole + b"x", "of a model with a longer context"
    assert status(whole, b"xy", most=BODY + 1) == 413


@pytest.mark.parametrize(
    ("length", "refused"),
    [(str(BODY).encode(), False), (str(BODY + 1).encode(), True), (b"9" * 4000, True)],
)
def test_a_length_beyond_the_limit_is_refused_before_the_body(
    length: bytes, *, refused: bool
) -> None:
    headers = (JSON, (b"content-length", length))
    if refused:
        assert status(headers=headers) == 413
    else:
        assert read(b"{}", headers=headers) == b"{}"


def test_only_plain_json_is_read() -> None:
    assert read(b"{}", headers=((b"content-type", b"Application/JSON; charset=utf-8"),)) == b"{}"
    assert read(b"{}", headers=(JSON, (b"content-encoding", b"Identity"))) == b"{}"
    assert status(b"{}", headers=((b"content-type", b"text/plain"),)) == 415
    assert status(b"{}", headers=()) == 415
    assert status(b"{}", headers=(JSON, (b"content-encoding", b"gzip"))) == 415


def test_a_client_that_leaves_within_its_body_gets_no_answer() -> None:
    with pytest.raises(ClientDisconnected):
        read(b"{", None)


def given_up(rate: float, *, until: float = float("inf"), whole: int = BODY) -> float | None:
    """When a body of ``whole`` bytes that arrives at ``rate`` bytes a second ``until`` then is
    given up; None: it arrives.
    """
    pace, size, now = BodyPace(1000.0), 0, 1000.0
    while size < whole:
        came = 1 / 8 if now - 1000.0 < until else float("inf")
        if now + came > pace.due:
            return pace.due - 1000.0
        now, size = now + came, size + int(rate * came)
        assert pace.arrived(size, now) == pace.due
    return None


@pytest.mark.parametrize("rate", [23 * 1024, 256 * 1024, 1e9])
def test_a_large_body_on_a_slow_link_is_read(rate: float) -> None:
    assert given_up(rate) is None


def test_a_body_that_holds_its_place_is_given_up_by_its_rate() -> None:
    assert given_up(0) == RATE_SECONDS
    assert given_up(900) == RATE_SECONDS
    assert given_up(100 * 1024, until=2) == 2 + RATE_SECONDS, "however much came before"
    (fast_enough,) = {given_up(2 * BODY_RATE)}
    assert fast_enough is not None
    assert BODY_SECONDS < fast_enough < BODY_SECONDS + 3, "not for as long as it likes"


def test_a_body_of_a_long_context_has_little_more_time_than_a_short_one() -> None:
    assert given_up(170 * 1024, whole=8 * BODY) is None
    late = given_up(100 * 1024, whole=8 * BODY)
    assert late is not None
    assert BODY_SECONDS + 64 < late < BODY_SECONDS + 64 + 14


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RATE_SECONDS", 0.01)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ApiError) as refusal:
        asyncio.run(read_body({"headers": (JSON,)}, receive, lambda _: None))
    assert refusal.value.status == 408


def test_work_ends_with_its_client() -> None:
    async def go() -> None:
        left, cancelled = asyncio.Event(), asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            left.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(ClientDisconnected):
            await while_connected(receive, work())
        assert cancelled.is_set()

    asyncio.run(go())


def test_a_budget_is_shared_and_gets_its_bytes_back_after_a_failure_too() -> None:
    budget = ByteBudget(10, "full; retry")
    with budget.hold() as first, budget.hold() as second:
        first(4)
        first(2)
        second(4)
        with pytest.raises(ApiError) as refusal:
            second(1)
        assert (refusal.value.status, refusal.value.code) == (429, "queue_full")

    def fail() -> None:
        with budget.hold() as take:
            take(10)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    with budget.hold() as take:
        take(10)


def test_work_in_the_pool_leaves_the_event_loop_free() -> None:
    async def go() -> None:
        pool, begun, release = PromptPool(workers=1), threading.Event(), threading.Event()

        def work(body: bytes) -> bytes:
            begun.set()
            release.wait()
            return body

        first = asyncio.create_task(pool.run(None, work, b"first"))
        await asyncio.to_thread(begun.wait)
        second = asyncio.create_task(pool.run(None, work, b"second"))
        await asyncio.sleep(0)
        release.set()
        assert [await first, await second] == [b"first", b"second"]
        pool.close()

    asyncio.run(go())


def test_a_time_out_of_the_send_is_not_the_deadline_of_the_request() -> None:
    class Broken:
        request_id = "r"

        async def forward(self, _: Any) -> None:
            raise TimeoutError(errno.ETIMEDOUT, "the socket's")

    class Endless(Broken):
        async def forward(self, _: Any) -> None:
            await asyncio.Event().wait()

    async def go(stream: Any, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        await TimedStream(stream, deadline).forward(lambda _: None)

    with pytest.raises(TimeoutError, match="the socket's"):
        asyncio.run(go(Broken(), 600.0))
    with pytest.raises(ApiError, match="timeout"):
        asyncio.run(go(Endless(), 0.0))


def test_tls_without_its_bound_on_the_buffer_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(SSLProtocol, "max_size")
    with pytest.raises(RuntimeError, match="bounds TLS's buffer by another name"):
        importlib.reload(tls)
