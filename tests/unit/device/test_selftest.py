"""What the self-test runs: long positions, a copied block, and the faults that it must see."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import families
from fairlead_runtime.models.model_error import SelfTestError
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.settings.startup_parts import unreported
from support import tiny


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
    assert result.tokens == sum(lengths) + 1, "the first one is forked"


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
    assert self_test(model, 512).tokens == sum(map(len, expected.prompts)) + 1
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


def test_a_text_is_scored_where_weights_or_cache_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tiny.build("llama", num_hidden_layers=2)
    monkeypatch.setattr(selftest, "text_ids", lambda _: list(range(3, 63)))
    loaded: Any = SimpleNamespace(max_model_len=512)
    cases: list[tuple[Format | None, bool, int]] = [(None, False, 0), ("int8", False, 1)]
    for to, fp8_cache, counts in (*cases, (None, True, 1)):
        model = PagedModel(plain, families.check(plain.config), fp8_cache=fp8_cache)
        of = partial(selftest._ReferenceLogits.of, model, loaded, to, nullcontext(), 0.0)
        reference = of(unreported, judged=False)
        assert len(reference.expected.perplexity) == counts
        for loss in filter(None, (reference.rounding, reference.cache)):
            assert len(loss.perplexity) == 2, "before and after"


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
    by = (0.1, 0.1, 0.1, 0.8)  # the fork of the first prompt is one token
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


def test_a_model_that_predicts_a_text_is_judged_by_its_perplexity_whatever_its_logits_do(
    model: PagedModel,
) -> None:
    predicting, guessing = model.vocabulary**0.5, 1.1 * model.vocabulary**0.5
    plain = replace(selftest.Expected.of(model, 512), perplexity=(predicting,))
    what = "int8 weights", "quantization none", 0.7

    def judge(plain: selftest.Expected, after: float, *, unlike: bool) -> selftest.Rounding:
        logits = [x.flip(1) for x in plain.logits] if unlike else plain.logits
        rounded = selftest.Expected(plain.prompts, logits, perplexity=(after,))
        return selftest._rounding(model, rounded, plain, *what)

    kept = judge(plain, 1.4 * predicting, unlike=True)
    assert kept.moved > 0.7
    assert re.search(
        rf"move logits by 1\.\d+, .* perplexity of a text {predicting:.3g} before and "
        rf"{1.4 * predicting:.3g} of {1.5 * predicting:.3g} allowed after$",
        str(kept),
    )
    refusal = (
        f"int8 weights raise the perplexity of 'llama' on a text from {predicting:.3g} to "
        f"{1.6 * predicting:.3g}, above the {1.5 * predicting:.3g} that are allowed; serve it with "
        "quantization none"
    )
    with pytest.raises(SelfTestError, match=re.escape(refusal)):
        judge(plain, 1.6 * predicting, unlike=False)
    with pytest.raises(SelfTestError, match="perplexity"):
        judge(plain, math.nan, unlike=False)
    guesses = replace(plain, perplexity=(guessing,))
    assert judge(guesses, 9 * guessing, unlike=False).moved == 0
    with pytest.raises(SelfTestError, match="move the logits"):
        judge(guesses, guessing, unlike=True)


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
    wide = replace(expected, fp8_cache=False)
    attention = pick(replace(model.heads, fp8_cache=False), model.kinds, model.device, "torch")
    delta = selftest.check(model, attention.attention, wide, tolerance=10.0).delta
    assert delta > max(
        selftest.CACHE_TOLERANCE[torch.float32],
        selftest.REFERENCE_FACTOR * expected.reference_error,
    )
    with pytest.raises(SelfTestError, match=rf"by {delta:.3g} of their spread"):
        selftest.check(model, attention.attention, wide)


def test_in_half_precision_the_tokens_that_move_furthest_do_not_decide(model: PagedModel) -> None:
    """A tenth of those of prompts; what is not a number does, and so does the fork."""
    draw = torch.Generator().manual_seed(0)
    plain = [torch.randn(n, 50, generator=draw) for n in (7, 7, 7, 1)]
    half: Any = SimpleNamespace(
        heads=replace(model.heads, dtype=torch.bfloat16),
        model=SimpleNamespace(config=PreTrainedConfig()),
    )
    expected = selftest.Expected([], plain)
    rounded = replace(expected, input_rounding=1e-5)

    def differences(prompt: int, *tokens: int) -> list[float]:
        ours = [x.clone() for x in plain]
        ours[prompt][list(tokens)] = plain[prompt][list(tokens)].flip(1)
        half_precision = expected.difference(half, ours)
        assert rounded.difference(model, ours) == half_precision
        return [expected.difference(model, ours), half_precision]

    worst, calm = differences(0, 3, 5)
    assert worst > 1 > calm == 0
    worst, three = differences(1, 0, 3, 5)
    assert worst > 5 * three > 1
    worst, fork = differences(3, 0)
    assert fork == pytest.approx(worst / 20**0.5)
    ours = [x.clone() for x in plain]
    ours[2][4, 4] = torch.nan
    assert expected.difference(half, ours) == math.inf


def test_rounding_that_changes_a_routers_choice_leaves_the_last_tokens_median() -> None:
    draw = torch.Generator().manual_seed(0)
    plain = [torch.randn(n, 50, generator=draw) for n in (7, 7, 7, 1)]
    ours = [x.clone() for x in plain]
    ours[0][3] = plain[0][3].flip(0)
    half: Any = SimpleNamespace(
        heads=SimpleNamespace(dtype=torch.bfloat16),
        model=SimpleNamespace(config=PreTrainedConfig()),
    )
    assert selftest._tolerance(half) == selftest.TOLERANCE[torch.bfloat16]
    half.model.config = PreTrainedConfig(num_local_experts=4)
    assert selftest._tolerance(half) == selftest.EXPERTS_TOLERANCE[torch.bfloat16]
    assert selftest.Expected([], plain).difference(half, ours) < 1e-6


def test_with_an_fp8_cache_some_tokens_may_move_as_far_as_they_like_and_most_may_not(
    model: PagedModel,
) -> None:
    plain = list(torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0)))
    ours = [x.clone() for x in plain]
    ours[0][2:5] += 3 * plain[0][2:5].flip(1)
    without, cached = (selftest.Expected([], plain, fp8_cache=has) for has in (False, True))
    far = without.difference(model, ours)
    assert far > 1 > cached.difference(model, ours) == 0
    ours[1] = ours[1].flip(1)
    ours[2] = ours[2].flip(1)
    assert cached.difference(model, ours) > 1
    ours[0][0, 0] = torch.nan
    for expected in (without, cached):
        assert expected.difference(model, ours) == math.inf


def test_what_float32_does_to_a_model_is_measured_on_it(model: PagedModel) -> None:
    expected = selftest.Expected.of(model, 512)
    assert 0 < expected.reference_error < selftest.TOLERANCE[torch.float32] / 10
    assert math.isnan(selftest.Expected.of(model, 512, judged=False).reference_error)
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    result = selftest.check(model, attention, expected)
    assert result.tolerance == selftest.TOLERANCE[torch.float32]
    moved = replace(expected, reference_error=0.1)
    assert selftest.check(model, attention, moved).tolerance == 0.1 * selftest.REFERENCE_FACTOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_no_numbers_is_refused(dtype: torch.dtype) -> None:
    """Although transformers' own logits are then as far from themselves."""
    plain = tiny.build("llama").to(dtype)
    with torch.no_grad():
        plain.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = torch.nan
    with pytest.raises(SelfTestError, match=r"differ from plain transformers by inf .*by inf\)"):
        self_test(PagedModel(plain, families.check(plain.config)), 512)


