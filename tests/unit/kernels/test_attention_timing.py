"""The price of attention in words: the layers that see most, in the time of one of them."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fairlead_kernels.interface.attention import Heads, LayerKind, RaggedRows
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_kernels.proofs.attention_timing import LAYERS, timing
from support import flashinfer_standin, triton_standin

CPU = torch.device("cpu")
HEADS = Heads(8, 2, 64, 64, torch.float32)
FULL = LayerKind(0.125, softcap=30.0)
KINDS = (frozenset({LayerKind(0.125, window=64)}), frozenset({FULL, LayerKind(0.1)}))


def clock() -> Callable[[], float]:
    """A step's layers take a millisecond each."""
    ticks = itertools.count(0.0, LAYERS * 1e-3)
    return lambda: next(ticks)


def backends() -> list[object]:
    return [
        TorchAttention(HEADS, CPU),
        triton_standin.attention(HEADS),
        flashinfer_standin.attention(HEADS, KINDS),
    ]


@pytest.mark.parametrize("backend", backends(), ids=lambda b: b.name)
def test_a_layers_time_and_rate_are_said(backend: TorchAttention) -> None:
    said = timing(backend, HEADS, KINDS, CPU, 256, 16, clock())
    # 32 x 1,024 x 2 heads x 128 numbers x 4 bytes in a millisecond.
    assert said == "32 decodes of 1,024 tokens take 1.000 ms a layer, 34 GB/s"


def test_fewer_rows_a_window_and_a_smaller_cache_read_less() -> None:
    heads = replace(HEADS, dtype=torch.bfloat16, fp8_cache=True)
    windowed = (frozenset({LayerKind(0.125, window=512)}),)
    said = timing(TorchAttention(heads, CPU), heads, windowed, CPU, 16, 48, clock())
    assert said == "16 decodes of 1,024 tokens take 1.000 ms a layer, 2 GB/s"


def test_a_start_without_memory_for_it_goes_on() -> None:
    class Full(TorchAttention):
        def plan(self, ragged: RaggedRows):  # type: ignore[no-untyped-def]
            raise torch.OutOfMemoryError

    said = timing(Full(HEADS, CPU), HEADS, KINDS, CPU, 8, 16)
    assert said == "not measured, 8 decodes of 1,024 tokens do not fit in memory"


def test_what_is_planned_is_what_sees_most() -> None:
    planned: list[RaggedRows] = []

    class Seen(TorchAttention):
        def plan(self, ragged: RaggedRows):  # type: ignore[no-untyped-def]
            planned.append(ragged)
            return super().plan(ragged)

    assert timing(Seen(HEADS, CPU), HEADS, KINDS, CPU, 2, 256)
    (ragged,) = planned
    assert (ragged.group, ragged.window, ragged.block_size) == (1, None, 256)
