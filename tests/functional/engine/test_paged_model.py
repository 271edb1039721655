"""A transformers model on our cache: its attention hook, pinned RoPE, self-test and runner."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.interface.attention import LayerKind
from fairlead_runtime.device.model import experts, paged_attention
from fairlead_runtime.device.model.paged_attention import AttentionCall, PagedPass
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.models import families, rope
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row, Work
from support import flashinfer_standin, tiny, tiny_states
from support.engine_rig import Rig, Setting, check_greedy_texts, greedy, prompts, rig
from support.layer_faults import change_the_base, hide_each_token_from_itself, scale_a_head

EVERY = (*tiny.FAMILIES, *tiny.VARIANTS)


def paged(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PagedModel:
    model = tiny.build(family, **overrides).to(dtype)
    rope.pin(model, 512)
    return PagedModel(model, families.check(model.config))


def self_test(model: PagedModel) -> selftest.SelfTestResult:
    return selftest.run(model, pick(model.heads, model.kinds, model.device, "torch").attention, 512)


# -- the probe


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_the_probe_of_a_model_without_states_reads_no_weights_of_linear_layers(
    family: str,
) -> None:
    plain = tiny.build(family).bfloat16()
    windows = families.check(plain.config)

    def seen() -> tuple[Any, ...]:
        model = PagedModel(plain, windows)
        calls = [(call.scale, call.softcap, call.sinks is None) for call in model.calls.values()]
        return model.layer_heads, model.sources, model.kinds, model.logits_dtype, calls

    want = seen()
    head = plain.get_output_embeddings()
    linears = [x for x in plain.modules() if type(x) is torch.nn.Linear and x is not head]
    for linear in linears:
        linear.weight.data = linear.weight.new_empty(0)
    assert len(linears) > 8
    assert seen() == want
    assert want[3] is torch.bfloat16
    assert not any("forward" in vars(linear) for linear in linears), "they compute again"


def test_the_probe_of_a_model_with_states_computes_what_it_looks_at() -> None:
    plain = tiny_states.build("mamba2")
    model = PagedModel(plain, families.check(plain.config))
    assert model.mixers
    assert not any(mixer.forgets for mixer in model.mixers.values())


# -- the self-test


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_served_family_passes_the_self_test_with_room_to_spare(
    family: str, dtype: torch.dtype
) -> None:
    result = self_test(paged(family, dtype))
    assert result.delta < result.tolerance / (100 if dtype is torch.float32 else 1.5)
    assert result.tokens > 40


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma3_text", torch.float32), ("gpt_oss", torch.bfloat16)]
)
def test_a_family_passes_the_self_test_on_flashinfers_wrappers(
    family: str, dtype: torch.dtype
) -> None:
    """The wrappers are the stand-in of tests/support. Gemma 3 has three groups with one window."""
    model = paged(family, dtype)
    result = selftest.run(model, flashinfer_standin.attention(model.heads, model.kinds), 512)
    assert result.delta < result.tolerance / (100 if dtype is torch.float32 else 1.5)
    assert result.backend == "flashinfer"


def test_the_kinds_of_layers_are_those_of_each_group() -> None:
    near, far = (LayerKind(0.25, window, 4.0) for window in (12, None))
    assert paged("gemma2").kinds == (frozenset({near}), frozenset({far}))
    near, far = (LayerKind(0.25, window, sinks=True) for window in (12, None))
    assert paged("gpt_oss").kinds == (frozenset({near}), frozenset({far}))
    layers = frozenset(LayerKind(0.25 / layer) for layer in (1, 2, 3))
    assert paged("gpt2", scale_attn_by_inverse_layer_idx=True).kinds == (layers,)


def test_a_deep_bfloat16_model_stays_within_tolerance() -> None:
    self_test(paged("llama", torch.bfloat16, num_hidden_layers=32))


FAULTS: dict[str, tuple[str, Callable[[AttentionCall], AttentionCall]]] = {
    "the softcap is forgotten": ("gemma2", lambda call: dataclasses.replace(call, softcap=None)),
    "the sinks are forgotten": ("gpt_oss", lambda call: dataclasses.replace(call, sinks=None)),
    "the scale is wrong": ("llama", lambda call: dataclasses.replace(call, scale=2 * call.scale)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_fault_of_the_attention_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype
) -> None:
    family, change = FAULTS[fault]
    model, attend = paged(family, dtype), PagedPass.attend

    def attend_wrongly(
        self: PagedPass, layer: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> Tensor:
        return attend(self, layer, q, k, v, change(call))

    monkeypatch.setattr(PagedPass, "attend", attend_wrongly)
    with pytest.raises(SelfTestError, match=family):
        self_test(model)


def forget_the_biases(model: PagedModel) -> None:
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


def round_a_matrix_twice(model: PagedModel) -> None:
    """The last one of the first layer: to a bit less than half of what its type holds."""
    layers: Any = model.model.get_decoder().layers
    weight = layers[0].mlp.down_proj.weight.data
    scale = weight.abs().amax() / 127
    weight.copy_((weight / scale).round() * scale)


WHOLE_FAULTS: dict[str, Callable[[PagedModel], None]] = {
    "rotary embeddings have another base": change_the_base,
    "the biases are forgotten": forget_the_biases,
    "a matrix is rounded twice": round_a_matrix_twice,
}


# bfloat16 rounds logits by more than these faults move them.
FINE = ("a matrix is rounded twice", "one head is scaled by 1.01")


def in_types(faults: Iterable[str]) -> pytest.MarkDecorator:
    """Each fault in each type in which logits suffer."""
    types = torch.float32, torch.bfloat16
    pairs = [(fault, dtype) for fault in faults for dtype in types[: 1 if fault in FINE else 2]]
    return pytest.mark.parametrize(("fault", "dtype"), pairs)


@in_types(WHOLE_FAULTS)
@torch.inference_mode()
def test_a_fault_of_the_whole_model_fails_the_self_test(fault: str, dtype: torch.dtype) -> None:
    model = paged("qwen2", dtype)
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    expected = selftest.Expected.of(model, 512)
    WHOLE_FAULTS[fault](model)
    with pytest.raises(SelfTestError, match="qwen2"):
        selftest.check(model, attention, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_off_by_one_in_every_layer_fails_the_self_test(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_each_token_from_itself(monkeypatch)
    with pytest.raises(SelfTestError, match=family):
        self_test(paged(family, dtype))


HEAD_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one head is scaled by 1.01": scale_a_head,
    "heads are swapped": lambda x: x.flip(1),
}


@in_types(HEAD_FAULTS)
def test_a_fault_of_heads_in_every_layer_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype
) -> None:
    model, attend = paged("llama", dtype), PagedPass.attend

    def attend_wrongly(self: PagedPass, *arguments: Any) -> Tensor:
        return HEAD_FAULTS[fault](attend(self, *arguments))

    monkeypatch.setattr(PagedPass, "attend", attend_wrongly)
    with pytest.raises(SelfTestError, match="llama"):
        self_test(model)


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_window_wrong_by_one_fails_the_self_test(
    family: str, dtype: torch.dtype, error: int
) -> None:
    model = paged(family, dtype)
    model.windows = tuple(None if w is None else w + error for w in model.windows)
    with pytest.raises(SelfTestError):
        self_test(model)


def test_keys_in_each_others_slots_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    model, init = paged("llama"), PagedPass.__init__

    def swap_slots(self: PagedPass, batch: Any, *rest: Any) -> None:
        for slots in batch.slots:
            slots.copy_(slots.flip(0))
        init(self, batch, *rest)

    monkeypatch.setattr(PagedPass, "__init__", swap_slots)
    with pytest.raises(SelfTestError):
        self_test(model)


@pytest.mark.parametrize("length", [1, 2, 8])
def test_the_self_test_runs_within_a_short_context(length: int) -> None:
    model = paged("llama")
    assert (
        selftest.run(
            model, pick(model.heads, model.kinds, model.device, "torch").attention, length
        ).delta
        < 1e-5
    )


# -- the hook


def test_a_model_without_logits_to_keep_gathers_rows_before_its_output_matrix() -> None:
    model = tiny.build("llama")
    forward = model.forward

    def old_forward(input_ids: Tensor, position_ids: Any = None, use_cache: Any = None) -> Any:
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.forward = old_forward
    wrapped = PagedModel(model, families.check(model.config))
    assert not wrapped.selects_logits
    shapes: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(
        lambda _m, args, _out: shapes.append(args[0].shape)
    )
    assert self_test(wrapped).delta < 1e-5
    # One per row; the first six are the plain passes of three prompts, exact and rounded.
    assert max(shape[1] for shape in shapes[6:]) <= 3


def test_paged_attention_outside_a_step_is_an_error() -> None:
    model = paged("llama")
    with pytest.raises(RuntimeError, match="PagedModel"):
        model.model(input_ids=torch.tensor([[3, 4]]))


def test_plain_restores_paged_attention_even_after_an_error() -> None:
    model = paged("llama")
    with pytest.raises(KeyError), model.plain():
        raise KeyError
    assert model.model.config._attn_implementation == paged_attention.NAME


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_run_grouped_in_the_paged_model_and_eagerly_in_the_plain_one(family: str) -> None:
    model = paged(family)
    assert model.model.config._experts_implementation == "grouped_mm"
    with model.plain() as plain:
        assert plain.config._experts_implementation == "eager"
    assert model.model.config._experts_implementation == "grouped_mm"


# Of rows that are no multiple of 16 bytes torch has no grouped product.
ODD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt_oss", {"intermediate_size": 97}),
    ("mixtral", {"intermediate_size": 30}),
    ("qwen3_moe", {"moe_intermediate_size": 5, "hidden_size": 66}),
)


@pytest.mark.parametrize(("family", "sizes"), ODD)
def test_experts_of_any_width_give_transformers_text(family: str, sizes: dict[str, Any]) -> None:
    engine = rig(family, **sizes)
    assert engine.model.model.config._experts_implementation == experts.LOOPED
    check_greedy_texts(engine, 3)


@pytest.mark.parametrize(("family", "sizes"), [*ODD, ("mixtral", {"intermediate_size": 100})])
def test_experts_of_any_width_are_judged_in_16_bits(family: str, sizes: dict[str, Any]) -> None:
    """100 numbers are such a multiple in float32 alone."""
    model = paged(family, torch.bfloat16, **sizes)
    assert model.model.config._experts_implementation == experts.LOOPED
    result = self_test(model)
    assert result.delta < result.tolerance


def test_windows_for_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="layers"):
        PagedModel(tiny.build("llama"), (None, None))


# -- RoPE that depends on the longest sequence


@pytest.mark.parametrize("family", tiny.VARIANTS)
def test_pinned_rope_makes_a_short_prompt_independent_of_a_long_one(family: str) -> None:
    plain = tiny.build(family)
    short = torch.tensor([prompts(1, (9,), 0)[0]])
    long = torch.tensor([prompts(2, (100,), 0)[0]])

    def logits() -> Tensor:
        with torch.inference_mode():
            plain(input_ids=long, use_cache=False)
            position_ids = torch.cat([torch.arange(9), torch.arange(90, 99)])[None]
            ids = torch.cat([short, short], dim=1)
            # The second half takes the place of a long batch mate; causality keeps it out of
            # the first half's logits.
            mixed: Tensor = plain(input_ids=ids, position_ids=position_ids, use_cache=False).logits[
                0, :9
            ]
            alone: Tensor = plain(input_ids=short, use_cache=False).logits[0]
            return (mixed - alone).abs().max()

    assert logits() > 1e-3, (
        "the variant does not depend on the longest sequence, so it tests nothing"
    )
    assert rope.pin(plain, 512) > 0
    assert logits() < 1e-5


def test_pinning_chooses_the_factors_of_the_longest_sequence_and_only_once() -> None:
    def frequencies(limit: int) -> Tensor:
        model = tiny.build("phi3_longrope")
        assert rope.pin(model, limit) == 1
        assert rope.pin(model, 2 * limit) == 0
        module: Any = next(m for m in model.modules() if hasattr(m, "rope_type"))
        inverse: Tensor = module.inv_freq.clone()
        return inverse

    assert torch.equal(frequencies(10), frequencies(64))
    assert not torch.equal(frequencies(64), frequencies(65))
    assert rope.pin(tiny.build("llama"), 512) == 0


@pytest.mark.parametrize(("limit", "factor", "frequency"), [(32, 1.0, 1.0), (64, 1.3, 0.25)])
def test_pinning_phimoe_fixes_its_frequencies_and_the_factor_of_its_results(
    limit: int, factor: float, frequency: float
) -> None:
    """Its code computes both in each pass, the factor by the largest position of the batch."""
    half = 8
    rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e6,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "short_mscale": 1.0,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 32,
    }
    model = tiny.build("phimoe", rope_parameters=rope_parameters, max_position_embeddings=256)
    assert rope.pin(model, limit) == 1
    assert rope.pin(model, 256) == 0
    module: Any = next(m for m in model.modules() if hasattr(m, "rope_type"))
    assert len(module.inv_freq) == half
    x = torch.zeros(1, 1)
    alone, _ = module(x, torch.arange(4)[None])
    beside, sines = module(x, torch.tensor([[0, 1, 2, 3, 100]]))
    assert torch.equal(alone, beside[:, :4])
    assert torch.allclose(alone[0, 0], torch.tensor(factor))
    assert float(sines[0, 1, 0]) == pytest.approx(factor * math.sin(frequency), rel=1e-5)
    assert model.config.rope_parameters["rope_type"] == "longrope"


# -- the runner


def sequences(engine: Rig, lengths: list[int], block_size: int = 4) -> list[Sequence]:
    created: list[Sequence] = []
    free = iter(range(1000))
    for i, prompt in enumerate(prompts(5, lengths, 0)):
        params = SamplingParams(temperature=0.0)
        sequence = Sequence(i, Request(str(i), prompt, params, 4), 0, list(prompt))
        width = -(-(len(prompt) + 8) // block_size)
        sequence.tables = [[next(free) for _ in range(width)] for _ in engine.groups]
        created.append(sequence)
    return created


def whole_prompts(batch: list[Sequence]) -> Work:
    return Work(0, [Row(s, 0, len(s.tokens), samples=True) for s in batch])


def test_only_sampling_rows_get_a_result() -> None:
    engine = rig("llama")
    first, second = sequences(engine, [7, 9])
    rows = [Row(first, 0, 3, samples=False), Row(second, 0, 9, samples=True)]
    assert list(engine.runner(Setting()).execute(Work(0, rows))) == [second.id]
    assert engine.runner(Setting()).execute(Work(0)) == {}


def test_running_a_step_again_in_parts_gives_the_same_tokens() -> None:
    engine = rig("gemma2")
    batch = sequences(engine, [7, 30, 12, 5])
    runner, work = engine.runner(Setting()), whole_prompts(batch)
    together = runner.execute(work)
    parts = [
        runner.execute(work.subset(rows)) for rows in (work.rows[2:], work.rows[:1], work.rows[1:2])
    ]
    assert {k: v for part in parts for k, v in part.items()} == together


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
def test_a_request_whose_logits_are_not_finite_fails_alone_and_corrupts_no_block(
    family: str,
) -> None:
    engine = Rig(family)
    batch = sequences(engine, [7, 9, 12])
    healthy = engine.runner(Setting()).execute(whole_prompts(batch))
    runner = engine.runner(Setting())
    nan_token = next(t for t in range(tiny.VOCAB) if not any(t in s.tokens for s in batch))
    batch[1].tokens[4] = nan_token
    with torch.no_grad():
        engine.model.model.get_input_embeddings().weight[nan_token] = math.nan
    results = runner.execute(whole_prompts(batch))
    assert "not finite" in str(results[1].failure)
    assert (results[0], results[2]) == (healthy[0], healthy[2])
    # The next owner of the blocks with NaN leaves most of them unwritten, and decodes beside longer
    # rows.
    next_owner = sequences(engine, [3])[0]
    next_owner.id, next_owner.tables = 1, batch[1].tables
    runner.execute(Work(1, [Row(next_owner, 0, 2, samples=False)]))
    rows = [
        Row(next_owner, 2, 1, samples=True),
        Row(batch[0], 6, 1, samples=True),
        Row(batch[2], 11, 1, samples=True),
    ]
    results = runner.execute(Work(2, rows))
    assert [result.failure for result in results.values()] == [None, None, None]
    assert (results[0], results[2]) == (healthy[0], healthy[2])


def test_the_kernels_in_use_are_named() -> None:
    model = rig("llama").model
    assert str(pick(model.heads, model.kinds, model.device, "torch")).startswith(
        "torch (plain torch on "
    )


# -- the profiling run


def test_the_profiling_run_measures_what_grows_with_the_limits() -> None:
    model = paged("llama")
    backend = pick(model.heads, model.kinds, model.device, "torch").attention

    def measure(tokens: int, requests: int) -> Any:
        limits = {"max_batch_tokens": tokens, "max_requests": requests, "max_model_len": 512}
        return profiling.profile(model, backend, **limits).measured

    small, large = measure(64, 8), measure(256, 32)
    assert large["activations"] == pytest.approx(4 * small["activations"], rel=0.05)
    assert large["logits"] == pytest.approx(4 * small["logits"], rel=0.05)
    assert large["logits"] >= 32 * tiny.VOCAB * 4
    assert large["sampling"] > small["sampling"]
    # Beyond CPU_TOKENS the result is scaled up.
    assert measure(4096, 32)["activations"] == 16 * large["activations"]


def test_the_profiling_run_times_a_step() -> None:
    model = paged("llama")
    limits = {"max_batch_tokens": 64, "max_requests": 8, "max_model_len": 512}
    profile = profiling.profile(
        model, pick(model.heads, model.kinds, model.device, "torch").attention, **limits
    )
    assert profile.token_seconds > 0
    assert profile.decode_seconds > 0


def test_the_meter_counts_the_peak_and_not_the_sum() -> None:
    def work() -> Tensor:
        a = torch.randn(1000, 1000)
        b = a @ a
        return ((b + 1) * 2).sum()  # a, b, the sum and the product are alive at once

    assert profiling._peak(torch.device("cpu"), work)[0] == pytest.approx(16e6, rel=0.001)


def test_greedy_choices_of_one_request_are_equal() -> None:
    outcome = rig("llama").run(Setting(), [(0, greedy("r", prompts(9, (20,), 0)[0], 8, n=3))])
    assert outcome.texts["r", 0] == outcome.texts["r", 1] == outcome.texts["r", 2]
