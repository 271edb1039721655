"""One model on two gloo processes, each with half of it and of the cache: the text is that of
transformers. More settings of every family: test_token_equality.py, in its long form.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_runtime.device.conversion.rounding import Noise
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.ranks import shards
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.tensor_parallel import reason_against
from fairlead_runtime.sizing.weight_bytes import weights
from support import rank_pair, tiny
from support.engine_rig import (
    QUANTIZED,
    QUANTIZED_RANKS,
    Outcome,
    Rig,
    Setting,
    greedy,
    prompts,
    rig,
)

# Families outside the table but for those of which none in it has the form: an MLP without a gate,
# norms after attention and MLP alone, layer norms without weights, one norm with a bias for
# attention and MLP.
LIKE_THE_LISTED = [
    family
    for family in rank_pair.SPLIT
    if family in tiny.UNLISTED and family not in ("apertus", "exaone4", "olmo", "phi")
]
AMPLE = Setting(chunk=16)
SCARCE = Setting(chunk=16, num_blocks=24, offload=True, sharing=False)


def run(engine: Rig, setting: Setting = AMPLE, **more: Any) -> Outcome:
    """Three prompts that share a beginning; their texts are compared."""
    requests = [greedy(str(i), p, 16, **more) for i, p in enumerate(prompts(3, (23, 41, 30), 16))]
    outcome = engine.run(setting, [(3 * i, request) for i, request in enumerate(requests)])
    for one in requests:
        for choice in range(one.params.n):
            assert outcome.texts[one.id, choice] == engine.reference(one.prompt, one.max_tokens)
    return outcome


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in rank_pair.SPLIT if family not in LIKE_THE_LISTED),
        *(pytest.param(family, {}, marks=pytest.mark.full) for family in LIKE_THE_LISTED),
        ("llama", {"num_key_value_heads": 1}),  # both ranks have the one head
        ("gemma", {"tie_word_embeddings": True}),
        ("qwen2", {"vocab_size": 307}),  # a whole head on both
    ],
)
def test_two_ranks_give_the_text_of_transformers(family: str, changes: dict[str, Any]) -> None:
    engine = rig(family, "ranks", **changes)
    stats = run(engine, n=3).stats
    assert stats is not None
    assert stats.prefix_hits > 0


def admits(family: str) -> bool:
    model = tiny.build(family)
    shape = rank_pair.shape_of(model)
    if reason_against(shape, 2):
        return False
    try:
        return bool(shards.plan_of(model, shape, 2))
    except ConfigError:
        return False


def test_these_are_the_families_that_the_plan_admits() -> None:
    every = {*tiny.FAMILIES, *tiny.VARIANTS, *tiny.SIZED, *tiny.UNLISTED}
    assert {family for family in every if admits(family)} == set(rank_pair.SPLIT)


# The forms of a layer: biases after each sum; norms after it; a factor of what is summed; attention
# and MLP beside each other, with biases, and with one norm for both.
FORMS = [
    ("llama", {"num_key_value_heads": 1}),
    ("starcoder2", {}),
    ("gemma2", {}),
    ("granite", {"residual_multiplier": 0.3}),
    ("gpt_neox", {}),
    ("cohere", {}),
]


@pytest.mark.parametrize("kernels", ["ranks cpu", "ranks layers"])
@pytest.mark.parametrize(("family", "changes"), FORMS)
def test_fused_layers_on_two_ranks_give_the_text_of_transformers(
    family: str, changes: dict[str, Any], kernels: str
) -> None:
    engine = rig(family, kernels, **changes)
    assert (
        str(engine.fusion)
        == f"fused {len(engine.model.windows)}/{len(engine.model.windows)} layers"
    )
    stats = run(engine, n=3).stats
    assert stats is not None
    assert stats.prefix_hits > 0


@pytest.mark.parametrize(("family", "sums"), [("llama", 2), ("starcoder2", 2), ("gpt_neox", 1)])
def test_a_fused_layer_sums_twice_and_with_both_branches_side_by_side_once(
    family: str, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pair = rig(family, "ranks layers"), rank_pair.pair()
    counted: list[torch.Size] = []
    real = pair.rank_group.sum

    def sum_(x: Tensor) -> Tensor:
        counted.append(x.shape)
        return real(x)

    monkeypatch.setattr(pair.rank_group, "sum", sum_)
    steps = run(engine).steps
    assert len(counted) == steps * sums * engine.fusion.layers
    assert {shape[1:] for shape in counted} == {(engine.model.model.config.hidden_size,)}


@pytest.mark.parametrize("kernels", QUANTIZED_RANKS)
@pytest.mark.parametrize(("family", "changes"), [FORMS[0], FORMS[3], FORMS[4]])
def test_rounded_weights_on_two_ranks_give_the_text_of_transformers_with_the_whole_ones(
    family: str, changes: dict[str, Any], kernels: str
) -> None:
    engine = rig(family, kernels, **changes)
    count, rounded = len(engine.model.windows), kernels.rpartition(" ")[2]
    assert str(engine.fusion) == f"fused {count}/{count} layers, {rounded} weights"
    run(engine, n=2)


def test_with_int8_weights_the_self_test_compares_with_the_whole_rounded_model(
    tmp_path: Path,
) -> None:
    folder = tiny.save(tiny.build("granite").to(torch.bfloat16), tmp_path)
    pair = rank_pair.pair()
    pair.prepare(folder, "int8")
    loaded, ranks = rank_pair.load(folder, "int8"), pair.rank_group
    _, result = selftest.prepare_rank(loaded, ranks, rank_pair.CPU, quantization="int8")
    assert result is not None
    assert result.delta < result.tolerance / 2, "no further than transformers' own bfloat16"
    assert result.rounding is not None
    # The same as the rounding of one rank's model.
    one = selftest.prepare_and_test(loading.load(folder), "auto", "int8")[1].rounding
    assert one is not None
    assert result.rounding.moved == pytest.approx(one.moved, rel=1e-3)
    assert result.rounding.worst > result.delta


def test_int8_weights_of_layers_that_do_not_fuse_are_refused_on_every_rank(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("exaone4"), tmp_path)
    pair = rank_pair.pair()
    pair.prepare(folder, "int8")
    loaded = rank_pair.load(folder, "int8")
    with pytest.raises(ConfigError, match="int8 needs every layer of 'exaone4' fused: fused 0/"):
        selftest.prepare_rank(loaded, pair.rank_group, rank_pair.CPU, quantization="int8")
    assert run(rig("llama", "ranks")).steps > 0


@pytest.mark.parametrize(
    ("family", "changes"), [("mixtral", {}), ("apertus", {}), ("cohere", {"hidden_act": "tanh"})]
)
def test_on_two_ranks_a_layer_is_fused_around_an_mlp_of_the_models_own(
    family: str, changes: dict[str, Any]
) -> None:
    """Which sums what it gives itself, also beside attention."""
    engine = rig(family, "ranks layers", **changes)
    assert engine.fusion.around_mlp == engine.fusion.layers
    stats = run(engine, n=3).stats
    assert stats is not None
    assert stats.prefix_hits > 0


@pytest.mark.parametrize("kernels", ["ranks cpu", "ranks layers"])
def test_a_layer_that_does_not_fit_on_one_rank_is_fused_on_none(kernels: str) -> None:
    """Nor around an MLP that only one of them takes apart."""
    engine = rig("llama", kernels, odd=1)
    fused = "fused 2/3 layers (layer 1: it does not fit on another rank)"
    assert str(engine.fusion) == fused
    run(engine)


def test_a_layer_that_gives_other_results_on_one_rank_is_fused_on_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison fails here, and nobody waits for a sum of the other."""
    monkeypatch.setattr(Noise, "explains", lambda *_: False)
    engine = Rig("llama", "ranks cpu", head_dim=32)
    assert engine.fusion.fused == 0
    assert "layer 0: its fused layer gives other results" in engine.fusion.reason
    monkeypatch.undo()
    run(engine)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("granite", torch.bfloat16)]
)
def test_ranks_fuse_at_start_and_the_self_test_compares_with_the_whole_model(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.build(family).to(dtype), tmp_path)
    pair = rank_pair.pair()
    pair.prepare(folder)
    served, result = selftest.prepare_rank(rank_pair.load(folder), pair.rank_group, rank_pair.CPU)
    assert str(served.fusion).startswith("fused 3/3 layers")
    assert result is not None
    assert result.delta < result.tolerance / 2, "no further than transformers' own type"


