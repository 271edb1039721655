"""What ``deterministic`` refuses, and the canary that shows what it promises."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairlead_kernels.choice.backend import BackendChoice, pick
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.gpu import triton_package
from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.build import checks
from fairlead_runtime.commands.refusals import refusal_for
from fairlead_runtime.device.conversion import fusion as fusion_module
from fairlead_runtime.device.conversion.fixed_order_ends import use_fixed_order_ends
from fairlead_runtime.device.conversion.fusion import Fusion, fuse
from fairlead_runtime.device.conversion.pack_states import pack_states
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError
from fairlead_runtime.device.conversion.recording_pass import decoder_layers
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import determinism
from fairlead_runtime.llm import LLM
from fairlead_runtime.models.model_error import CanaryError
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from support import tiny, tiny_states
from support.engine_rig import paged
from support.full import LONG_FORM
from support.operation_cases import fixed_attention, fixed_operations

DEMO = Path(checks.__file__).parents[1] / "demo"
CPU = DeviceFacts("cpu", 8 * GIB)


def picked(model: PagedModel, *, deterministic: bool = True) -> BackendChoice:
    try:
        return pick(model.heads, model.kinds, model.device, deterministic=deterministic)
    except NotAvailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def served() -> tuple[PagedModel, AttentionBackend, Fusion]:
    model = paged("llama", bfloat16=True)
    choice = picked(model)
    return model, choice.attention, fuse(model, choice.operations)


@pytest.mark.parametrize("longest", [512, 60, 1])
def test_the_canary_lives_where_sums_have_one_order(served: Any, longest: int) -> None:
    model, attention, fusion = served
    determinism.check(model, fusion)
    result = determinism.canary(model, attention, longest)
    assert str(result) == (
        f"canary: {min(longest, 150)} tokens have the same logits alone and beside 28 other "
        "requests"
    )


def test_the_canary_dies_of_kernels_that_sum_by_what_is_in_the_batch(served: Any) -> None:
    model, _, _ = served
    usual = picked(model, deterministic=False).attention
    with pytest.raises(CanaryError, match=r"logits of 'llama' at token \d+ differ by \d") as error:
        determinism.canary(model, usual, 512)
    refusal = refusal_for(error.value)
    assert refusal is not None
    assert (refusal.exit_code, refusal.code) == (3, "SelfTestFailed")
    assert "without --deterministic" in refusal.hint


def test_the_canary_dies_of_one_bit_in_one_token_of_the_crowd(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attention, _ = served
    forward, calls = model.forward, itertools.count()

    def changed(*arguments: Any) -> Tensor:
        logits: Tensor = forward(*arguments)
        if next(calls) == 5:  # of the crowd's chunks the one of 70 tokens
            logits.view(torch.int32)[33, 7] ^= 1
        return logits

    monkeypatch.setattr(model, "forward", changed)
    with pytest.raises(CanaryError, match="at token 76 differ"):
        determinism.canary(model, attention, 512)


def test_the_canary_dies_of_another_likeliest_token(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attention, _ = served
    likeliest = model.likeliest

    def changed(*arguments: Any) -> tuple[Tensor, Tensor]:
        values, tokens = likeliest(*arguments)
        return values, (tokens + 1) % model.vocabulary

    monkeypatch.setattr(model, "likeliest", changed)
    with pytest.raises(CanaryError, match="the likeliest token 1 of a request is another one"):
        determinism.canary(model, attention, 512)


def test_a_model_is_refused_of_which_torch_computes_a_part(served: Any) -> None:
    model, _, fusion = served
    for changed, reason in (
        (replace(fusion, fused=1, reason="layer 0: it is odd"), r"layers of 'llama' .* it is odd"),
        (replace(fusion, head_reason="no norm follows"), "the last norm and the head .* no norm"),
        (replace(fusion, head=""), "the head of 'llama' are computed by torch: they are not reco"),
    ):
        with pytest.raises(ConfigError, match=f"--deterministic: .*{reason}"):
            determinism.check(model, changed)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EngineConfig(kernels="torch"), "plain torch sums in an order that depends on the batch"),
        (EngineConfig(dtype="float16"), "weights in float32 or bfloat16, the model in float16"),
        (EngineConfig(cache_dtype="fp8"), "their cache is in float32 or bfloat16, not in fp8"),
    ],
)
def test_a_start_is_refused_by_name_where_no_kernels_have_one_order(
    config: EngineConfig, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--deterministic: .*{reason}") as error:
        checks.check(DEMO, replace(config, deterministic=True), CPU)
    assert (error.value.field, error.value.hint) == ("deterministic", "use false")
    refusal = refusal_for(error.value)
    assert refusal is not None
    assert refusal.exit_code == 2


def test_a_gpu_without_triton_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_module: str) -> NoReturn:
        raise NotAvailableError("Triton is not installed")

    monkeypatch.setattr(triton_package, "load", missing)
    config = EngineConfig(dtype="bfloat16", deterministic=True)
    gpu = DeviceFacts("cuda", 80 * GIB)
    with pytest.raises(ConfigError, match="--deterministic: Triton is not installed"):
        checks.check(DEMO, config, gpu)
    monkeypatch.setattr(triton_package, "load", lambda _module: None)
    checks.check(DEMO, config, gpu)
    with pytest.raises(ConfigError, match="--deterministic: plain torch sums in an order that"):
        checks.check(DEMO, replace(config, kernels="torch"), gpu)


def test_a_deterministic_llm_in_bfloat16_gives_a_prompt_one_text_in_any_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    picked(paged("llama", bfloat16=True))
    settings = {"dtype": "bfloat16", "deterministic": True, "max_model_len": 128, "num_blocks": 64}
    with caplog.at_level("INFO"), LLM(str(DEMO), **settings) as llm:
        assert "canary: 128 tokens have the same logits alone" in caplog.text
        one = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
        texts = [
            [output.outputs[0].text for output in llm.generate(prompts, one, use_tqdm=False)]
            for prompts in (["Once"], ["A cat sat", "Once", "The old man and the sea", "Why"])
        ]
    assert texts[0][0] == texts[1][1]


# -- layers with states: transformers' code around products and operations in C++


def with_states(family: str, **settings: Any) -> tuple[PagedModel, AttentionBackend, Fusion]:
    model = paged(family, num_hidden_layers=1, intermediate_size=203, **settings)
    choice = picked(model)
    states = pack_states(model, choice.states)
    fusion = fuse(model, choice.operations, every_product=True)
    return model, choice.attention, replace(fusion, states=states)


def test_the_canary_lives_in_layers_with_states_and_dies_of_one_bit_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attention, fusion = with_states("qwen3_5_text", layer_types=["linear_attention"])
    determinism.check(model, fusion)
    assert "60 tokens have the same" in str(determinism.canary(model, attention, 60))
    compute = CpuStates.gated_delta_rule

    def changed(self: CpuStates, *arguments: Any, **settings: Any) -> Tensor:
        out = compute(self, *arguments, **settings)
        if len(out) > 60:  # the crowd's; of the request, behind those before it
            out.view(torch.int32)[sum(count for _, count in determinism.BEFORE), 0, 0] ^= 256
        return out

    monkeypatch.setattr(CpuStates, "gated_delta_rule", changed)
    with pytest.raises(CanaryError, match="logits of 'qwen3_5_text' at token"):
        determinism.canary(model, attention, 60)


def test_a_sum_of_torch_beside_states_whose_order_nobody_knows_is_refused_by_name() -> None:
    model, attention, fusion = with_states("qwen3_5_text", layer_types=["linear_attention"])
    determinism.check(model, fusion)
    layer: Any = decoder_layers(model)[0]
    mlp = layer.mlp.forward  # one call of the C++ kernels
    layer.mlp.forward = lambda x: torch.softmax(mlp(x), dim=1)
    problem = r"a part of 'qwen3_5_text' .* aten::_softmax over another"
    with pytest.raises(ConfigError, match=problem) as error, determinism.refusing(model):
        determinism.canary(model, attention, 60)
    assert error.value.field == "deterministic"


def test_states_that_no_operation_in_cpp_keeps_are_refused_by_name() -> None:
    model, _, fusion = with_states("mamba2", hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"in C.. in 0/1 layers .layer 0: activation: 'gelu'"):
        determinism.check(model, fusion)


@pytest.mark.parametrize("family", ["falcon_mamba", "bamba"])
def test_a_deterministic_llm_with_states_gives_a_prompt_one_text_in_any_batch(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picked(paged("llama"))
    path = str(tiny.save(tiny_states.build(family, num_hidden_layers=2), tmp_path))
    sizes = {"max_model_len": 64, "num_blocks": 100, "block_size": 8, "max_batch_tokens": 64}
    with caplog.at_level("INFO"), LLM(path, deterministic=True, max_requests=4, **sizes) as llm:
        assert "canary: 64 tokens have the same logits alone" in caplog.text
        one = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
        texts = [
            [output.outputs[0].text for output in llm.generate(prompts, one, use_tqdm=False)]
            for prompts in (["17 4 9"], ["3 5", "17 4 9", "17 4 9 5 8", "6"])
        ]
        report = llm.built_engine.memory.as_dict()
    assert texts[0][0] == texts[1][1]
    terms = {term["name"]: term for term in report["terms"]}
    rotary = 32 if family == "bamba" else 0  # bytes of frequencies, which no file has
    terms["weights"]["measuredBytes"] -= rotary
    for name in ("weights", "activations", "logits", "kv"):
        assert terms[name]["measuredBytes"] <= terms[name]["plannedBytes"]


# -- the path of GPUs, in Triton's interpreter

# The interpreter takes ten seconds for each layer.
FAMILIES_IN_TRITON = ("llama", "gemma2", "gpt2") if LONG_FORM else ("llama",)
FEW_LAYERS: dict[str, Any] = {} if LONG_FORM else {"num_hidden_layers": 1}


@pytest.fixture(scope="module", params=FAMILIES_IN_TRITON)
def on_triton(request: pytest.FixtureRequest) -> tuple[PagedModel, AttentionBackend, Fusion]:
    model = paged(request.param, bfloat16=True, **FEW_LAYERS)
    operations = fixed_operations()
    return model, fixed_attention(model.heads), fuse(model, operations)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_triton_the_canary_lives_and_no_product_but_of_one_term_is_torchs(
    on_triton: Any,
) -> None:
    model, attention, fusion = on_triton
    assert (fusion.fused, fusion.head, fusion.head_reason) == (fusion.layers, "bfloat16", "")
    determinism.check(model, fusion)
    with Products() as products:
        determinism.canary(model, attention, 45)
    # A rotary embedding multiplies a position by a frequency: a sum of one term.
    assert products.terms <= {1}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Notes the terms of the sums of torch's matrix products, and other sums by a 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self.terms: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if any(word in name for word in ("mm", "bmm", "matmul", "linear", "dot", "attention")):
            self.terms.add(args[0].shape[-1])
        if any(word in name for word in ("mean", "aten.sum", "norm", "softmax", "var")):
            self.terms.add(0)
        return func(*args, **(kwargs or {}))


def test_a_last_norm_or_head_that_gives_other_logits_keeps_the_models_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, operations = paged("llama", bfloat16=True), fixed_operations()
    norm = operations.norm

    def wrong(x: Tensor, given: Any, residual: Tensor | None = None) -> Any:
        out, total = norm(x, given, residual)
        return (out if out.dtype is torch.bfloat16 else out * 1.01), total

    monkeypatch.setattr(operations, "norm", wrong)
    layers, step = decoder_layers(model), fusion_module._ScratchPass
    with pytest.raises(DoesNotFitError, match="its last norm and head give other logits"):
        use_fixed_order_ends(model, layers, operations, step(model))
    ends = [model.model.get_output_embeddings(), *model.model.modules()]
    assert not any("forward" in vars(module) for module in ends)
