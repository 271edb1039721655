"""Pages are mapped ahead of the steps that write there, between steps only, and not all at once."""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_runtime.device.memory import page_mapping
from fairlead_runtime.device.memory.page_mapping import PAGE, PIECE, PageMapper
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import group_layers

UNIT = PIECE // 2  # bytes of a unit in one layer
SLOTS, UNITS = 2, 16


class Watch:
    """Counts what the thread does, and lets a test wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.pieces = self.rests = 0
        self.may_map = threading.Event()
        self.may_map.set()

    def count(self, name: str) -> None:
        with self._changed:
            setattr(self, name, getattr(self, name) + 1)
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, timeout=60)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    populate = page_mapping._populate

    def counted(address: int, size: int) -> bool:
        assert watch.may_map.wait(60)
        done = populate(address, size)
        watch.count("pieces")
        return done

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        watch.count("rests")

    monkeypatch.setattr(page_mapping, "_populate", counted)
    monkeypatch.setattr(
        page_mapping, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    )
    return watch


def lazy() -> torch.Tensor:
    """[SLOTS, UNITS, bytes of a unit], mapped nowhere."""
    return torch.from_numpy(np.zeros((SLOTS, UNITS, UNIT), dtype=np.uint8))


def resident(tensor: torch.Tensor, slot: int) -> list[bool]:
    """By unit, whether a page in its middle is mapped."""
    libc, seen = ctypes.CDLL(None), (ctypes.c_ubyte * 1)()
    found = []
    for unit in range(UNITS):
        middle = tensor[slot, unit].data_ptr() + UNIT // 2
        assert libc.mincore(ctypes.c_void_p(middle // PAGE * PAGE), ctypes.c_size_t(1), seen) == 0
        found.append(bool(seen[0] & 1))
    return found


def test_pages_are_mapped_so_far_ahead_of_the_highest_unit_and_no_further(watch: Watch) -> None:
    tensors = (lazy(), lazy())
    pages = PageMapper(tensors, ahead=4 * UNIT * SLOTS * len(tensors))
    watch.wait(lambda: watch.pieces == 2 * SLOTS * len(tensors))  # a piece has two units
    pages.begin(5)
    pages.end()
    watch.wait(lambda: watch.pieces == 5 * SLOTS * len(tensors))
    # large pages may reach one unit further
    for tensor in tensors:
        for slot in range(SLOTS):
            assert all(resident(tensor, slot)[:10])
    assert not any(resident(tensors[1], SLOTS - 1)[13:])
    pages.close()
    pages.thread.join(60)
    assert watch.pieces == 5 * SLOTS * len(tensors)


def test_nothing_is_mapped_while_a_step_runs(watch: Watch) -> None:
    tensors = (lazy(),)
    watch.may_map.clear()  # else it may have mapped all before the step begins
    pages = PageMapper(tensors)
    pages.begin(0)
    watch.may_map.set()
    rests = watch.rests
    watch.wait(lambda: watch.rests >= rests + 5)
    assert watch.pieces <= 1  # one may have begun
    pages.end()
    pages.thread.join(60)
    assert watch.pieces == SLOTS * UNITS // 2
    assert all(resident(tensors[0], 0))


def test_what_is_there_stays() -> None:
    tensor = lazy()
    tensor[:, ::2] = 7
    PageMapper((tensor,)).thread.join(60)
    assert (tensor[:, ::2] == 7).all()
    assert not tensor[:, 1::2].any()


def test_a_large_cache_is_mapped_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(4, 2, 64, 64, torch.float32)
    blocks = page_mapping.SMALLEST // CacheStorage.unit_bytes(group_layers([None]), heads, 16)

    def storage(units: int) -> CacheStorage:
        return CacheStorage(
            group_layers([None]), heads, units=units, block_size=16, device=torch.device("cpu")
        )

    assert storage(blocks - 1)._pages is None
    cache = storage(blocks)
    pages = cache._pages
    assert pages is not None
    keys = weakref.ref(cache.tensors[0].untyped_storage())
    running = []
    with cache.step(()):
        running.append(pages._running)
    running.append(pages._running)
    assert running == [True, False]
    tops: list[int] = []
    monkeypatch.setattr(pages, "begin", tops.append)
    state = Sequence(0, Request("a", (1,), SamplingParams(), 1), 0, [1])
    state.tables, state.states = [[3, 5]], [[9, 1], [2, 4]]
    with cache.step([Row(state, 0, 1, True)]):
        assert tops == [9], "a state's units lie in any order"
    monkeypatch.undo()
    pages.begin(0)
    del cache
    pages.thread.join(60)
    assert not pages.thread.is_alive()
    assert keys() is None


def test_a_system_that_cannot_map_ahead_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_mapping, "MADV_POPULATE_WRITE", 999)
    pages = PageMapper((lazy(),))
    pages.thread.join(60)
    assert not pages.thread.is_alive()
    pages.begin(UNITS - 1)
    pages.end()
