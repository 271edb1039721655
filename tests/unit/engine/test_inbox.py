"""The engine's queue: what may wait, and how it is counted."""

import threading
from contextlib import suppress

import pytest

from fairlead_runtime.engine.inbox import Add, Bounds, Inbox
from fairlead_runtime.engine.progress import StepProgress
from fairlead_runtime.outputs import EngineDead, QueueFull
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.sizing.traffic import Bound


class Queue:
    """An inbox with its clock; ``add`` a request of a number of prompt tokens. ``waiting``: prompt
    tokens that may wait.
    """

    def __init__(self, max_queue: int, free_slots: int, waiting: int = 2048) -> None:
        self.now, self.made = 0.0, 0
        tokens = Bound(waiting, "{max_queue} of the test")
        bounds = Bounds(max_queue, 60.0, free_slots, 64, 16, 1024, tokens)
        self.inbox = Inbox(bounds, StepProgress(lambda: self.now), lambda: self.now)

    def add(self, tokens: int = 1, *, n: int = 1, bounded: bool = True) -> None:
        self.made += 1
        request = Request(
            str(self.made), (0,) * tokens, SamplingParams(n=n), max_tokens=1, seed=self.made
        )
        self.inbox.add(request, lambda _: bytearray(), bounded=bounded)

    def after_step(self, **more: object) -> None:
        state = {
            "queued": 0,
            "tokens": 0,
            "choices": 0,
            "oldest": None,
            "free_slots": 0,
            "working": False,
            **more,
        }
        self.inbox.after_step(**state)  # type: ignore[arg-type]  # the types are those of the call


def test_as_many_wait_as_may_besides_those_that_start() -> None:
    queue = Queue(max_queue=2, free_slots=1)
    for _ in range(3):
        queue.add()
    with pytest.raises(QueueFull, match="2 requests wait already"):
        queue.add()
    assert queue.inbox.take() is not None
    with pytest.raises(QueueFull):
        queue.add()  # taken out, and without a step yet
    queue.after_step(free_slots=1)
    queue.add()


def test_eight_choices_wait_for_each_request_that_may_and_a_lone_request_whatever_it_asks() -> None:
    queue = Queue(max_queue=2, free_slots=0)
    queue.add(n=128)
    with pytest.raises(QueueFull, match=r"128 choices wait already; 1 more exceed 16 "):
        queue.add()
    assert queue.inbox.take() is not None
    with pytest.raises(QueueFull):
        queue.add()  # taken out, and without a step yet
    queue.after_step(queued=1, choices=12)
    with pytest.raises(QueueFull, match=r"12 choices wait already; 5 more exceed 16"):
        queue.add(n=5)
    queue.add(n=4)
    assert queue.inbox.take() is not None
    queue.after_step(queued=2, choices=12, free_slots=1)
    queue.add(n=5)


def test_a_prompt_is_hashed_by_its_sender_and_only_where_it_may_wait() -> None:
    queue = Queue(max_queue=1, free_slots=0)
    senders: list[int] = []

    def hash_prompt(_: Request) -> bytearray:
        senders.append(threading.get_ident())
        return bytearray(b"digest")

    def send() -> None:
        request = Request("r", (0,), SamplingParams(), max_tokens=1)
        with suppress(QueueFull):
            queue.inbox.add(request, hash_prompt, bounded=True)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert senders == [threads[0].ident]
    message = queue.inbox.take()
    assert isinstance(message, Add)
    assert message.hashes == b"digest"


def test_a_request_whose_engine_gives_up_while_it_is_hashed_is_refused() -> None:
    queue = Queue(max_queue=1, free_slots=0)

    def hash_prompt(_: Request) -> bytearray:
        assert queue.inbox.close("it gave up") == []
        return bytearray()

    request = Request("r", (0,), SamplingParams(), max_tokens=1)
    with pytest.raises(EngineDead, match="it gave up"):
        queue.inbox.add(request, hash_prompt, bounded=True)


