"""Models of which no code of their own runs: what lies around their decoder layers."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.conversion.fusion import fuse, quantize_weights
from fairlead_runtime.device.conversion.rounding import SAMPLES
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models.quantized import QuantizedEmbedding, QuantizedLinear
from support import tiny
from support.engine_rig import attend_once, paged
from support.full import LONG_FORM

PROMPTS: list[dict[str, list[int]]] = [
    {"prompt_token_ids": [7 * i % 290 for i in range(n)]} for n in (3, 40, 17)
]
# A table of positions, a cap of the logits, a factor of them, a head of its own with a bias, two
# rotary embeddings and a scaled embedding.
FORMS = ("llama", "gpt2", "gemma2", "cohere", "phi", "gemma3_text")


weak_storage: Any = reductions.StorageWeakRef  # torch does not annotate it


def kernels_of(model: PagedModel) -> tuple[Any, Any]:
    try:
        choice = pick(model.heads, model.kinds, model.device, "cpu")
    except NotAvailableError as error:
        pytest.skip(str(error))
    return choice.attention, choice.operations


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES if LONG_FORM else FORMS)
def test_a_head_in_int8_and_embeddings_that_share_it_are_those_of_transformers(
    family: str, tied: bool
) -> None:
    model = paged(family, tie_word_embeddings=tied)
    attention, operations = kernels_of(model)
    before, size = selftest.Expected.of(model, 512), model.weight_bytes
    quantize_weights(model, "int8", head=True)
    if not isinstance(model.model.get_output_embeddings(), QuantizedLinear):
        pytest.skip(f"{family}: not all of its layers are fused")
    embedding = model.model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding) == tied
    expected = selftest.Expected.of(model, 512)
    assert not torch.equal(before.logits[0], expected.logits[0])
    fused = fuse(model, operations)
    assert str(fused) == f"fused {fused.layers}/{fused.layers} layers, int8 weights, int8 head"
    # On a processor with VNNI products of int8 weights round their inputs to 16 bits.
    allowed = 2e-3 if operations.int8_rounding else 1e-4
    assert selftest.check(model, attention, expected, allowed).delta < allowed
    assert model.weight_bytes < (0.6 if tied else 0.75) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_takes_the_place_of_the_loaded_one(tied: bool, dtype: torch.dtype) -> None:
    model = paged("llama", dtype=dtype, tie_word_embeddings=tied)
    _, operations = kernels_of(model)
    head: Any = model.model.get_output_embeddings()
    embedding: Any = model.model.get_input_embeddings()
    loaded = weak_storage(head.weight.untyped_storage())
    rows = embedding.weight.data.clone()
    assert fuse(model, operations).head == str(dtype).removeprefix("torch.")
    assert head.weight.numel() == 0
    if tied:
        assert embedding.weight.numel() == 0
    else:
        assert torch.equal(embedding.weight, rows)
    assert embedding.weight.dtype is dtype
    assert loaded.expired(), "its memory is free"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES if LONG_FORM else FORMS)
def test_a_model_in_bfloat16_computes_in_float32_from_its_embeddings_to_its_logits(
    family: str, tied: bool
) -> None:
    settings: dict[str, Any] = {"tie_word_embeddings": tied}
    model, wide = (paged(family, bfloat16=True, **settings) for _ in range(2))
    attention, operations = kernels_of(model)
    parameters = list(model.model.parameters())
    vectors = sum(p.numel() for p in parameters if p.dim() == 1)
    expected, size = selftest.Expected.of(model, 512), model.weight_bytes
    fused = fuse(model, operations)
    if fused.fused < fused.layers:
        pytest.skip(f"{family}: not all of its layers are fused")
    count = fused.layers
    assert str(fused) == f"fused {count}/{count} layers, bfloat16 weights, bfloat16 head"
    assert all(p.dtype is torch.bfloat16 for p in parameters)
    # Vectors in float32, the last norm's also as the model has it; the head's rows to a whole
    # panel, and a factor for each.
    width: int = model.model.config.get_text_config().hidden_size
    more = model.weight_bytes - size
    assert more <= 2 * (vectors + 2 * width + 31 * width) + 4 * model.logits_width
    # transformers' own logits are rounded after every operation.
    assert 0 < selftest.check(model, attention, expected).delta < 0.2

    model.heads = replace(model.heads, dtype=torch.float32)  # a cache that rounds nothing
    wide.model.float()
    ids = torch.arange(40) * 37 % model.vocabulary
    got = attend_once(model, attention, ids)
    with torch.inference_mode(), wide.plain() as plain:
        want = plain(input_ids=ids[None], use_cache=False).logits[0, -1:]
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.std()))


def test_ends_in_bfloat16_that_do_not_fit_stay_as_they_are() -> None:
    model, plain = (paged("llama", bfloat16=True) for _ in range(2))
    assert "its norm" in breaks(model, "norm")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        ours, theirs = model.model.get_parameter(name), plain.model.get_parameter(name)
        assert ours.dtype is torch.bfloat16
        assert torch.equal(ours, theirs)


def breaks(model: PagedModel, change: str) -> str:
    """What is said of a model that does something else around its layers."""
    inner: Any = model.model.model
    if change == "embedding":
        inner.embed_tokens.register_forward_hook(lambda _m, _i, out: out.square())
    elif change == "norm":
        inner.norm.register_forward_hook(lambda _m, _i, out: out + 1)
    elif change == "head":
        model.model.lm_head.register_forward_hook(lambda _m, _i, out: out.sin())
    elif change == "between":
        inner.norm.register_forward_pre_hook(lambda _m, given: (given[0] * 2,))
    _, operations = kernels_of(model)
    fused = fuse(model, operations)
    assert fused.fused == 3
    assert model.full_pass is None
    return fused.head_reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("embedding", "do not begin with its embeddings"),
        ("norm", "its norm"),
        ("head", "its head does not multiply"),
        ("between", "no norm follows"),
    ],
)
def test_a_model_that_does_something_else_keeps_its_code(change: str, reason: str) -> None:
    assert reason in breaks(paged("llama"), change)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_that_differs_is_not_taken(
    tied: bool, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged("llama", tie_word_embeddings=tied)
    attention, operations = kernels_of(model)
    if quantized:
        quantize_weights(model, "int8", head=True)
    expected = selftest.Expected.of(model, 512)
    monkeypatch.setattr(recognize_ends, "exact", lambda *_: 2.0)
    fused = fuse(model, operations)
    # Rows of tied embeddings, too, would be served with that factor.
    where = "head by" if quantized or tied else "float32 head in"
    assert str(fused).endswith(f", {where} the model's code (its packed ends give other logits)")
    allowed = 2e-3 if quantized and operations.int8_rounding else 1e-4
    assert selftest.check(model, attention, expected, allowed).delta < allowed


@pytest.mark.parametrize("explained", [1, SAMPLES, None])
def test_ends_that_one_sample_does_not_explain_are_compared_with_the_noise_of_all(
    explained: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged("llama")
    attention, operations = kernels_of(model)
    expected = selftest.Expected.of(model, 512)
    made, taken = list[weakref.ref[Any]](), list[int]()
    logits_and_noise, make = recognize_ends.logits_and_noise, recognize_ends.FusedModel

    def counted(*args: Any) -> Any:
        assert not any(ref() for ref in made), "the head is held twice"
        taken.append(args[-1])
        return logits_and_noise(*args)

    def weakly(*args: Any) -> Any:
        fused_model = make(*args)
        made.append(weakref.ref(fused_model))
        return fused_model

    monkeypatch.setattr(recognize_ends, "logits_and_noise", counted)
    monkeypatch.setattr(recognize_ends, "FusedModel", weakly)
    monkeypatch.setattr(recognize_ends, "agrees", lambda *_: taken[-1] == explained)
    fused = str(fuse(model, operations))
    assert taken == ([1] if explained == 1 else [1, SAMPLES])
    assert fused.endswith(", float32 head" if explained else "(its packed ends give other logits)")
    assert selftest.check(model, attention, expected, 1e-4).delta < 1e-4


def model_of(llm: LLM) -> PagedModel:
    runner: Any = llm.built_engine.engine._executor
    model: PagedModel = runner._model
    return model


def generated(llm: LLM, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, sampling, use_tqdm=False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_steps_make_no_logits_and_choose_the_same_tokens(
    dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny.build("llama").to(dtype), tmp_path / "model")
    with LLM(str(folder), max_requests=4) as llm:
        if model_of(llm).full_pass is None:
            pytest.skip("no C++ kernels")
        made: list[int] = []
        logits = recognize_ends.FusedModel.logits

        def counted(self: recognize_ends.FusedModel, ids: Tensor, *step: Any) -> Tensor:
            made.append(len(ids))
            return logits(self, ids, *step)

        monkeypatch.setattr(recognize_ends.FusedModel, "logits", counted)
        greedy = generated(llm, temperature=0.0)
        assert not made
        # The same tokens with their log-probabilities, which need the logits.
        assert generated(llm, temperature=0.0, logprobs=1) == greedy
        assert made
        assert generated(llm, temperature=1.0, top_k=1) == greedy
        assert generated(llm, temperature=0.0, logit_bias={greedy[0][0]: -100.0}) != greedy


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Any) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path / "model")
    with LLM(str(folder), max_requests=4) as llm:
        model: Any = model_of(llm)
        if model.full_pass is None:
            pytest.skip("no C++ kernels")
        healthy = generated(llm, temperature=0.0)
        embed = model.full_pass._embed

        def poisoned(ids: Tensor, positions: Tensor) -> Tensor:
            x: Tensor = embed(ids, positions)
            x[ids == 7 * 39 % 290] = torch.nan  # only in the second prompt
            return x

        model.full_pass._embed = poisoned
        results = llm.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        assert [one.outputs[0].finish_reason for one in results] == ["length", "error", "length"]
        assert [results[i].outputs[0].token_ids for i in (0, 2)] == [healthy[0], healthy[2]]


def test_the_head_takes_the_sampling_rows_of_layers_that_run_one_by_one() -> None:
    """As they do beside attention that is not of the C++ kernels."""
    model = paged("llama")
    _, operations = kernels_of(model)
    expected = selftest.Expected.of(model, 512)
    fuse(model, operations)
    assert model.full_pass is not None
    attention = pick(model.heads, model.kinds, model.device, "torch").attention
    assert selftest.check(model, attention, expected, 1e-4).delta < 1e-4


def test_an_embedding_of_quantized_rows_dequantizes_them() -> None:
    rounded, ids = quantize(torch.randn(11, 6)), torch.tensor([[3, 10, 0]])
    found = QuantizedEmbedding(rounded, 2.0)(ids)
    torch.testing.assert_close(found, 2 * rounded.dequantize()[ids[0]][None])
