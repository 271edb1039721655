"""Triton's attention on an NVIDIA GPU, against the reference and transformers. Run with `make gpu`;
without a GPU or without Triton and a C compiler it fails.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.gpu import triton_attention
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import DecodeRows, Heads, LayerKind, LayerSpec
from fairlead_kernels.interface.not_available import name_of
from fairlead_kernels.proofs.attention_proof import prove_attention
from fairlead_runtime import LLM, SamplingParams
from support import tiny
from support.attention_cases import Case, make_case
from support.gpu_device import DEVICE

pytestmark = pytest.mark.gpu

STEPS = 12  # random steps for each kind of layer
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# A kernel is compiled for a size of blocks.
SIZES, USUAL = (1, 4, 16, 32), (16,)


def random_case(seed: int, heads: Heads, window: int | None, sizes: tuple[int, ...]) -> Case:
    """A step of one to nine rows: decodes alone, or prefills, chunks and decodes."""
    generator = np.random.default_rng(seed)
    longest = 1 if seed % 3 == 0 else 90
    rows = [
        (int(generator.integers(0, 900)), int(generator.integers(1, longest + 1)))
        for _ in range(int(generator.integers(1, 10)))
    ]
    size = int(generator.choice(sizes))
    return make_case(rows, block_size=size, window=window, heads=heads, seed=seed)


def steps_of_every_kind() -> Iterator[Any]:
    """Every eleventh combination, which has each value of each list, on blocks of one size; the
    others, and all sizes, in the long form.
    """
    heads = (32, 8, 128), (9, 9, 80), (8, 4, 256), (71, 1, 64), (8, 1, 512)
    extras = "", "softcap and sinks", "sinks and fp8 cache"
    for number, case in enumerate(itertools.product(DTYPES, heads, (None, 1, 128), extras)):
        dtype, (query, kv, dim), window, extra = case
        name = f"{name_of(dtype)}-{query}x{kv}x{dim}-{window}-{extra or 'plain'}"
        if number % 11 == 0:
            yield pytest.param(*case, USUAL, id=name)
        yield pytest.param(*case, SIZES, id=f"{name}-all sizes", marks=pytest.mark.full)


@pytest.mark.parametrize(("dtype", "counts", "window", "extra", "sizes"), [*steps_of_every_kind()])
def test_random_steps_match_the_definition(
    dtype: torch.dtype,
    counts: tuple[int, int, int],
    window: int | None,
    extra: str,
    sizes: tuple[int, ...],
) -> None:
    """All steps are queued before one is looked at: a plan that overwrites the last one shows."""
    query, kv, dim = counts
    heads = Heads(query, kv, dim, dim, dtype, fp8_cache="fp8" in extra)
    sinks = torch.randn(query).to(dtype) if "sinks" in extra else None
    spec = LayerSpec(dim**-0.5, window, 5.0 if "softcap" in extra else None, sinks)
    there = LayerSpec(spec.scale, window, spec.softcap, None if sinks is None else sinks.to(DEVICE))
    attention = triton_attention.load(heads, DEVICE)
    cases = [random_case(seed, heads, window, sizes) for seed in range(STEPS)]
    got = []
    for case in cases:
        query_, keys, values = (
            x.to(DEVICE) for x in (case.query, case.key_cache, case.value_cache)
        )
        got.append(attention.run(attention.plan(case.ragged), query_, keys, values, there))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for case, out in zip(cases, got, strict=True):
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(out.cpu(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.on_cpu(torch.bfloat16)  # which Triton's interpreter does not have
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_it_is_proven_in_each_type(dtype: torch.dtype) -> None:
    kinds = (frozenset({LayerKind(0.1), LayerKind(0.1, 64, 5.0, sinks=True)}),)
    heads = Heads(8, 2, 128, 128, dtype)
    prove_attention(triton_attention.load(heads, DEVICE), heads, kinds, DEVICE)


def test_auto_takes_it_for_float32() -> None:
    choice = pick(Heads(32, 8, 128, 128, torch.float32), (frozenset({LayerKind(0.1)}),), DEVICE)
    assert choice.attention.name == "triton", str(choice)


def test_a_captured_step_follows_the_newest_plan() -> None:
    """Other lengths, rows and blocks than those that it was captured with."""
    heads, spec = Heads(8, 2, 80, 80, torch.float32), LayerSpec(0.1)
    attention = triton_attention.load(heads, DEVICE)
    cases = [make_case([(n, 1), (m, 1)], heads=heads, seed=5) for n, m in ((900, 3), (40, 700))]
    blocks = max(case.key_cache.shape[0] for case in cases)
    tables = torch.zeros(5, blocks, dtype=torch.int32, device=DEVICE)
    shape = blocks, 4, heads.kv, heads.dim
    keys, values = (torch.full(shape, torch.nan, device=DEVICE) for _ in range(2))
    query = torch.zeros(2, heads.query, heads.dim, device=DEVICE)

    def fill(case: Case, order: list[int]) -> Any:
        width = case.ragged.tables.shape[1]
        tables[order, :width] = case.ragged.tables.to(DEVICE)
        keys[: len(case.key_cache)] = case.key_cache.to(DEVICE)
        values[: len(case.value_cache)] = case.value_cache.to(DEVICE)
        query.copy_(case.query)
        lens = case.ragged.kv_lens
        rows = torch.tensor(order, device=DEVICE)
        step = DecodeRows(lens, lens.to(DEVICE, torch.int64), tables, rows, 4, None)
        return attention.plan_decodes(step, 10 * blocks)

    plan = fill(cases[0], [3, 1])
    attention.run(plan, query, keys, values, spec)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(plan, query, keys, values, spec)
    for case, order in ((cases[1], [0, 4]), (cases[0], [2, 3])):
        fill(case, order)
        graph.replay()
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_in_float32_its_tokens_are_those_of_plain_torch(
    family: str, graphs: str, tmp_path: Path
) -> None:
    """Blocks are few, so that requests are preempted; steps are launched ahead."""
    folder = tiny.save(tiny.build(family, num_attention_heads=4, head_dim=80), tmp_path)
    prompts = [{"prompt_token_ids": list(range(3 + i, 40 + 7 * i))} for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    results = []
    for kernels, switch in (("torch", "auto"), ("auto", graphs)):
        with LLM(
            str(folder),
            kernels=kernels,
            dtype="float32",
            num_blocks=24,
            max_model_len=192,
            max_batch_tokens=64,
            safety_margin=0.0,
            cuda_graphs=switch,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([list(output.outputs[0].token_ids) for output in outputs])
    assert results[0] == results[1]