def test_a_request_whose_prompt_cannot_be_hashed_takes_no_place() -> None:
    queue = Queue(max_queue=1, free_slots=0)

    def hash_prompt(_: Request) -> bytearray:
        raise MemoryError

    request = Request("r", (0,) * 50, SamplingParams(), max_tokens=1)
    with pytest.raises(MemoryError):
        queue.inbox.add(request, hash_prompt, bounded=True)
    assert (queue.inbox.queued, queue.inbox._arriving_tokens) == (0, 0)
    queue.add()


def test_a_canary_passes_a_full_queue_and_takes_no_place_in_it() -> None:
    queue = Queue(max_queue=1, free_slots=0)
    queue.add(bounded=False)
    queue.add()
    queue.add(bounded=False)
    with pytest.raises(QueueFull):
        queue.add()
    assert queue.inbox.queued == 1


def test_prompt_tokens_count_while_they_wait_and_no_longer() -> None:
    queue = Queue(max_queue=1, free_slots=1)
    queue.add(2047)
    assert queue.inbox.take() is not None
    with pytest.raises(QueueFull, match=r"2 more exceed 2048 \(max_queue of the test\): retry"):
        queue.add(2)
    queue.add(1)
    assert queue.inbox.take() is not None
    queue.after_step(free_slots=1)
    queue.add(2047)
    queue.add(1)


def test_a_single_request_may_have_any_number_of_tokens() -> None:
    queue = Queue(max_queue=1, free_slots=0)
    queue.add(100_000)


@pytest.mark.parametrize(("waited", "seconds"), [(0.2, 1.0), (7.0, 7.0), (90.0, 60.0)])
def test_while_nobody_leaves_the_queue_a_client_retries_after_what_the_oldest_has_waited(
    waited: float, seconds: float
) -> None:
    queue = Queue(max_queue=0, free_slots=0)
    assert queue.inbox.retry_after() == 1.0
    queue.after_step(oldest=0.0)
    queue.now = waited
    with pytest.raises(QueueFull) as refusal:
        queue.add()
    assert refusal.value.retry_after == seconds


def fill(queue: Queue, requests: int) -> None:
    """Let them be taken out and wait."""
    for _ in range(requests):
        queue.add()
        assert queue.inbox.take() is not None


def test_a_refused_client_retries_when_the_queue_has_drained_at_its_measured_rate() -> None:
    queue = Queue(max_queue=12, free_slots=8)
    fill(queue, 20)
    queue.after_step(queued=12, oldest=0.0)  # eight found a free slot: that is no rate
    queue.now = 4.0
    assert queue.inbox.retry_after() == 4.0
    queue.after_step(queued=10, oldest=0.0)
    assert queue.inbox.retry_after() == 20.0, "two left in 4 s"
    fill(queue, 2)
    queue.now = 8.0
    queue.after_step(queued=6, oldest=0.0)
    assert queue.inbox.retry_after() == 6.0, "eight left in 8 s"
    queue.now = 16.0
    assert queue.inbox.retry_after() == 12.0, "nobody left since"


def test_a_queue_that_was_empty_is_measured_anew() -> None:
    queue = Queue(max_queue=9, free_slots=0)
    fill(queue, 4)
    queue.after_step(queued=4, oldest=0.0)
    queue.now = 1.0
    queue.after_step(queued=1, oldest=0.0)
    queue.after_step(queued=0)
    queue.now = 100.0
    fill(queue, 8)
    queue.after_step(queued=8, oldest=100.0)
    queue.now = 102.0
    queue.after_step(queued=7, oldest=100.0)
    assert queue.inbox.retry_after() == 14.0


def test_a_canary_that_had_its_step_has_not_left_the_queue() -> None:
    queue = Queue(max_queue=9, free_slots=0)
    fill(queue, 4)
    queue.after_step(queued=4, oldest=0.0)
    queue.add(bounded=False)
    assert queue.inbox.take() is not None
    queue.now = 3.0
    queue.after_step(queued=4, oldest=0.0)
    assert queue.inbox.retry_after() == 3.0


def test_a_closed_inbox_returns_what_waits_and_takes_no_more() -> None:
    queue = Queue(max_queue=9, free_slots=0)
    queue.add()
    queue.add(bounded=False)
    assert [request.id for request in queue.inbox.close("three faults")] == ["1", "2"]
    with pytest.raises(EngineDead, match="three faults"):
        queue.add()
    assert queue.inbox.take() is None
