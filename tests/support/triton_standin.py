"""A stand-in for the kernels of Triton's attention and of its product of experts, in plain torch,
with their arguments: the engine runs on it where their interpreter would take minutes. Tests
compare both with the reference.

It reads what a program of the kernels reads, key by key from the tables, and leaves NaN wherever
they leave what was there. Under a tape (graph_standin) a launch is recorded, and reads at a replay
what its tensors hold then. Products and sums are in float32.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels.gpu.triton_attention import Tiles, TritonAttention
from fairlead_kernels.gpu.triton_experts import TritonExperts
from fairlead_kernels.interface.attention import Heads
from support.flashinfer_standin import TAPE

CPU = torch.device("cpu")


def _attend(
    grid: tuple[int, int, int],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    parts: Tensor,
    peaks: Tensor,
    totals: Tensor,
    pieces: Tensor,
    tables: Tensor,
    sinks: Tensor,
    *numbers: Any,
    **sizes: Any,
) -> None:
    """``triton_attention_kernels.attend``."""
    *_, window, scale, softcap, _, _ = numbers
    kv, per_kv, splits = sizes["KV"], sizes["PER_KV"], sizes["SPLITS"]
    assert grid == (pieces.shape[1], kv * -(-per_kv // sizes["HEADS"]), splits)
    for piece, (row, token, position, queries) in enumerate(pieces.T.tolist()):
        begin = max(position - window + 1, 0) if sizes["WINDOW"] else 0
        end = position + queries
        share = max(-(-(end - begin) // splits), sizes["LEAST_KEYS"]) if splits > 1 else end - begin
        for split in range(splits):
            first = begin + split * share
            key = torch.arange(first, max(first, min(first + share, end)))
            places = tables[row, key // sizes["BLOCK"]].long(), key % sizes["BLOCK"]
            k, v = (
                _wide(x[places], fp8=sizes["FP8_CACHE"]).repeat_interleave(per_kv, dim=1)
                for x in (keys, values)
            )
            at = torch.arange(position, end)
            scores = torch.einsum("qhd,khd->hqk", query[token : token + queries].float(), k) * scale
            if sizes["SOFTCAP"]:
                scores = softcap * torch.tanh(scores / softcap)
            seen = key <= at[:, None]
            if sizes["WINDOW"]:
                seen &= key > at[:, None] - window
            scores = scores.masked_fill(~seen, -torch.inf)
            if splits == 1:
                if sizes["SINKS"]:
                    sink = sinks.float()[:, None, None].expand(-1, queries, 1)
                    scores = torch.cat([scores, sink], dim=-1)
                weights = torch.softmax(scores, dim=-1)[..., : len(key)]
                result = torch.einsum("hqk,khd->qhd", weights, v)
                out[token : token + queries] = result.to(out.dtype)
                continue
            assert queries == 1, "merge has one query of a piece"
            parts[piece, :, split] = torch.nan
            totals[piece, :, split] = 0
            if len(key):
                peak = scores[:, 0].amax(1)
                weights = (scores[:, 0] - peak[:, None]).exp()
                peaks[piece, :, split], totals[piece, :, split] = peak, weights.sum(1)
                parts[piece, :, split] = torch.einsum("hk,khd->hd", weights, v)


def _merge(
    grid: tuple[int, int],
    parts: Tensor,
    peaks: Tensor,
    totals: Tensor,
    pieces: Tensor,
    sinks: Tensor,
    out: Tensor,
    *_: Any,
    **sizes: Any,
) -> None:
    """``triton_attention_kernels.merge``, after ``_attend``, whose peaks have the base e."""
    assert grid == (pieces.shape[1], sizes["QUERY_HEADS"])
    for piece, token in enumerate(pieces[1].tolist()):
        had_keys = totals[piece] != 0
        peak = peaks[piece].masked_fill(~had_keys, -torch.inf)
        top = peak.amax(1, keepdim=True)
        if sizes["SINKS"]:
            top = torch.maximum(top, sinks.float()[:, None])
        factor = (peak - top).exp()
        part = parts[piece].masked_fill(~had_keys[..., None], 0)
        weight = (totals[piece] * factor).sum(1, keepdim=True)
        if sizes["SINKS"]:
            weight = weight + (sinks.float()[:, None] - top).exp()
        out[token] = ((part * factor[..., None]).sum(1) / weight).to(out.dtype)


def _multiply_experts(
    grid: tuple[int, int],
    x: Tensor,
    weights: Tensor,
    ends: Tensor,
    bias: Tensor,
    out: Tensor,
    *numbers: int,
    **sizes: Any,
) -> None:
    """``triton_expert_kernels.multiply_experts``."""
    experts, rows, columns, *strides = numbers
    assert (experts, columns, rows, *strides) == (*weights.shape, *weights.stride())
    out.fill_(torch.nan)
    begin = used = 0
    for expert, end in enumerate(ends.tolist()):
        used += -(-(end - begin) // sizes["TOKENS"])
        total = x[begin:end].float() @ weights[expert].float()
        out[begin:end] = total + bias[expert] if sizes["BIAS"] else total
        begin = end
    assert used <= grid[0]
    assert grid[1] == -(-rows // sizes["ROWS"])


def _wide(x: Tensor, *, fp8: bool) -> Tensor:
    return x.view(torch.float8_e4m3fn).float() if fp8 else x.float()


class Kernel:
    """Launched as a kernel is: ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)

        def launch(*arguments: Any, **more: Any) -> None:
            def kernel() -> None:
                self._run(grid, *arguments, **more)

            if TAPE:
                TAPE[-1].launch(kernel, [x for x in arguments if isinstance(x, Tensor)])
            else:
                kernel()

        return launch


class Torch:
    """The kernels in plain torch."""

    attend = Kernel(_attend)
    merge = Kernel(_merge)
    multiply_experts = Kernel(_multiply_experts)


class Interpreted:
    """The kernels in Triton's interpreter; skips the test where Triton is not installed."""

    def __init__(self, name: str = "triton_attention_kernels") -> None:
        pytest.importorskip("triton", reason="Triton comes with torch's CUDA build alone")
        self._module: Any = importlib.import_module(f"fairlead_kernels.gpu.{name}")

    def __getattr__(self, name: str) -> Kernel:
        kernel = getattr(self._module, name)
        return Kernel(lambda grid, *arguments, **more: kernel[grid](*arguments, **more))


def attention(
    heads: Heads,
    *,
    interpreted: bool = False,
    splits: int = 4,
    least_keys: int = 6,
    tiles: Tiles = Tiles(16, 16),  # noqa: B008 - frozen
) -> TritonAttention:
    """The backend on the CPU, with so few keys to a split that small rows have several."""
    kernels = Interpreted() if interpreted else Torch()
    return TritonAttention(
        heads, CPU, kernels, tiles=tiles, splits=splits, least_keys=least_keys, wide=True
    )


def experts(*, interpreted: bool = False) -> TritonExperts:
    """The product of experts on the CPU."""
    kernels = Interpreted("triton_expert_kernels") if interpreted else Torch()
    return TritonExperts(kernels, wide=True)


def kept(attention: TritonAttention) -> list[Tensor]:
    """What lives as long as graphs that the backend's plans are captured in."""
    partials = attention._partial, *attention._outgrown
    memory = [x for one in partials for x in (one.parts, one.peaks, one.totals)]
    return [*attention._fixed.values(), *memory]
