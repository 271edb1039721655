"""The threads in which prompts are tokenized."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from fairlead_runtime.front import limits
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.limits import LARGE_BODY, POOL_NICE, PromptPool


def priority(_body: bytes = b"") -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_engine_and_the_event_loop_go_before_the_pool() -> None:
    before = priority()
    pool = PromptPool(workers=1)
    assert asyncio.run(pool.run(None, priority, b"")) == min(19, before + POOL_NICE)
    pool.close()
    assert priority() == before


def test_no_small_prompt_waits_for_a_large_one() -> None:
    pool, release = PromptPool(workers=1), threading.Event()

    async def go() -> None:
        large = bytes(LARGE_BODY + 1)
        waiting = [
            asyncio.create_task(pool.run(None, lambda _: release.wait(60), large)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        small = await pool.run(None, len, bytes(LARGE_BODY))
        assert (small, [each.done() for each in waiting]) == (LARGE_BODY, [False] * 3)
        release.set()
        assert await asyncio.gather(*waiting) == [True] * 3

    asyncio.run(go())
    pool.close()


class Holder:
    """A large prompt that holds its thread until ``release`` is set."""

    def __init__(self) -> None:
        self.release, self._began = threading.Event(), threading.Event()

    async def start(self, pool: PromptPool, tenant: str | None) -> asyncio.Task[None]:
        """Returns when it has the thread."""
        task = asyncio.create_task(pool.run(tenant, self._hold, bytes(LARGE_BODY + 1)))
        await asyncio.to_thread(self._began.wait, 60)
        return task

    def _hold(self, _: bytes) -> None:
        self._began.set()
        self.release.wait(60)


def test_tenants_take_turns_with_their_large_prompts() -> None:
    pool, holder = PromptPool(), Holder()
    done: list[str] = []

    async def go() -> None:
        def send(tenant: str | None, name: str) -> asyncio.Task[None]:
            work = pool.run(tenant, lambda _: done.append(name), bytes(LARGE_BODY + 1))
            return asyncio.create_task(work)

        first = await holder.start(pool, "a")
        waiting = [send("a", f"a{number}") for number in range(4)]
        await asyncio.sleep(0)
        waiting += [send("b", "b0"), send("b", "b1"), send(None, "none")]
        await asyncio.sleep(0)
        assert len(pool._large._works) == 7
        waiting[1].cancel()
        # What is cancelled holds its body no longer.
        while len(pool._large._works) > 6:  # noqa: ASYNC110 - the cancellation takes some turns
            await asyncio.sleep(0)
        holder.release.set()
        await asyncio.gather(first, *waiting, return_exceptions=True)

    asyncio.run(go())
    pool.close()
    assert done == ["a0", "b0", "none", "b1", "a2", "a3"]  # a1 was cancelled


def test_what_waits_when_the_pool_is_closed_is_not_begun() -> None:
    pool, holder = PromptPool(), Holder()
    done: list[str] = []

    async def go() -> None:
        running = await holder.start(pool, None)
        waits = pool.run(None, lambda _: done.append("begun"), bytes(LARGE_BODY + 1))
        waiting = asyncio.create_task(waits)
        await asyncio.sleep(0)
        pool.close()
        holder.release.set()
        await running
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(go())
    assert not done


def test_a_prompt_has_a_deadline_that_includes_its_wait_for_a_thread() -> None:
    pool, ran = PromptPool(workers=1, seconds=0.01), threading.Event()
    begun, release = threading.Event(), threading.Event()

    def hold(_: bytes) -> None:
        begun.set()
        release.wait(60)

    async def is_late(work: Callable[[bytes], None]) -> None:
        with pytest.raises(ApiError) as late:
            await pool.run(None, work, b"")
        assert (late.value.status, late.value.code) == (429, "too_late")
        assert "within 0.01 s" in late.value.message
        assert late.value.headers["retry-after"] == "1"

    async def go() -> None:
        await is_late(hold)
        pool._executor.submit(hold, b"")  # the first was too late to begin, if its thread was
        assert await asyncio.to_thread(begun.wait, 60)
        await is_late(lambda _: ran.set())

    asyncio.run(go())
    release.set()
    pool._executor.shutdown(wait=True)
    assert not ran.is_set(), "what waits too long is not begun"
    pool.close()


def test_a_part_of_an_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENCODE_SECONDS", 0.01)
    pool, release = PromptPool(), threading.Event()

    async def go() -> None:
        with pytest.raises(ApiError) as late:
            await pool.encode(release.wait, 60)
        assert (late.value.status, late.value.code) == (503, "too_late")

    asyncio.run(go())
    release.set()
    pool.close()
