"""The self-test before readiness: our packed, paged forward pass equals plain transformers'.

Owns three prompts of different lengths, run through the path that serves requests (chunks and
single tokens mixed in one step, blocks scattered over the cache, a fork with a copied block) and,
each alone, through eager transformers. It catches what an allow-list cannot: a family whose
attention needs something that ours lacks, a broken kernel, a window that prompts reach; ``windows``
has those that they do not.

The cache starts full of NaN, so reading one token that is not the row's own shows as an infinite
difference.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fairlead_kernels.choice.backend import BackendChoice, int4_products, pick
from fairlead_kernels.choice.experts import choose
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.packages.humming_memory import UNPACKAGED
from fairlead_kernels.packages.humming_products import HummingProducts
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_kernels.proofs.attention_proof import BLOCK_SIZE as PROVEN
from fairlead_runtime.device.conversion.fusion import (
    Fusion,
    fuse,
    quantize_weights,
    quantized_elements,
)
from fairlead_runtime.device.conversion.pack_states import pack_states
from fairlead_runtime.device.conversion.recording_pass import (
    decoder_layers,
    modules_in_float32,
)
from fairlead_runtime.device.conversion.rounding import Changes
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model import paged_model
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.experts import samples_of
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.proof import determinism, windows
from fairlead_runtime.device.proof.fp8_reference_cache import rounded_cache
from fairlead_runtime.device.ranks import shards
from fairlead_runtime.models import families
from fairlead_runtime.models.loading import LoadedModel
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row, Work
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.sizing.config_json import EXPERTS
from fairlead_runtime.sizing.weight_bytes import packaged

Value = TypeVar("Value")
Products = tuple[HummingProducts | None, str]

BLOCK_SIZE = 4
LENGTHS = (176, 9, 14)
# Windows are tested as far as prompts of at most this length leave them.
LONGEST = 160

# Difference of logits, in units of their spread, that rounding explains: in float32 the worst
# token's, in half precision the root mean square over tokens. Measured over the served families, 3
# to 32 layers, random weights: 3e-6 in float32, 0.005 in float16, 0.04 in bfloat16 at the worst
# token. Planted faults (a window wrong by one, no softcap, no sinks) move tokens by 0.4 to 1.0 in
# every type: tests/functional/engine/test_paged_model.py. No kernel's table has these: they are
# shares of a spread behind all layers.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.0125, torch.bfloat16: 0.05}
# The same with experts, of which rounding may choose another.
EXPERTS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
# Trained weights are moved further: bfloat16 moves transformers' own logits of Gemma 3 270M and of
# SmolLM2 by 0.04 to 0.2, float32 SmolLM2's by 0.003 with some tokens. A model may differ by so many
# times what rounding does to it on the same tokens, where that is more than TOLERANCE.
REFERENCE_FACTOR = 2.0
# The same of transformers' logits with quantized and with plain weights, as a root mean square over
# all tokens: what the format itself may cost. Unrelated logits differ by 1.4, those of random
# weights, which rounding moves further, by up to 0.51 and 0.79 at the worst token:
# docs/design/0011-quantization.md. Single tokens of Gemma 3 270M differ by 1.3 with int8.
ROUNDING: dict[Format, float] = {"int8": 0.7, "fp8": 1.1}
# TOLERANCE of the median token with an fp8 cache. Two keys that differ by a little become two
# numbers of fp8 where the middle between these lies between them: so rounding is magnified, at
# single tokens of trained models to more than fp8 itself costs.
CACHE_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.3}
# What that format itself may cost, as ROUNDING: tiny random models differ by 0.04 to 0.1, with keys
# that it cannot hold by 0.96.
CACHE_ROUNDING = 0.7
# TOLERANCE in float32 where products round what they multiply to 16 bits, a root mean square over
# tokens: SmolLM2 and Gemma 3 270M differ by 0.002 to 0.007 with ten draws of random tokens, tiny
# random models by less than 0.001.
ROUNDED_TOLERANCE = 0.02
# Of the text with which the first prompt begins, as many tokens are predicted from all before.
SCORED = 32
# A model whose perplexity on that text is at most its vocabulary to the power of PREDICTS is judged
# by that: a format may multiply it by PERPLEXED, whatever logits do. int8 multiplies SmolLM2's by
# 0.98 and Gemma 3 270M's by 1.0. Random weights predict nothing, and are judged by their logits.
PREDICTS, PERPLEXED = 0.5, 1.5
# Where rounding can change a router's choice, only this many last tokens count: see _distances.
LAST = 5


# The share of the prompts' tokens that rounding moves furthest, which half precision and rounded
# inputs leave out: after random tokens a trained model may be of two minds, and bfloat16 moves
# Gemma 3 270M's logits by 0.6 at a token where transformers' own moves them by 0.04.
FURTHEST = 0.1


class UnexplainedError(SelfTestError):
    """Logits differ by more than rounding explains in general, and are numbers; what it does to
    this model was not computed.
    """


class NotPackedError(SelfTestError):
    """A family that is not in the table does not run packed at all."""

    def __init__(self, error: Exception, model_type: str) -> None:
        text = " ".join(str(error).split())[:300]
        super().__init__(
            f"self-test: {model_type!r} does not run packed on a paged cache: "
            f"{type(error).__name__}: {text}"
        )


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """``delta``: the difference of logits in units of their spread; ``tolerance``: the largest
    allowed. ``cached``: the same two of the median token with an fp8 cache, where ``delta``
    is without. ``rounding``: what weights that were quantized at load cost; ``cache``: what an fp8
    cache costs; ``activations``: the difference while products round activations to fp8, of which
    ROUNDING is allowed; ``canary``: that of ``deterministic``.
    """

    delta: float
    tolerance: float
    tokens: int
    backend: str
    rounding: "Rounding | None" = None
    activations: float | None = None
    cached: tuple[float, float] | None = None
    cache: "Rounding | None" = None
    canary: determinism.CanaryResult | None = None

    def __str__(self) -> str:
        rounding = "".join(f"; {loss}" for loss in (self.rounding, self.cache) if loss)
        if self.cached is not None:
            delta, tolerance = self.cached
            rounding += (
                f"; with an fp8 cache {delta:.2g} of {tolerance:.2g} allowed at the median token"
            )
        if self.activations is not None:
            allowed = ROUNDING["fp8"]
            rounding += f"; with fp8 activations {self.activations:.2g} of {allowed:g} allowed"
        return (
            f"self-test: {self.tokens} tokens, logits differ by {self.delta:.2g} of "
            f"{self.tolerance:.2g} allowed ({self.backend} attention){rounding}"
            f"{f'; {self.canary}' if self.canary else ''}"
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far it moves transformers' own logits that ``subject`` is rounded, in units of their
    spread: the root mean square over the tokens, of the ``allowed``, and the ``worst`` token's.
    ``same``: the share of tokens whose likeliest next token stays. ``perplexity``: of a text before
    and after that, in float32; where the model's type is another, once more in that. ``by_text``:
    the perplexity after it is what may be as much as ``allowed``.
    """

    subject: str
    moved: float
    worst: float
    same: float
    allowed: float
    perplexity: tuple[float, ...] = ()
    by_text: bool = False

    def __str__(self) -> str:
        limit = f" of {self.allowed:.3g} allowed"
        text = (
            f"{self.subject} move logits by {self.moved:.2g}{limit * (not self.by_text)}, "
            f"likeliest token the same in {100 * self.same:.0f} % "
            f"(those of one token by {self.worst:.2g})"
        )
        if not self.perplexity:
            return text
        before, after, *half = (f"{value:.3g}" for value in self.perplexity)
        in_half = "".join(f" ({value} by transformers in half precision)" for value in half)
        after += limit * self.by_text
        return f"{text}; perplexity of a text {before} before and {after} after{in_half}"


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model on the kernels that serve it."""

    model: PagedModel
    choice: BackendChoice
    fusion: Fusion


def prepare_and_test(
    loaded: LoadedModel,
    kernels: str = "auto",
    quantization: str = "none",
    *,
    fp8_cache: bool = False,
    deterministic: bool = False,
    block_size: int = PROVEN,
    compilers: int = 1,
    judged: bool = True,
    report: Report = unreported,
) -> tuple[ServedModel, SelfTestResult]:
    """The model on our paged attention and on the kernels that serve it, and the result. Raises
    ModelError, SelfTestError, or ConfigError where the kernels that are asked for cannot serve the
    model, or not all layers can have quantized weights.

    With ``quantization`` a plain checkpoint's layers are rounded to it first, and the result says
    how far that moves transformers' own logits; a quantized one's are as they are. transformers
    computes the expected logits with the quantized weights, and for an ``fp8_cache`` with rounded
    keys and values; the result says what that costs, too. It computes all of them in float32: a
    model in bfloat16 may be as far from these as transformers' own bfloat16 is, REFERENCE_FACTOR
    times.

    With ``deterministic`` on kernels whose sums have one order, which the canary shows.
    ``block_size``: of the cache that will be served, for which kernels may be compiled;
    ``compilers``: how many compilers of a package's 4-bit products may run at a time; ``report``
    hears which part runs, and of its layers. ``judged`` False leaves out what float32's rounding
    does to the model, half of transformers' passes, and raises UnexplainedError where the result
    depends on that: the model is then to be loaded anew, since fused layers have its weights.
    """
    name = str(loaded.config.model_type)
    report("kernels")
    with _packed_or_not(name):
        model = paged_model.prepare(loaded, fp8_cache=fp8_cache)
        settings: dict[str, Any] = {"deterministic": deterministic, "block_size": block_size}
        choice = _pick(model, kernels, **settings)
        quantized = loaded.shape.held or quantization
        to = None if loaded.shape.quantized else _rounded_to(quantization)
        if model.states and loaded.shape.held:
            _check_linears(model, loaded.shape.layer_matrices, "use the unquantized checkpoint")
        reference = _ReferenceLogits.of(
            model,
            loaded,
            to,
            _rounded_weights(model, choice, to, loaded.shape.layer_matrices),
            _input_rounding(choice, quantized),
            report,
            judged=judged or model.heads.dtype is not torch.float32,
        )
        report("kernels")
        products = _products(loaded, quantized, choice, model, compilers)
        fusion, choice = _fused(model, choice, kernels, None, products, report, **settings)
        _check_fused(loaded, quantized, fusion)
        report("self_test")
        fp8, length = quantized == "fp8", loaded.max_model_len
        if deterministic:
            determinism.check(model, fusion)
        with determinism.refusing(model):
            result = _check(model, choice, reference, length, fp8=fp8)
            if deterministic:
                canary = determinism.canary(model, choice.attention, length)
                result = replace(result, canary=canary)
        return ServedModel(model, choice, fusion), result


def _check_fused(loaded: LoadedModel, quantized: str, fusion: Fusion) -> None:
    """Raise ConfigError for quantized weights in a layer that transformers' code computes, but of
    models with states: there its linear layers multiply by them, and none was left out.
    """
    if loaded.shape.states:
        return
    if quantized != "none" and fusion.fused < fusion.layers:
        raise ConfigError(
            "quantization",
            f"{quantized} needs every layer of {loaded.config.model_type!r} fused: {fusion}",
            "use the unquantized checkpoint" if loaded.shape.quantized else "use none",
        )


@contextmanager
def _rounded_weights(
    model: PagedModel, choice: BackendChoice, to: Format | None, matrices: int
) -> Iterator[None]:
    """Round a model's weights, in the ``with`` block and after it, ``to`` this format, if any: in
    its layers so many elements of ``matrices``.
    """
    if to is not None:
        operations = choice.operations
        packs_head = operations is not None and operations.model_operations is not None
        head = packs_head and model.heads.dtype is torch.float32
        quantize_weights(model, to, head=head)
        if model.states:
            _check_linears(model, matrices, "use none")
    yield


def _check_linears(model: PagedModel, matrices: int, fix: str) -> None:
    """Raise ConfigError, with what to do, where a model with states, whose linear layers are
    quantized, has other matrices than ``matrices`` elements in these, or where its code reads
    weights of theirs itself.
    """
    name, problem = str(model.model.config.model_type), ""
    if (count := quantized_elements(model)) != matrices:
        problem = f"{count} of {matrices} weights in matrices of {name!r} are in linear layers"
    try:
        model.probe_again()
    except (TypeError, AttributeError, RuntimeError) as error:
        problem = f"the code of {name!r} reads weights itself: {type(error).__name__}"
    if problem:
        raise ConfigError("quantization", problem, fix)


class _Pass(NamedTuple):
    """Logits are computed by this attention, with or without an fp8 cache, and by products that
    round activations to fp8 or do not.
    """

    attention: AttentionBackend
    fp8_cache: bool
    fp8_activations: bool = False


def _check(
    model: PagedModel,
    choice: BackendChoice,
    reference: "_ReferenceLogits",
    max_model_len: int,
    *,
    fp8: bool,
) -> SelfTestResult:
    """``check`` in every pass, what it costs that weights and cache are rounded, and the windows
    that no pass reaches.
    """

    def compare(step: _Pass) -> SelfTestResult:
        expected = reference.cached if step.fp8_cache and reference.cached else reference.expected
        allowed = ROUNDING["fp8"] if step.fp8_activations else None
        return check(model, step.attention, expected, allowed)

    result, *later = _in_every_pass(model, choice, compare, fp8=fp8)
    windows.check(model, max_model_len)
    cached = later.pop(0) if model.heads.fp8_cache else None
    return replace(
        result,
        backend=choice.attention.name,
        activations=later[0].delta if later else None,
        cached=(cached.delta, cached.tolerance) if cached else None,
        rounding=reference.rounding,
        cache=reference.cache,
    )


def _in_every_pass(
    model: PagedModel, choice: BackendChoice, run: Callable[[_Pass], Value], *, fp8: bool
) -> list[Value]:
    """What ``run`` gives of each pass, the strictest first: what an fp8 cache and activations in
    fp8 are allowed would hide a fault of the rest. Without the cache that serves, attention is
    plain torch, for which nothing is compiled.
    """
    operations, heads = choice.operations, model.heads
    passes = [_Pass(choice.attention, heads.fp8_cache)]
    if heads.fp8_cache:
        plain = TorchAttention(replace(heads, fp8_cache=False), model.device)
        passes.insert(0, _Pass(plain, fp8_cache=False))
    if operations is None or not operations.rounds or not fp8:
        return [run(step) for step in passes]
    operations.rounds = False
    try:
        results = [run(step) for step in passes]
    finally:
        operations.rounds = True
    return [*results, run(passes[-1]._replace(fp8_activations=True))]


def prepare_rank(
    loaded: LoadedModel,
    ranks: RankGroup,
    device: torch.device,
    kernels: str = "auto",
    quantization: str = "none",
    *,
    fp8_cache: bool = False,
    block_size: int = PROVEN,
    compilers: int = 1,
    report: Report = unreported,
) -> tuple[ServedModel, SelfTestResult | None]:
    """One rank's shard of a model, on ``device``, and on rank 0 the result of the self-test; the
    other ranks only compute in it. The other arguments as in ``prepare_and_test``.

    The expected logits are those of the whole model, computed before it is split: on an accelerator
    with each module's weights lent to it while the module runs. Raises as ``prepare_and_test``
    does, and ConfigError for a model that cannot be split.
    """
    name = str(loaded.config.model_type)
    report("kernels")
    with _packed_or_not(name):
        plan = shards.plan_of(loaded.model, loaded.shape, ranks.size)
        quantized = loaded.shape.held or quantization
        # A checkpoint's own weights are as they are.
        to = None if loaded.shape.quantized else _rounded_to(quantization)
        with shards.computed_on(device, loaded.model):
            model = paged_model.prepare(loaded, device, fp8_cache=fp8_cache)
            choice = _pick(model, kernels, ranks=ranks.size, block_size=block_size)
            reference: _ReferenceLogits | None = None
            if ranks.rank == 0:
                rounds = nullcontext() if to is None else shards.quantized(model.model, plan, to)
                inputs = _input_rounding(choice, quantized)
                reference = _ReferenceLogits.of(model, loaded, to, rounds, inputs, report)
        report("kernels")
        shards.shard(loaded.model, loaded.shape, ranks, device, to)
        ranks.connect(device)
        model.probe_again()
        shards.check_heads(model.heads, loaded.shape, ranks.size)
        products = _products(loaded, quantized, choice, model, compilers, ranks.size)
        settings: dict[str, Any] = {"block_size": block_size}
        fusion, choice = _fused(model, choice, kernels, ranks, products, report, **settings)
        _check_fused(loaded, quantized, fusion)
        report("self_test")
        served, fp8 = ServedModel(model, choice, fusion), quantized == "fp8"
        if reference is None:
            prompts = _prompts(model, loaded.max_model_len, text_ids(loaded))

            def compute_along(step: _Pass) -> None:
                _paged_logits(model, step.attention, prompts, fp8_cache=step.fp8_cache)

            with torch.inference_mode():
                _in_every_pass(model, choice, compute_along, fp8=fp8)
            return served, None
        length = loaded.max_model_len
        return served, _check(model, choice, reference, length, fp8=fp8)


def _products(
    loaded: LoadedModel,
    quantized: str,
    choice: BackendChoice,
    model: PagedModel,
    compilers: int,
    ranks: int = 1,
) -> Products:
    """The products of a package for int4 weights, or why there are none."""
    if quantized != "int4":
        return None, ""
    if not packaged(loaded.shape, ranks):
        return None, f"4-bit products of ours: {UNPACKAGED}"
    return int4_products(choice.operations, model.heads.dtype, model.device, compilers)


def _input_rounding(choice: BackendChoice, quantized: str) -> float:
    """The most by which products of layers round what they multiply, as ``Packed.rounding``."""
    operations = choice.operations
    return 0.0 if operations is None or quantized != "int8" else operations.int8_rounding


def _rounded_to(quantization: str) -> Format | None:
    return next((name for name in ROUNDING if name == quantization), None)


@dataclass(frozen=True, slots=True, eq=False)
class _ReferenceLogits:
    """What a whole model's logits are expected to be, with an fp8 cache ``cached``, too, and what
    it costs that weights and cache are rounded.
    """

    expected: "Expected"
    rounding: Rounding | None
    cached: "Expected | None"
    cache: Rounding | None

    @classmethod
    def of(
        cls,
        model: PagedModel,
        loaded: LoadedModel,
        to: Format | None,
        rounds: AbstractContextManager[None],
        input_rounding: float,
        report: Report,
        *,
        judged: bool = True,
    ) -> Self:
        """Compute them by transformers' code, inside ``rounds`` with the weights rounded ``to``
        this format. ``input_rounding``: as ``Expected`` has it; ``judged``: as its ``of``.
        """
        report("self_test")
        rounding: Rounding | None = None
        cached: Expected | None = None
        cache: Rounding | None = None
        scored = to is not None or model.heads.fp8_cache  # what a rounding is judged by
        text = text_ids(loaded)
        expect = partial(
            Expected.of, model, loaded.max_model_len, text, scored=scored, report=report
        )
        expected = expect(judged=judged and to is None, input_rounding=input_rounding)
        if to is not None:
            report("kernels")
        with rounds:
            if to is not None:
                plain = expected
                expected = expect(judged=judged, input_rounding=input_rounding)
                terms = f"{to} weights", "quantization none", ROUNDING[to]
                rounding = _rounding(model, expected, plain, *terms)
            if model.heads.fp8_cache:
                cached = expect(fp8_cache=True)
                cache = _rounding_of_cache(model, cached, expected)
        return cls(expected, rounding, cached, cache)


@contextmanager
def _packed_or_not(name: str) -> Iterator[None]:
    """Any error of a family in the table but a refusal is a bug and keeps its traceback; for other
    families it means that they do not run packed.
    """
    try:
        yield
    except (ModelError, SelfTestError, ConfigError):
        raise
    except Exception as error:
        if name in families.SERVED:
            raise
        raise NotPackedError(error, name) from error


def _pick(
    model: PagedModel,
    kernels: str,
    ranks: int = 1,
    *,
    deterministic: bool = False,
    block_size: int = PROVEN,
) -> BackendChoice:
    facts = shards.heads_of(model.heads, ranks), model.kinds, model.device, kernels
    try:
        return pick(
            *facts,
            deterministic=deterministic,
            block_size=block_size,
            torch_because=model.torch_because,
        )
    except NotAvailableError as error:
        if deterministic:
            raise ConfigError("deterministic", str(error), determinism.FIX) from error
        raise ConfigError("kernels", f"{kernels}: {error}", "use auto or torch") from error


def _fused(
    model: PagedModel,
    choice: BackendChoice,
    kernels: str,
    ranks: RankGroup | None = None,
    products: Products = (None, ""),
    report: Report = unreported,
    **settings: Any,
) -> tuple[Fusion, BackendChoice]:
    """Fuse the layers that fit, choose attention again where they call it otherwise than the
    model's code did, and the product of its experts, if it has some. ``products``: as _products
    gives them. ``kernels`` and ``settings``: what the choice was made from.
    """
    kinds, (int4_product, int4_reason) = model.kinds, products
    repack = None if int4_product is None else int4_product.repack
    states = pack_states(model, choice.states)
    deterministic = bool(settings.get("deterministic"))
    fusion = fuse(model, choice.operations, ranks, repack, report, every_product=deterministic)
    fusion = replace(fusion, states=states)
    if model.kinds != kinds:  # the operations are those that fused layers have
        choice = replace(_pick(model, kernels, **settings), operations=choice.operations)
    product, notes = choose(samples_of(model.model), model.device, kernels)
    if product is not None:
        model.use_experts(product)
    notes = "; ".join(filter(None, (notes, int4_reason, str(int4_product or ""))))
    if notes:
        choice = replace(choice, reason=f"{choice.reason}; {notes}")
    return fusion, choice


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Logits [positions, vocabulary] of plain transformers, per prompt and for the fork of the
    first one, in float32 whatever type the weights have; with ``fp8_cache`` its attention reads
    keys and values that are rounded to fp8. They are computed before layers are fused, which
    transformers cannot run.

    ``reference_error``: how far transformers' logits in a half-precision type are from them, in
    units of their spread; in float32 how far it moves them that modules read what is rounded as
    float32 rounds it, and by ``input_rounding`` (``Packed.rounding``); NaN where it is unknown.
    ``perplexity``: of the text with which the first prompt begins, in float32, and in a
    half-precision type where it was computed; none without a text.
    """

    prompts: list[list[int]]
    logits: list[torch.Tensor]
    reference_error: float = math.nan
    perplexity: tuple[float, ...] = ()
    fp8_cache: bool = False
    input_rounding: float = 0.0

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        model: PagedModel,
        max_model_len: int,
        text: list[int] | None = None,
        *,
        fp8_cache: bool = False,
        judged: bool = True,
        input_rounding: float = 0.0,
        scored: bool = True,
        report: Report = unreported,
    ) -> Self:
        """``judged``: whether ``reference_error`` is computed; ``scored``: whether ``perplexity``
        is. ``report`` hears of the layers of all passes.
        """
        prompts = _prompts(model, max_model_len, text or [])
        chunk_ends = [[end - 1 for end in accumulate(_chunks(len(p)))] for p in prompts]
        compute = partial(
            _plain_and_text,
            model,
            prompts,
            chunk_ends,
            _scored(prompts[0], text or []) if scored else [],
            fp8_cache=fp8_cache,
            report=_CountedLayers(report, len(prompts) * (1 + judged) * len(model.windows)),
        )
        half = model.heads.dtype is not torch.float32
        with modules_in_float32(model.model) if half else nullcontext():
            exact, perplexity = compute()
        exactly = cls(prompts, exact, math.nan, perplexity, fp8_cache, input_rounding)
        if not judged:
            return exactly
        changes = Changes(model.device, input_rounding)
        with nullcontext() if half else changes.inside(model.model.modules()):
            rounded, half_perplexity = compute()
        return replace(
            exactly,
            reference_error=exactly.difference(model, rounded),
            perplexity=perplexity + half_perplexity * half,
        )

    def difference(self, model: PagedModel, logits: list[torch.Tensor]) -> float:
        """How far all prompts' logits [positions, vocabulary] are from these, in units of their
        spread: in float32 the worst token's; in half precision or with rounded inputs the root mean
        square over the tokens but for those that rounding moves furthest, FURTHEST of them; with an
        fp8 cache the median token's; infinite where one is NaN.
        """
        half = model.heads.dtype is not torch.float32
        experts = half and has_experts(model) and not self.fp8_cache
        pairs = zip(logits, self.logits, strict=True)
        *prompts, fork = (_distances(*pair, median=experts) for pair in pairs)
        tokens = torch.cat(prompts).sort().values
        every = torch.cat([tokens, fork])
        if every.isnan().any():
            return math.inf
        if self.fp8_cache:
            return float(every.median())
        if (half or self.input_rounding > 0) and not experts:
            calm = tokens[: len(tokens) - int(FURTHEST * len(tokens))]
            return float(torch.cat([calm, fork]).square().mean().sqrt())
        return float(every.max())