def test_what_float32_does_to_an_fp8_cache_is_allowed() -> None:
    model = with_fp8_cache()
    expected = selftest.Expected.of(model, 512, fp8_cache=True)
    assert 0 < expected.reference_error < selftest.CACHE_TOLERANCE[torch.float32]
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    moved = replace(expected, reference_error=0.1)
    assert selftest.check(model, attention, moved).tolerance == 0.1 * selftest.REFERENCE_FACTOR


def test_what_products_of_digits_do_to_a_model_is_measured_on_it(model: PagedModel) -> None:
    expect = partial(selftest.Expected.of, model, 512)
    few, many = (expect(input_rounding=size).reference_error for size in (1e-5, 1e-3))
    assert 0 < 20 * few < many < 1
    assert math.isnan(expect(input_rounding=1e-3, judged=False).reference_error)
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    result = selftest.check(model, attention, expect(input_rounding=1e-7))
    assert result.tolerance == selftest.ROUNDED_TOLERANCE
    operations = SimpleNamespace(int8_rounding=1e-5)
    choice: Any = SimpleNamespace(operations=operations)
    assert selftest._input_rounding(choice, "int8") == 1e-5
    assert selftest._input_rounding(choice, "none") == 0
    choice.operations = None
    assert selftest._input_rounding(choice, "int8") == 0


