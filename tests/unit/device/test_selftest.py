"""What the self-test runs: long positions, a copied block, and the faults that it must see."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairlead_kernels.backend import pick
from fairlead_kernels.torch_attention import TorchAttention
from fairlead_runtime.config import ConfigError
from fairlead_runtime.device import selftest
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.models import families, tiny
from fairlead_runtime.models.model_error import SelfTestError


@pytest.fixture(scope="module")
def model() -> PagedModel:
    plain = tiny.build("llama", num_hidden_layers=2)
    return PagedModel(plain, families.check(plain.config))


def self_test(model: PagedModel, max_model_len: int) -> selftest.SelfTestResult:
    return selftest.run(
        model, pick(model.heads, model.kinds, model.device, "torch").attention, max_model_len
    )


@pytest.mark.parametrize(
    ("max_model_len", "lengths"), [(512, [176, 9, 14]), (20, [20, 9, 14]), (1, [1, 1, 1])]
)
def test_one_prompt_goes_beyond_position_160_where_the_model_does(
    model: PagedModel, max_model_len: int, lengths: list[int]
) -> None:
    assert [len(p) for p in selftest._prompts(model, max_model_len, [])] == lengths
    result = self_test(model, max_model_len)
    assert result.tokens == sum(lengths) + lengths[-1], "the last one is forked"


@pytest.mark.parametrize(("length", "scored"), [(60, 32), (300, 32), (7, 6), (1, 0), (0, 0)])
@torch.inference_mode()
def test_the_first_prompt_begins_with_a_text_whose_perplexity_is_that_of_transformers(
    model: PagedModel, length: int, scored: int
) -> None:
    text = [3 + 7 * n % 250 for n in range(length)]
    expected = selftest.Expected.of(model, 512, text)
    first, before = expected.prompts[0], selftest.Expected.of(model, 512).prompts[0]
    kept = min(length, len(first))
    assert first == text[:kept] + before[kept:]
    assert self_test(model, 512).tokens == sum(map(len, expected.prompts)) + 14
    if not scored:
        assert expected.perplexity == ()
        return
    with model.plain(experts=True) as plain:
        losses = -plain(input_ids=torch.tensor([first]), use_cache=False).logits[0].log_softmax(-1)
    at = range(kept - 1 - scored, kept - 1)
    mean = sum(float(losses[n, first[n + 1]]) for n in at) / scored
    (perplexity,) = expected.perplexity
    assert perplexity == pytest.approx(math.exp(mean), rel=1e-4)


def test_a_half_type_has_a_perplexity_of_its_own_where_it_is_judged() -> None:
    model = PagedModel(tiny.build("llama").bfloat16(), [None] * 3)
    text = list(range(3, 63))
    exact, own = selftest.Expected.of(model, 512, text).perplexity
    assert 0 < abs(exact / own - 1) < 0.1
    assert selftest.Expected.of(model, 512, text, judged=False).perplexity == (exact,)


def test_kernels_that_cannot_serve_the_loaded_model_are_refused_by_their_flag(
    model: PagedModel,
) -> None:
    with pytest.raises(ConfigError, match="--kernels: flashinfer: the model runs on cpu") as error:
        selftest._pick(model, "flashinfer")
    assert (error.value.field, error.value.hint) == ("kernels", "use auto or torch")


def test_a_block_that_is_not_copied_fails_the_test(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheStorage, "copy", lambda *_: None)
    with pytest.raises(SelfTestError):
        self_test(model, 512)


def test_a_read_of_a_slot_that_was_not_written_fails_the_test_whatever_its_weight(
    model: PagedModel,
) -> None:
    class Reads(TorchAttention):
        def run(self, plan: Any, query: Any, keys: Any, values: Any, spec: Any) -> torch.Tensor:
            out: torch.Tensor = super().run(plan, query, keys, values, spec)
            return out.add(keys.sum() + values.sum(), alpha=0)

    with pytest.raises(SelfTestError, match="differ from plain transformers by inf"):
        selftest.run(model, Reads(model.heads, model.device), 512)
    assert selftest.run(model, TorchAttention(model.heads, model.device), 512).delta < 1e-4


def test_positions_that_are_wrong_beyond_160_fail_the_test(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PagedModel.run

    def capped(self: PagedModel, ids: torch.Tensor, positions: torch.Tensor, step: Any) -> Any:
        return run(self, ids, positions.clamp(max=160), step)

    monkeypatch.setattr(PagedModel, "run", capped)
    with pytest.raises(SelfTestError):
        self_test(model, 512)


def test_what_rounding_costs_is_measured_on_transformers_alone_and_has_a_limit(
    model: PagedModel,
) -> None:
    plain = selftest.Expected.of(model, 512)
    by = (0.1, 0.1, 0.1, 0.8)  # the fork of the last prompt is one token
    moved = selftest.Expected(
        plain.prompts,
        [x + y * x.std(dim=1, keepdim=True) for x, y in zip(plain.logits, by, strict=True)],
    )
    what = "int8 weights", "quantization none", 0.7
    result = selftest._rounding(model, moved, plain, *what)
    assert str(result) == (
        "int8 weights move logits by 0.2 of 0.7 allowed, likeliest token the same in 100 % (those "
        "of one token by 0.8)"
    )
    said = selftest._rounding(
        model, replace(moved, perplexity=(20.51, 20.6)), replace(plain, perplexity=(19.0,)), *what
    )
    assert str(said).endswith(
        "by 0.8); perplexity of a text 19 before and 20.5 after (20.6 by transformers in half "
        "precision)"
    )
    broken = selftest.Expected(plain.prompts, [x.flip(1) for x in plain.logits])
    with pytest.raises(SelfTestError, match=r"int8 weights move.* 'llama' by 1\.\d+.*none$"):
        selftest._rounding(model, broken, plain, *what)


# -- an fp8 cache


def with_fp8_cache(family: str = "llama", **overrides: Any) -> PagedModel:
    plain = tiny.build(family, **overrides)
    return PagedModel(plain, families.check(plain.config), fp8_cache=True)


def test_an_fp8_cache_equals_transformers_with_rounded_keys_and_differs_from_plain_ones() -> None:
    result = self_test(with_fp8_cache(), 512)
    assert result.delta < result.tolerance / 2
    assert result.tolerance == selftest.CACHE_TOLERANCE[torch.float32]
    model = with_fp8_cache()
    plain, rounded = (selftest.Expected.of(model, 512, fp8_cache=fp8) for fp8 in (False, True))
    cost = selftest._rounding_of_cache(model, rounded, plain)
    assert cost.moved > 2 * result.delta, "the comparison is with rounded keys"
    assert str(cost).startswith("keys and values in fp8 move logits by 0.")
    assert f" of {selftest.CACHE_ROUNDING:g} allowed, likeliest token the same in " in str(cost)


def test_keys_that_fp8_cannot_hold_are_refused_by_the_setting_that_serves_them() -> None:
    model = with_fp8_cache()
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            weight.mul_({"k_proj": 1e5, "q_proj": 1e-5}.get(name.split(".")[-2], 1.0))
    plain, rounded = (selftest.Expected.of(model, 512, fp8_cache=fp8) for fp8 in (False, True))
    with pytest.raises(SelfTestError, match=r"in fp8 move.* serve it with cache dtype auto$"):
        selftest._rounding_of_cache(model, rounded, plain)


def test_the_self_test_finds_a_cache_that_is_not_rounded() -> None:
    """As one would be that attends to the tokens of a chunk before they are written."""
    model = with_fp8_cache()
    expected = selftest.Expected.of(model, 512, fp8_cache=True)
    wide = PagedModel(model.model, model.windows)
    attention = pick(wide.heads, wide.kinds, wide.device, "torch").attention
    delta = selftest.check(wide, attention, expected, tolerance=10.0).delta
    assert delta > selftest.CACHE_TOLERANCE[torch.float32]


# -- products that round activations


@pytest.mark.parametrize("rounds", [True, False])
def test_where_activations_are_rounded_both_ways_are_judged_each_by_its_own_limit(
    rounds: bool,
) -> None:
    """The layers without it by theirs, and what is served by the one of fp8."""
    operations: Any = SimpleNamespace(rounds=rounds)
    choice: Any = SimpleNamespace(operations=operations)
    seen: list[tuple[float | None, bool]] = []

    def run(allowed: float | None) -> int:
        seen.append((allowed, operations.rounds))
        return len(seen)

    got = selftest._in_both_ways(choice, run, 0.5, fp8=True)
    both = [(None, False), (selftest.ROUNDING["fp8"], True)]
    assert seen == (both if rounds else [(0.5, False)])
    assert got == [1, 2][: len(seen)]
    assert operations.rounds is rounds
    seen.clear()
    selftest._in_both_ways(choice, run, 0.5, fp8=False)
    assert seen == [(0.5, rounds)]


def test_a_failing_self_test_leaves_the_operations_as_they_were() -> None:
    operations: Any = SimpleNamespace(rounds=True)
    choice: Any = SimpleNamespace(operations=operations)

    def run(_: float | None) -> None:
        raise SelfTestError("wrong")

    with pytest.raises(SelfTestError):
        selftest._in_both_ways(choice, run, fp8=True)
    assert operations.rounds