def run(model: PagedModel, backend: AttentionBackend, max_model_len: int) -> SelfTestResult:
    """Compare both passes of a model without fused layers, as ``check`` does."""
    expected = Expected.of(model, max_model_len, fp8_cache=model.heads.fp8_cache)
    return check(model, backend, expected)


@torch.inference_mode()
def check(
    model: PagedModel,
    backend: AttentionBackend,
    expected: Expected,
    tolerance: float | None = None,
) -> SelfTestResult:
    """Compare our pass with the expected one on about 200 tokens, with a cache of the type that
    ``expected`` was computed with. Raises SelfTestError beyond the tolerance (None: that of the
    model's type) and beyond REFERENCE_FACTOR times what its type does to this model.
    """
    fp8_cache, dtype = expected.fp8_cache, model.heads.dtype
    rows = _paged_logits(model, backend, expected.prompts, fp8_cache=fp8_cache)
    logits = [torch.stack([row[position] for position in sorted(row)]) for row in rows]
    delta = expected.difference(model, logits)
    if tolerance is None:
        tolerance = CACHE_TOLERANCE[dtype] if fp8_cache else _tolerance(model)
        tolerance = max(tolerance, ROUNDED_TOLERANCE if expected.input_rounding else 0.0)
    if math.isfinite(expected.reference_error):  # else a weight is no number, or too large
        tolerance = max(tolerance, REFERENCE_FACTOR * expected.reference_error)
    if not delta <= tolerance:
        half = dtype is not torch.float32
        cause = str(dtype).removeprefix("torch.") if half else "the rounding of what layers read"
        moved = f" ({cause} alone moves them by {expected.reference_error:.3g})"
        also = moved if expected.reference_error > 0 else ""
        unknown = math.isnan(expected.reference_error) and math.isfinite(delta)
        kind = UnexplainedError if unknown else SelfTestError
        raise kind(
            f"self-test: logits of {str(model.model.config.model_type)!r} differ from plain "
            f"transformers by {delta:.3g} of their spread, above the {tolerance:.3g} that rounding "
            f"explains{also}; this model would generate wrong text"
        )
    tokens = sum(map(len, expected.prompts)) + 1
    return SelfTestResult(delta, tolerance, tokens, backend.name)


