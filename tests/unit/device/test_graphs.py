"""Which sizes steps are padded to, which graphs are kept, and that the stand-in of graphs catches
what a GPU would not forgive.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fairlead_runtime.device.step.graph_cache import IDLE_STEPS, GraphCache
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.graph_sizes import step_sizes
from support.graph_standin import TapeRecorder


@pytest.mark.parametrize(
    ("most", "interval", "expected"),
    [
        (1, 64, (1,)),
        (5, 64, (1, 2, 4, 8)),
        (256, 64, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)),
        (100, 48, (1, 2, 4, 8, 16, 32, 48, 96, 144)),
        (3, 1, (1, 2, 3)),
        (7, 3, (1, 2, 3, 6, 9)),
        # An interval of 16: with one of 8 there were 35.
        (256, 1, (1, 2, 4, 8, *range(16, 257, 16))),
        (32, 1, tuple(range(1, 33))),
    ],
)
def test_steps_are_padded_to_few_sizes(most: int, interval: int, expected: tuple[int, ...]) -> None:
    config = EngineConfig(max_requests=most, q_padding_interval=interval)
    assert step_sizes(config) == expected


def test_where_fewer_graphs_are_kept_there_are_fewer_sizes_but_the_powers_of_two() -> None:
    for most in (1, 2, 5, 9):
        config = EngineConfig(max_requests=256, max_cached_graphs=most)
        assert step_sizes(config) == tuple(1 << i for i in range(9))


class Spy:
    """A recorder, and its graphs, that write down what happens."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seen: list[str] = []

    def record(self, step: Callable[[], object]) -> "Spied":
        return Spied(self.seen)


class Spied:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.name = f"graph {sum(x.startswith('graph') for x in seen) + 1}"
        seen.append(self.name)

    def replay(self) -> None:
        self.seen.append(f"replay {self.name}")

    def reset(self) -> None:
        self.seen.append(f"drop {self.name}")


def test_a_step_runs_once_and_is_replayed_from_then_on() -> None:
    spy = Spy()
    cache = GraphCache(spy, 2)
    for key in ("a", "a", "b", "a"):
        cache.run(key, functools.partial(spy.seen.append, key))
    assert spy.seen == ["a", "graph 1", "replay graph 1", "b", "graph 2", "replay graph 1"]


def test_the_least_recently_used_graph_makes_room_once_it_is_idle() -> None:
    spy = Spy()
    cache = GraphCache(spy, 2)
    for key in ("a", "b", "a", "c"):  # b is not idle yet: c runs as it is
        cache.run(key, functools.partial(spy.seen.append, key))
    assert "drop graph 2" not in spy.seen
    for _ in range(IDLE_STEPS):
        cache.run("a", lambda: None)
    del spy.seen[:]
    cache.run("c", lambda: spy.seen.append("c"))
    assert spy.seen == ["c", "graph 1", "drop graph 2"]  # the last of a pool is never dropped
    cache.run("a", lambda: None)
    assert spy.seen[-1] == "replay graph 1"
    cache.clear()
    assert len(cache) == 0


def test_a_graph_that_is_replayed_is_in_use() -> None:
    spy = Spy()
    cache = GraphCache(spy, 1)
    for key in ("a",) * (IDLE_STEPS + 2) + ("b", "b"):
        cache.run(key, functools.partial(spy.seen.append, key))
    assert spy.seen[-2:] == ["b", "b"]
    assert "drop graph 1" not in spy.seen


def test_without_room_every_step_runs_as_it_is() -> None:
    spy = Spy()
    cache = GraphCache(spy, 0)
    for _ in range(3):
        cache.run("a", lambda: spy.seen.append("a"))
    assert spy.seen == ["a"] * 3


def test_after_a_capture_that_fails_none_is_tried() -> None:
    class Refusing(Spy):
        def record(self, step: Callable[[], object]) -> "Spied":
            self.seen.append("tried")
            raise RuntimeError("no\nway")

    spy = Refusing()
    cache = GraphCache(spy, 4)
    for key in "abc":
        cache.run(key, lambda: spy.seen.append("ran"))
    assert spy.seen == ["ran", "tried", "ran", "ran"]
    assert cache.failure == "RuntimeError: no way"


# -- the stand-in of graphs

X, Y = torch.arange(4.0), torch.zeros(4)


def recorder(*kept: Tensor) -> TapeRecorder:
    return TapeRecorder(lambda: kept)


def test_a_replay_reads_its_inputs_anew_and_python_never() -> None:
    x, y, factor = torch.ones(4), torch.zeros(4), 2.0

    def step() -> None:
        y.copy_(x * factor)

    tape = recorder(x, y).record(step)
    assert y.tolist() == [0] * 4  # recording changes nothing
    factor = 3.0
    x.fill_(5)
    tape.replay()
    assert y.tolist() == [10] * 4


def test_a_tensor_that_nobody_keeps_is_refused() -> None:
    y = torch.zeros(4)

    def step() -> None:
        y.copy_(torch.from_numpy(X.numpy() + 1))

    with pytest.raises(RuntimeError, match="nobody keeps"):
        recorder(y).record(step)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: X.sum().item(),
        X.nonzero,
        lambda: X[X > 1],
        lambda: int(X.max()),
        lambda: torch.equal(X, Y),
    ],
)
def test_a_wait_for_the_device_is_refused(wait: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        recorder(X, Y).record(lambda: (wait(), None)[1])


def test_what_a_step_made_cannot_be_read_after_the_record() -> None:
    x, y, found = torch.ones(4), torch.zeros(4), list[Tensor]()

    def step() -> None:
        found.append(x * 2)
        y.copy_(found[0])

    tape = recorder(x, y).record(step)
    assert found[0].isnan().all()
    tape.replay()
    assert (found[0].tolist(), y.tolist()) == ([2] * 4, [2] * 4)
