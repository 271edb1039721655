"""flashinfer's own wrappers on an NVIDIA GPU, against the reference and against plain torch. Run
with `make gpu`; without a GPU or without flashinfer-python and its dependencies it fails.

The first run compiles flashinfer's kernels, some minutes for each size of heads: one more size and
the other type are in the long form (`make gpu FULL=1`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_kernels.choice.backend import flashinfer_for, pick
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerKind, LayerSpec
from fairlead_kernels.interface.not_available import NotAvailableError, name_of
from fairlead_kernels.packages import flashinfer_package
from fairlead_kernels.packages.flashinfer_attention import SUPPORTED, FlashinferAttention
from fairlead_kernels.proofs.attention_proof import prove_attention
from fairlead_runtime import LLM, SamplingParams
from support import tiny
from support.attention_cases import Case, make_case
from support.gpu_device import DEVICE

pytestmark = pytest.mark.gpu

STEPS = 12  # random steps for each kind of layer


def random_case(seed: int, heads: Heads, window: int | None) -> Case:
    """A step of one to nine rows: decodes alone, or prefills, chunks and decodes."""
    generator = np.random.default_rng(seed)
    longest = 1 if seed % 3 == 0 else 90
    rows = [
        (int(generator.integers(0, 700)), int(generator.integers(1, longest + 1)))
        for _ in range(int(generator.integers(1, 10)))
    ]
    size = int(generator.choice([1, 4, 16, 32]))
    return make_case(rows, block_size=size, window=window, heads=heads, seed=seed)


def run(attention: FlashinferAttention, case: Case, spec: LayerSpec) -> torch.Tensor:
    plan = attention.plan(case.ragged)
    query, keys, values = (x.to(DEVICE) for x in (case.query, case.key_cache, case.value_cache))
    return attention.run(plan, query, keys, values, spec)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("query", "kv", "dim"),
    [(32, 8, 128), (9, 9, 64), pytest.param(8, 4, 256, marks=pytest.mark.full), (7, 1, 64)],
)
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks", "fp8 cache"])
def test_random_steps_match_the_definition(
    dtype: torch.dtype, query: int, kv: int, dim: int, window: int | None, extra: str
) -> None:
    """All steps are queued before one is looked at: a plan that overwrites the last one shows."""
    heads = Heads(query, kv, dim, dim, dtype, fp8_cache=extra == "fp8 cache")
    sinks = torch.randn(query, device=DEVICE).to(dtype) if extra == "sinks" else None
    spec = LayerSpec(dim**-0.5, window, 5.0 if extra == "softcap" else None, sinks)
    package, kinds = flashinfer_for(heads, DEVICE), (frozenset({spec.kind}),)
    if extra == "sinks" and dim not in SUPPORTED.sinks:
        with pytest.raises(NotAvailableError, match="kernels with sinks are for 64 elements"):
            FlashinferAttention(heads, kinds, DEVICE, package)
        return
    attention = FlashinferAttention(heads, kinds, DEVICE, package)
    cases = [random_case(seed, heads, window) for seed in range(STEPS)]
    got = [run(attention, case, spec) for case in cases]
    on_host = LayerSpec(spec.scale, window, spec.softcap, None if sinks is None else sinks.cpu())
    for case, out in zip(cases, got, strict=True):
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, on_host)
        torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=2e-2)


# The modules that can be carried to where none can be compiled: type, size of a head, and the rest.
CARRIED: tuple[tuple[torch.dtype, int, dict[str, Any]], ...] = (
    (torch.bfloat16, 128, {}),
    (torch.bfloat16, 128, {"window": 64}),
    (torch.bfloat16, 64, {}),
    (torch.bfloat16, 64, {"window": 64}),
    (torch.bfloat16, 64, {"softcap": 5.0}),
    (torch.bfloat16, 64, {"window": 64, "softcap": 5.0}),
    (torch.bfloat16, 64, {"sinks": True}),
    (torch.bfloat16, 64, {"window": 64, "sinks": True}),
    (torch.float16, 64, {}),
    (torch.bfloat16, 64, {"fp8_cache": True}),
)


@pytest.mark.parametrize(
    ("dtype", "dim", "kind"),
    [
        pytest.param(*each, id="-".join((name_of(each[0]), str(each[1]), *each[2])))
        for each in CARRIED
    ],
)
def test_a_carried_module_is_proven(dtype: torch.dtype, dim: int, kind: dict[str, Any]) -> None:
    heads = Heads(8, 2, dim, dim, dtype, fp8_cache="fp8_cache" in kind)
    rest = {name: value for name, value in kind.items() if name != "fp8_cache"}
    kinds = (frozenset({LayerKind(dim**-0.5, **rest)}),)
    attention = FlashinferAttention(heads, kinds, DEVICE, flashinfer_for(heads, DEVICE))
    prove_attention(attention, heads, kinds, DEVICE)


def test_auto_picks_flashinfer_and_proves_it() -> None:
    heads = Heads(32, 8, 128, 128, torch.bfloat16)
    kinds = (frozenset({LayerKind(128**-0.5)}), frozenset({LayerKind(128**-0.5, window=64)}))
    choice = pick(heads, kinds, DEVICE)
    assert choice.attention.name == "flashinfer", str(choice)
    assert flashinfer_package.load().version in str(choice)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_on_flashinfer_are_close_to_those_on_plain_torch(
    family: str, tmp_path: Path
) -> None:
    """Up to the first other token they are equal; there, each has the other's among its five
    likeliest. Blocks are few, so that requests are preempted.
    """
    heads = {"num_attention_heads": 4, "head_dim": 64}
    folder = tiny.save(tiny.build(family, **heads).to(torch.bfloat16), tmp_path)
    prompts = [{"prompt_token_ids": list(range(3 + i, 40 + 7 * i))} for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    results = []
    for kernels in ("torch", "flashinfer"):
        with LLM(
            str(folder),
            kernels=kernels,
            dtype="bfloat16",
            num_blocks=24,
            max_model_len=192,
            max_batch_tokens=64,
            safety_margin=0.0,
        ) as llm:
            results.append(llm.generate(prompts, params, use_tqdm=False))
    for one, other in zip(*results, strict=True):
        left, right = one.outputs[0], other.outputs[0]
        pairs = zip(left.token_ids, right.token_ids, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            assert left.logprobs is not None
            assert right.logprobs is not None
            assert left.token_ids[at] in right.logprobs[at]
            assert right.token_ids[at] in left.logprobs[at]