def _rounding_of_cache(model: PagedModel, rounded: "Expected", plain: "Expected") -> Rounding:
    terms = "keys and values in fp8", "cache dtype auto", CACHE_ROUNDING
    return _rounding(model, rounded, plain, *terms, median=has_experts(model))


def _rounding(
    model: PagedModel,
    rounded: "Expected",
    plain: "Expected",
    subject: str,
    instead: str,
    allowed: float,
    *,
    median: bool = False,
) -> Rounding:
    """What it costs that ``subject`` is rounded. Raises SelfTestError where a text that the model
    predicts becomes PERPLEXED times as hard to it; without one where logits move beyond
    ``allowed``.
    """
    name = str(model.model.config.model_type)
    pairs = list(zip(rounded.logits, plain.logits, strict=True))
    same = torch.cat([(a.argmax(1) == b.argmax(1)).float() for a, b in pairs])
    distances = [_distances(*pair, median=median) for pair in pairs]
    moved = float(torch.cat(distances).square().mean().sqrt())
    worst = max(float(tokens.max()) for tokens in distances)
    perplexity = (*plain.perplexity[:1], *rounded.perplexity)
    by_text = bool(perplexity) and perplexity[0] <= model.vocabulary**PREDICTS
    if by_text:
        before, measured, *_ = perplexity
        allowed = PERPLEXED * before
        loss = f"raise the perplexity of {name!r} on a text from {before:.3g} to {measured:.3g}"
    else:
        measured, loss = moved, f"move the logits of {name!r} by {moved:.3g} of their spread"
    if not measured <= allowed:
        raise SelfTestError(
            f"self-test: {subject} {loss}, above the {allowed:.3g} that are allowed; serve it with "
            f"{instead}"
        )
    return Rounding(subject, moved, worst, float(same.mean()), allowed, perplexity, by_text)