# -- products that round activations


def choice_of(*, rounds: bool) -> Any:
    return SimpleNamespace(operations=SimpleNamespace(rounds=rounds), attention=object())


def passes(model: PagedModel, choice: Any, *, fp8: bool) -> list[tuple[bool, bool, bool]]:
    """Of each pass: whether it takes the attention that serves, an fp8 cache, fp8 activations."""

    def run(step: selftest._Pass) -> tuple[bool, bool, bool]:
        assert step.fp8_activations == choice.operations.rounds or not fp8
        return step.attention is choice.attention, step.fp8_cache, step.fp8_activations

    return selftest._in_every_pass(model, choice, run, fp8=fp8)


@pytest.mark.parametrize("rounds", [True, False])
def test_what_rounds_is_judged_after_the_pass_without_it(
    model: PagedModel, *, rounds: bool
) -> None:
    """Each has a limit of its own: that of fp8 would hide a fault of attention."""
    served = (True, False, False)
    choice = choice_of(rounds=rounds)
    both = [served, (True, False, True)]
    assert passes(model, choice, fp8=True) == (both if rounds else [served])
    assert choice.operations.rounds is rounds
    assert passes(model, choice, fp8=False) == [served]
    choice = choice_of(rounds=rounds)
    cached = [(False, False, False), (True, True, False)]
    more = [(True, True, True)] if rounds else []
    assert passes(with_fp8_cache(), choice, fp8=True) == cached + more


def test_a_failing_self_test_leaves_the_operations_as_they_were(model: PagedModel) -> None:
    choice = choice_of(rounds=True)

    def run(_: selftest._Pass) -> None:
        raise SelfTestError("wrong")

    with pytest.raises(SelfTestError):
        selftest._in_every_pass(model, choice, run, fp8=True)
    assert choice.operations.rounds


def test_each_pass_has_its_own_logits_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, float | None]] = []

    def check(*arguments: Any) -> selftest.SelfTestResult:
        compared.append(arguments[2:])
        return selftest.SelfTestResult(0.1 * len(compared), 0.5 * len(compared), 9, "torch")

    monkeypatch.setattr(selftest, "check", check)
    choice, whole = choice_of(rounds=True), selftest._ReferenceLogits("plain", None, "fp8", None)  # type: ignore[arg-type]
    choice.attention = SimpleNamespace(name="served")
    result = selftest._check(with_fp8_cache(), choice, whole, 512, fp8=True)
    assert compared == [("plain", None), ("fp8", None), ("fp8", selftest.ROUNDING["fp8"])]
    assert (result.delta, result.tolerance, result.backend) == (0.1, 0.5, "served")
    assert result.cached == (0.2, 1.0)
    assert result.activations == pytest.approx(0.3)
    assert "; with an fp8 cache 0.2 of 1 allowed at the median token" in str(result)
