"""Units cross to host memory and back exactly, however late the side stream is and whatever the
order in which two streams run.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.plain.copy_blocks import gather_blocks, scatter_blocks
from fairlead_runtime.device.memory import host_memory
from fairlead_runtime.device.memory.offloading import Offload, _Run, _runs
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.memory.streams import cuda_streams
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import group_layers
from support.full import LONG_FORM
from support.stream_standin import DelayedCache

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 8, 8, torch.float32)
# Rows that are no whole number of eight bytes, and keys and values of different sizes.
ODD = Heads(3, 3, 5, 7, torch.bfloat16, fp8_cache=True)
UNITS, HOST = 7, 5


def first(_count: int) -> int:
    """The lane of the steps goes on while it can."""
    return 0


def last(count: int) -> int:
    """The side lane goes on while it can."""
    return count - 1


def storage(
    choose: Callable[[int], int] = first, heads: Heads = HEADS, piece_units: int = 1, **sizes: int
) -> DelayedCache:
    groups = group_layers([None, 8, None])
    return DelayedCache(
        groups,
        heads,
        device=CPU,
        block_size=4,
        choose=choose,
        piece_bytes=piece_units * CacheStorage.unit_bytes(groups, heads, 4),
        **{"units": UNITS, "host_units": HOST, **sizes},
    )


def stamp(cache: CacheStorage, unit: int, generator: random.Random) -> None:
    """A step writes the unit."""
    for part in cache.tensors:
        raw = part.view(torch.uint8)[:, unit]
        seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=seed))


def contents(cache: CacheStorage, unit: int) -> tuple[bytes, bytes]:
    keys, values = (
        part[:, unit].contiguous().view(torch.uint8).numpy().tobytes() for part in cache.tensors
    )
    return keys, values


@pytest.mark.parametrize("seed", range(6))
def test_a_full_staging_buffer_goes_both_ways_and_loses_nothing(seed: int) -> None:
    """Whatever runs first: pieces of one unit, and more units than pieces in each step."""
    choose = (first, last)[seed] if seed < 2 else random.Random(seed).randrange
    cache, written = storage(choose), random.Random(1)
    for unit in range(UNITS):
        stamp(cache, unit, written)
    for number in range(6):
        was = [contents(cache, unit) for unit in range(UNITS)]
        cache.copy(Work(2 * number, offload=[(unit, HOST - 1 - unit) for unit in range(HOST)]))
        for unit in range(HOST):
            stamp(cache, unit, written)
        back = [(host, host + 1) for host in range(HOST)]
        cache.copy(Work(2 * number + 1, restore=back))
        for host, unit in back:
            assert contents(cache, unit) == was[HOST - 1 - host]


@pytest.mark.parametrize("part", [1 << 30, 1000, 300])
def test_no_transfer_lies_in_two_parts_of_host_memory(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA registers them one by one: also a unit may lie in two."""
    monkeypatch.setattr(host_memory, "SEGMENT", part)
    cache, written = storage(first, piece_units=4), random.Random(1)
    offload = cache._offload
    assert isinstance(offload, Offload)
    base, size = offload._memory.data.data_ptr(), offload._memory.nbytes
    assert size > 2 * 1000
    crossed: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def spy(x: torch.Tensor, source: torch.Tensor, **how: bool) -> torch.Tensor:
        for one in (x, source):
            if base <= one.data_ptr() < base + size:
                begin = one.data_ptr() - base
                crossed.append((begin, begin + one.nbytes))
        return copy(x, source, **how)

    for unit in range(UNITS):
        stamp(cache, unit, written)
    was = [contents(cache, unit) for unit in range(UNITS)]
    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    cache.copy(Work(0, offload=[(unit, unit) for unit in range(HOST)]))
    cache.copy(Work(1, restore=[(host, host + 1) for host in range(HOST)]))
    assert [contents(cache, host + 1) for host in range(HOST)] == was[:HOST]
    assert all(begin // part == (end - 1) // part for begin, end in crossed)
    assert sum(end - begin for begin, end in crossed) == 2 * size
    if part > size:
        assert len(crossed) < 4 * HOST, "neighbours cross together where no part ends"


def test_a_step_does_not_wait_for_what_leaves_until_the_staging_buffer_is_full() -> None:
    """Of five units each of four pieces takes one."""
    cache = storage(first)
    cache.copy(Work(0, offload=[(unit, unit) for unit in range(4)]))
    assert cache.delayed.delayed == 3 * 4, "a wait, the transfer and its event, for each piece"
    cache.copy(Work(1, offload=[(4, 4)]))
    assert cache.delayed.delayed == 3 * 4, "the first crossed to make room for the fifth"


def test_a_restore_lets_what_left_before_arrive_first() -> None:
    cache = storage(first)
    stamp(cache, 3, random.Random(0))
    before = contents(cache, 3)
    cache.copy(Work(0, offload=[(3, 2)]))
    assert cache.delayed.delayed
    cache.copy(Work(1, restore=[(2, 6)]))
    assert contents(cache, 6) == before
    assert not cache.delayed.delayed


@pytest.mark.parametrize("choose", [first, last])
def test_one_step_offloads_restores_and_copies_a_unit_in_this_order(
    choose: Callable[[int], int],
) -> None:
    cache = storage(choose)
    for unit in range(UNITS):
        stamp(cache, unit, random.Random(unit))
    was = [contents(cache, unit) for unit in range(UNITS)]
    cache.copy(Work(0, offload=[(3, 0)]))
    cache.copy(Work(1, offload=[(1, 1)], restore=[(0, 1)], copies=[(1, 4)]))
    assert [contents(cache, unit) for unit in (1, 4)] == [was[3], was[3]]
    cache.copy(Work(2, restore=[(1, 0)]))
    assert contents(cache, 0) == was[1]


def test_neighbours_cross_together() -> None:
    assert list(_runs([(0, 5), (1, 6), (2, 7), (3, 9), (4, 8), (6, 9)])) == [
        _Run(0, 5, 3),
        _Run(3, 9, 1),
        _Run(4, 8, 1),
        _Run(6, 9, 1),
    ]
    assert list(_runs([])) == []


@pytest.mark.parametrize("width", [16, 5])
def test_gathered_blocks_lie_one_behind_the_other_and_go_back(width: int) -> None:
    cache = torch.randint(0, 256, (3, 6, 2, width), dtype=torch.uint8)
    blocks, staged = torch.tensor([4, 0, 5]), torch.zeros(3, 3, 2 * width, dtype=torch.uint8)
    gather_blocks(cache, blocks, staged)
    assert torch.equal(staged.view(3, 3, 2, width), cache[:, [4, 0, 5]].transpose(0, 1))
    other = torch.zeros_like(cache)
    scatter_blocks(staged, blocks, other)
    assert torch.equal(other[:, [4, 0, 5]], cache[:, [4, 0, 5]])
    assert not other[:, [1, 2, 3]].any()


def test_cudas_lanes_are_the_current_stream_and_one_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, ...]] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = "side" if isinstance(name, torch.device) else name

        def wait_event(self, event: Any) -> None:
            log.append((self.name, "waits for", event.name))

    class Event:
        def record(self, stream: Stream) -> None:
            self.name = f"an event of {stream.name}"

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        log.append(("enter", stream.name))
        yield
        log.append(("leave", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream("current"))
    steps, side = cuda_streams(torch.device("cuda"))
    steps.run(lambda: log.append(("kernel",)))
    side.wait(steps.record())
    side.run(lambda: log.append(("transfer",)))
    steps.wait(side.record())
    assert log == [
        ("kernel",),
        ("side", "waits for", "an event of current"),
        ("enter", "side"),
        ("transfer",),
        ("leave", "side"),
        ("current", "waits for", "an event of side"),
    ]


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    """Steps as a scheduler makes them: host units are taken when free and freed by a restore, units
    may be offloaded, restored into and copied in one step.
    """
    full: dict[int, None] = {}
    free = list(range(HOST))
    works = []
    for number in range(draw(st.integers(1, 8))):
        gone = draw(st.lists(st.integers(0, UNITS - 1), unique=True, max_size=len(free)))
        offload = [(unit, free.pop(draw(st.integers(0, len(free) - 1)))) for unit in gone]
        back = draw(st.lists(st.sampled_from(sorted(full)), unique=True)) if full else []
        into = draw(st.permutations(range(UNITS)))
        restore = list(zip(back, into, strict=False))
        full |= dict.fromkeys(host for _, host in offload)
        for host, _ in restore:
            del full[host]
            free.append(host)
        sources = draw(st.lists(st.integers(0, UNITS - 1), max_size=3))
        targets = draw(st.permutations(range(UNITS)))
        copies = [(a, b) for a, b in zip(sources, targets, strict=False) if a != b]
        works.append(Work(number, offload=offload, restore=restore, copies=copies))
    return works


@pytest.mark.parametrize("heads", [HEADS, ODD])
def test_any_steps_move_every_byte_in_any_order_of_two_streams(heads: Heads) -> None:
    @settings(max_examples=1500 if LONG_FORM else 60, deadline=None, derandomize=not LONG_FORM)
    @given(
        works=steps(),
        rng=st.randoms(use_true_random=False),
        piece_units=st.integers(1, 3),
        late=st.booleans(),
    )
    def any_steps(works: list[Work], rng: random.Random, piece_units: int, *, late: bool) -> None:
        cache = storage(first if late else rng.randrange, heads, piece_units)
        written = random.Random(1)
        device = {}
        host: dict[int, tuple[bytes, bytes]] = {}
        for unit in range(UNITS):
            stamp(cache, unit, written)
            device[unit] = contents(cache, unit)
        for work in works:
            host |= {to: device[unit] for unit, to in work.offload}
            device |= {unit: host.pop(of) for of, unit in work.restore}
            device |= {to: device[unit] for unit, to in work.copies}
            cache.copy(work)
            assert {unit: contents(cache, unit) for unit in range(UNITS)} == device
            for unit, _ in work.offload:  # whoever has it now writes there at once
                stamp(cache, unit, written)
                device[unit] = contents(cache, unit)
        cache.copy(Work(len(works), restore=list(zip(host, range(UNITS), strict=False))))
        assert [contents(cache, unit) for unit in range(len(host))] == list(host.values())

    any_steps()