def _tolerance(model: PagedModel) -> float:
    """The difference that rounding explains in a model of this type, without an fp8 cache."""
    return (EXPERTS_TOLERANCE if has_experts(model) else TOLERANCE)[model.heads.dtype]


def _distances(paged: torch.Tensor, plain: torch.Tensor, *, median: bool) -> torch.Tensor:
    """Each token's difference of logits [positions, vocabulary], in units of their spread.

    In half precision rounding sometimes changes a router's choice, and another expert computes that
    token (up to 0.4 of the spread). A fault of attention affects all tokens, one of a window all
    beyond it: so with ``median`` there is only the median of the last tokens.
    """
    spread = plain.float().std(dim=1).clamp(min=1e-6)
    distances = (paged.float() - plain.float()).square().mean(dim=1).sqrt() / spread
    return distances[-LAST:].median()[None] if median else distances


def has_experts(model: PagedModel) -> bool:
    """Whether rounding may choose another expert for a token."""
    return any(getattr(model.model.config.get_text_config(), name, None) for name in EXPERTS)


def text_ids(loaded: LoadedModel) -> list[int]:
    """A text that people would write, in the model's tokens; none where it has no room for one of
    them.
    """
    ids = list(loaded.text.sample)
    return ids if ids and max(ids) < loaded.shape.vocab else []


