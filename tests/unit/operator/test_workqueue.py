"""The queue: one worker per key, no lost wake, no tight loop. Its times are shortened."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

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


def test_a_failing_key_backs_off_alone_and_wakes_do_not_shorten_the_wait() -> None:
    passes: Counter[str] = Counter()
    now = [0.0]

    async def main() -> None:
        async def work(key: str) -> None:
            passes[key] += 1
            if key == "bad":
                raise ValueError("no")

        queue: WorkQueue[str] = WorkQueue(
            work, settle=0.0, clock=lambda: now[0], rng=random.Random(1)
        )

        def both_until(good: int) -> bool:
            queue.wake("bad")
            queue.wake("good")
            return passes["good"] >= good

        await running(queue, lambda: both_until(30))
        assert passes["bad"] == 1, "its clock stands still"
        now[0] = LONGEST_WAIT
        await running(queue, lambda: both_until(60))
        assert passes["bad"] == 2

    asyncio.run(main())


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