@pytest.mark.parametrize("kernels", ["ranks", "ranks layers"])
def test_what_is_offloaded_comes_back_on_both_ranks(kernels: str) -> None:
    stats = run(rig("llama", kernels), SCARCE).stats
    assert stats is not None
    assert stats.offloads > 0


def test_log_probabilities_of_prompts_are_those_of_one_rank() -> None:
    """They come from passes that return more logits than rows."""
    one, two = (run(rig("llama", kernels), prompt_logprobs=2) for kernels in ("torch", "ranks"))
    assert one.prompts.keys() == two.prompts.keys() != set()
    for key, scores in one.prompts.items():
        for a, b in zip(scores, two.prompts[key], strict=True):
            assert (a.token, a.rank) == (b.token, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("kernels", ["ranks", "ranks cpu", "ranks layers", *QUANTIZED_RANKS])
def test_each_rank_measures_what_is_planned(kernels: str) -> None:
    engine, pair = rig("llama", kernels), rank_pair.pair()
    config = EngineConfig(quantization=QUANTIZED.get(kernels, "none"))
    planned = weights(rank_pair.shape_of(rig("llama").model.model), config, 2, "cpu")
    pair.hold(kernels, family="llama")
    for measured in (engine.model.weight_bytes, pair.weight_bytes()):
        assert measured == pytest.approx(planned, rel=0.02)