def _prompts(model: PagedModel, max_model_len: int, text: list[int]) -> list[list[int]]:
    """A prompt that begins with the text, and the same random token ids every time. The first
    leaves the widest window within LONGEST.
    """
    tested = [w for w in model.windows if w is not None and w + 9 <= LONGEST]
    longest = max([LENGTHS[0], *(w + 9 for w in tested)])
    generator = np.random.default_rng(0)
    first, *rest = (
        generator.integers(0, model.vocabulary, min(length, max_model_len)).tolist()
        for length in (longest, *LENGTHS[1:])
    )
    return [[*text, *first[len(text) :]][: len(first)], *rest]


def _scored(prompt: list[int], text: list[int]) -> list[int]:
    """The positions in the first prompt whose next tokens are the last of the text there."""
    end = min(len(prompt), len(text)) - 1
    return list(range(max(0, end - SCORED), max(0, end)))


def _chunks(length: int) -> list[int]:
    """A prompt of ``length`` cut into chunks and single tokens, as in prefill and decode."""
    counts: list[int] = []
    for count in (length // 3, 1, length - length // 3 - LAST, *[1] * (LAST - 1), length):
        counts.append(max(0, min(count, length - sum(counts))))
    return [count for count in counts if count]


def _paged_logits(
    model: PagedModel, backend: AttentionBackend, prompts: list[list[int]], *, fp8_cache: bool
) -> list[dict[int, torch.Tensor]]:
    """Per prompt, by position: the logits of each row's last token. The first prompt begins alone,
    the others beside it in the next step. One entry more is a fork of the first one, which computes
    its last token again, as soon as that has ended.
    """
    groups = model.groups
    blocks = (1 + sum(-(-len(p) // BLOCK_SIZE) for p in prompts)) * len(groups)
    heads = [replace(layer, fp8_cache=fp8_cache) for layer in model.layer_heads]
    layout, state_units = model.state_layout, 0
    if layout is not None:  # two versions of each sequence's, and one more of the fork's
        state_units = layout.units(CacheStorage.unit_bytes(groups, heads, BLOCK_SIZE, layout))
        blocks += (2 * len(prompts) + 1) * state_units
    cache = CacheStorage(
        groups,
        heads,
        units=blocks,
        block_size=BLOCK_SIZE,
        device=model.device,
        states=layout,
    )
    cache.fill(torch.nan)
    free = np.random.default_rng(1).permutation(blocks).tolist()
    sequences: list[Sequence] = []
    for i, prompt in enumerate(prompts):
        request = Request(str(i), tuple(prompt), SamplingParams(), max_tokens=1)
        sequence = Sequence(i, request, 0, list(prompt))
        sequence.tables = [
            [free.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))] for _ in groups
        ]
        if state_units:
            sequence.states = [[free.pop() for _ in range(state_units)] for _ in range(2)]
        sequences.append(sequence)
    builder = BatchBuilder(groups, BLOCK_SIZE)
    chunks = [_chunks(len(prompt)) for prompt in prompts]
    logits_at: list[dict[int, torch.Tensor]] = [{} for _ in range(len(prompts) + 1)]
    begun, forked = sequences[:1], False
    while True:
        ended = not chunks[0]
        running = (s for s in begun if chunks[s.id])
        rows = [Row(s, s.computed, chunks[s.id].pop(0), samples=True) for s in running]
        if ended and not forked:
            fork = _fork(sequences[0], [free.pop() for _ in groups], cache)
            if state_units:  # that before the last token, which its last step has read
                first = sequences[0]
                snapshot = first.states[(first.turn - 1) % len(first.states)]
                fork.states = [snapshot, [free.pop() for _ in range(state_units)]]
            rows.append(Row(fork, fork.computed, 1, samples=True))
            forked = True
        if not rows:
            return logits_at
        logits = model.forward(builder.build(rows), cache, backend)
        for row, values in zip(rows, logits, strict=True):
            row.sequence.computed += row.count
            row.sequence.turn += 1
            logits_at[row.sequence.id][row.sequence.computed - 1] = values
        begun = sequences


def _fork(source: Sequence, tails: list[int], cache: CacheStorage) -> Sequence:
    """All of ``source`` but its last token: it shares the full blocks, and ``tails``, one block per
    group, hold a copy of the last one, which it writes to.
    """
    fork = Sequence(len(LENGTHS), source.request, 0, list(source.tokens))
    fork.computed = len(source.tokens) - 1
    fork.tables = [[*table[:-1], tail] for table, tail in zip(source.tables, tails, strict=True)]
    pairs = [(table[-1], tail) for table, tail in zip(source.tables, tails, strict=True)]
    cache.copy(Work(0, copies=pairs))
    return fork


def _plain_and_text(
    model: PagedModel,
    prompts: list[list[int]],
    positions: list[list[int]],
    scored: list[int],
    *,
    fp8_cache: bool,
    report: "_CountedLayers",
) -> tuple[list[torch.Tensor], tuple[float, ...]]:
    """``_plain_logits``, once more those of the first prompt's last token for the fork, and the
    perplexity of what follows the ``scored`` positions of that prompt, if there are some: from the
    same pass.
    """
    first, *rest = positions
    at = [first + scored, *rest]
    with report.of(model):
        logits = _plain_logits(model, prompts, at, fp8_cache=fp8_cache)
    logits[0], of_text = logits[0][: len(first)].clone(), logits[0][len(first) :]
    logits.append(logits[0][-1:])
    if not scored:
        return logits, ()
    following = torch.tensor([prompts[0][at + 1] for at in scored], device=of_text.device)
    return logits, (math.exp(float(cross_entropy(of_text.float(), following))),)


class _CountedLayers:
    """Reports the layers of transformers' passes, of which all have ``total``."""

    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total = report, total
        self._done = 0

    @contextmanager
    def of(self, model: PagedModel) -> Iterator[None]:
        """Count the decoder layers that run in the ``with`` block."""
        self._report("self_test", self._done, self._total)
        with ExitStack() as hooks:
            for layer in decoder_layers(model):
                hooks.enter_context(layer.register_forward_hook(self._count))
            yield

    def _count(self, *_: object) -> None:
        self._done += 1
        self._report("self_test", min(self._done, self._total), self._total)


def _plain_logits(
    model: PagedModel, prompts: list[list[int]], positions: list[list[int]], *, fp8_cache: bool
) -> list[torch.Tensor]:
    """Per prompt, in a pass of its own: eager transformers' logits [positions, vocabulary]."""
    results: list[torch.Tensor] = []
    # In half precision eager experts are summed in another order, which changes routers' choices
    # and would hide the differences tested here.
    with model.plain(experts=model.heads.dtype is torch.float32) as plain:
        for prompt, at in zip(prompts, positions, strict=True):
            ids = torch.tensor([prompt], device=model.device)
            index = torch.tensor(at, device=model.device)
            extra: dict[str, Any] = {"logits_to_keep": index} if model.selects_logits else {}
            rounds = {"past_key_values": rounded_cache(plain, states=bool(model.states))}
            extra |= rounds if fp8_cache else {}
            logits = plain(input_ids=ids, use_cache=fp8_cache, **extra).logits[0]
            results.append(logits if model.selects_logits else logits[index])
    return results
