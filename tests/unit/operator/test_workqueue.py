"""The queue: one worker per key, no lost wake, no tight loop. Its times are shortened."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from fairlead_operator.workqueue import LONGEST_WAIT, WorkQueue


async def running(queue: WorkQueue[str], until: Callable[[], bool], workers: int = 4) -> None:
    task = asyncio.create_task(queue.run(workers))
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110 - conditions of several kinds
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_several_wakes_are_one_pass() -> None:
    passes: Counter[str] = Counter()

    async def work(key: str) -> None:
        passes[key] += 1

    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(work, settle=0.01)
        for _ in range(50):
            queue.wake("a")
            queue.wake("b")
        await running(queue, lambda: len(queue) == 0)

    asyncio.run(main())
    assert passes == {"a": 1, "b": 1}


def test_a_key_is_never_worked_on_twice_at_once_and_a_wake_meanwhile_is_one_more_pass() -> None:
    active: Counter[str] = Counter()
    passes: Counter[str] = Counter()

    async def main() -> None:
        async def work(key: str) -> None:
            active[key] += 1
            assert active[key] == 1
            if passes[key] == 0:
                for _ in range(3):
                    queue.wake(key)
            await asyncio.sleep(0.01)
            passes[key] += 1
            active[key] -= 1

        queue: WorkQueue[str] = WorkQueue(work, settle=0.001)
        queue.wake("a")
        await running(queue, lambda: passes["a"] == 2 and len(queue) == 0)

    asyncio.run(main())
    assert passes["a"] == 2


class VirtualTime:
    """A clock that jumps to the time at which the queue's next key is due."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def run(self, queue: WorkQueue[str], until: Callable[[], bool]) -> None:
        task = asyncio.create_task(queue.run(4))
        async with asyncio.timeout(60):
            while not until():
                await asyncio.sleep(0)
                if not queue._active and queue._due:
                    self.now = max(self.now, min(queue._due.values()))
                    queue._rescheduled.set()
        # More than once: wait_for of Python 3.11 drops a cancellation that meets its result.
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


def test_a_failing_key_backs_off_alone_and_wakes_do_not_shorten_the_wait() -> None:
    clock = VirtualTime()
    passes: dict[str, list[float]] = {"bad": [], "good": []}

    async def main() -> None:
        async def work(key: str) -> float | None:
            passes[key].append(clock.now)
            queue.wake("bad")
            if key == "bad":
                raise ValueError("no")
            return 0.01

        queue: WorkQueue[str] = WorkQueue(work, settle=0.001, clock=clock, rng=random.Random(1))
        queue.wake("bad")
        queue.wake("good")
        await clock.run(queue, lambda: len(passes["bad"]) == 5)

    asyncio.run(main())
    waits = [after - before for before, after in itertools.pairwise(passes["bad"])]
    for wait, longest in zip(waits, (0.5, 1, 2, 4), strict=True):
        assert 0.75 * longest <= wait <= longest, waits
    assert len(passes["good"]) > 100, "the other key ran all the time"


def test_after_a_success_the_back_off_starts_over() -> None:
    clock = VirtualTime()
    passes: list[float] = []

    async def main() -> None:
        async def work(key: str) -> float | None:
            passes.append(clock.now)
            if len(passes) in {1, 2, 3, 5}:
                raise ValueError("no")
            return 0.01 if len(passes) == 4 else None

        queue: WorkQueue[str] = WorkQueue(work, settle=0.0, clock=clock, rng=random.Random(1))
        queue.wake("a")
        await clock.run(queue, lambda: len(queue) == 0)

    asyncio.run(main())
    assert len(passes) == 6
    assert passes[4] - passes[3] == pytest.approx(0.01)
    assert passes[5] - passes[4] <= 0.5, "the first wait again"


def test_after_a_success_wakes_are_heard_as_before_the_failure() -> None:
    async def main() -> tuple[float, float]:
        clock = VirtualTime()
        failing = [True]

        async def work(key: str) -> float | None:
            if failing.pop():
                raise ValueError("no")
            return None

        queue: WorkQueue[str] = WorkQueue(work, settle=0.5, clock=clock, rng=random.Random(1))
        failing.insert(0, False)
        queue.wake("a")
        await clock.run(queue, lambda: not failing and len(queue) == 0)
        queue.wake("a", 5.0)
        queue.wake("a", 1.0)
        return queue._due["a"], clock.now

    due, now = asyncio.run(main())
    assert due == now + 1.0


@pytest.mark.parametrize("waits", [(2.0, 1.0), (1.0, 2.0)])
def test_of_two_wakes_during_a_pass_the_earlier_counts(waits: tuple[float, float]) -> None:
    clock = VirtualTime()
    passes: list[float] = []

    async def main() -> None:
        async def work(key: str) -> None:
            passes.append(clock.now)
            if len(passes) == 1:
                for wait in waits:
                    queue.wake(key, wait)

        queue: WorkQueue[str] = WorkQueue(work, settle=0.0, clock=clock)
        queue.wake("a")
        await clock.run(queue, lambda: len(queue) == 0)

    asyncio.run(main())
    assert passes == [0.0, 1.0]


def test_waits_grow_to_ten_seconds_and_honour_the_servers_wish() -> None:
    async def nothing(key: str) -> None: ...

    async def main() -> list[float]:
        now = [0.0]
        queue: WorkQueue[str] = WorkQueue(nothing, clock=lambda: now[0], rng=random.Random(2))
        waits = []
        for _ in range(12):
            queue._back_off("a", ValueError("no"))
            waits.append(queue._due["a"])
        error = ValueError("slow down")
        error.retry_after = 9.5  # type: ignore[attr-defined]
        queue.forget("a")
        queue._back_off("a", error)
        waits.append(queue._due["a"])
        return waits

    *growing, wished = asyncio.run(main())
    assert growing[0] <= 0.5
    assert max(growing) <= LONGEST_WAIT
    assert growing[-1] >= 0.75 * LONGEST_WAIT
    assert wished == 9.5


def test_work_may_ask_to_be_done_again() -> None:
    passes: Counter[str] = Counter()

    async def work(key: str) -> float | None:
        passes[key] += 1
        return 0.01 if passes[key] < 3 else None

    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(work, settle=0.001)
        queue.wake("a")
        await running(queue, lambda: len(queue) == 0)

    asyncio.run(main())
    assert passes["a"] == 3


def test_a_thousand_keys_are_all_served() -> None:
    passes: Counter[str] = Counter()

    async def work(key: str) -> None:
        passes[key] += 1
        await asyncio.sleep(0)

    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(work, settle=0.001)
        for index in range(1000):
            queue.wake(str(index))
        await running(queue, lambda: len(queue) == 0, workers=20)

    asyncio.run(main())
    assert len(passes) == 1000
