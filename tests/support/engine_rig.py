"""The real scheduler and the real runner on a tiny model, without threads or HTTP, and transformers
as the reference.

Used by the tests of token equality and of batch independence.
"""

import functools
import random
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from fairlead_kernels.choice.backend import BackendChoice, pick
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.gpu.triton_attention import TritonAttention
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import AttentionBackend, DecodeAttention
from fairlead_kernels.interface.layer import LayerOperations
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.device.conversion.fusion import fuse, quantize_weights
from fairlead_runtime.device.conversion.pack_states import PackedStates, pack_states
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.experts import samples_of
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import determinism
from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.step.graph_cache import GraphCache
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.engine.isolate import Executor
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.models import families, rope
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Finished, Limits, Result, Row, Work
from fairlead_runtime.scheduling.scheduler import Scheduler, SchedulerStats
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.graph_sizes import step_sizes
from fairlead_runtime.sizing.groups import LayerGroup, pool_units
from support import (
    flashinfer_standin,
    rank_pair,
    tiny,
    tiny_parts,
    tiny_states,
    triton_standin,
)
from support.fp8_reference import Fp8Cache
from support.graph_standin import TapeRecorder
from support.operation_cases import fixed_attention, fixed_operations
from support.operation_cases import operations as gpu_operations
from support.stream_standin import DelayedCache

# Threads do not speed up tiny matrices; on shared cores they slow them down a hundredfold.
torch.set_num_threads(1)

MAX_LEN = 512
FP8_CACHE = "fp8 cache "  # before the name of kernels
# Two ranks with fused layers: in C++ or by the reference, as on GPUs in torch, and in Triton.
FUSED_RANKS = ("ranks cpu", "ranks layers", "ranks triton")
INT8_RANKS = ("ranks cpu int8", "ranks layers int8")
QUANTIZED_RANKS = (*INT8_RANKS, "ranks layers fp8")
ON_TRITON = "triton "  # likewise
MAX_STEPS = 20_000
STATES = 2  # sequences for whose states there is room beside a setting's blocks
# two ids, sampled often enough at random that some texts end early
EOS = frozenset({2, 140})


# The rig that computes what one with fused layers must give: transformers cannot run those.
UNFUSED = {
    "cpu": "torch",
    "int8": "rounded, and the head",
    "layers int8": "rounded",
    "layers fp8": "rounded fp8",
    **dict.fromkeys(INT8_RANKS, "rounded"),
    "ranks layers fp8": "rounded fp8",
    **dict.fromkeys(("layers", "graphs layers", "triton"), "torch"),
    **dict.fromkeys(("ranks", "ranks ahead", *FUSED_RANKS), "torch"),
}
GRAPHS = ("graphs", "graphs layers")
STANDINS = ("flashinfer", "resident", *GRAPHS, "triton", "ranks ahead")  # of a GPU's attention
# Those that stand for a GPU: what they offload crosses on a stream of its own.
LAUNCHING = ("ahead", "ranks ahead")  # steps of all kinds, by rows on the device
ON_GPU = (
    "flashinfer",
    "resident",
    "graphs",
    "graphs layers",
    "layers",
    "triton",
    "ahead",
    "ranks",
    "ranks ahead",
    *FUSED_RANKS[1:],
)
QUANTIZED: dict[str, Format] = {
    **dict.fromkeys(("int8", "layers int8", "rounded", "rounded, and the head"), "int8"),
    **dict.fromkeys(INT8_RANKS, "int8"),
    **dict.fromkeys(("layers fp8", "rounded fp8", "ranks layers fp8"), "fp8"),
}


@dataclass(frozen=True)
class Setting:
    """Settings of one engine run. ``num_blocks`` counts whole-model blocks, ``chunk`` is
    max_batch_tokens, ``beside`` prefill_beside_decodes.
    """

    block_size: int = 4
    chunk: int = 4096
    num_blocks: int = 1024
    offload: bool = False
    sharing: bool = True
    max_requests: int = 64
    max_logits: int = 256
    graphs: int = 32  # the most that are kept
    interval: int = 4  # of the sizes of captured steps
    beside: int = 0
    listed: int | None = None  # ids in a list of changed logits, where not as planned
    side: int = 0  # the seed of the order in which the streams of a GPU run

    def limits(self, groups: int) -> Limits:
        return Limits(
            policy="fifo",
            max_batch_tokens=self.chunk,
            max_requests=min(self.max_requests, self.chunk),
            safety_margin=0.0,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=MAX_LEN,
            allow_block_sharing=self.sharing,
            offload_units=self.num_blocks * groups if self.offload else 0,
            prefill_beside_decodes=self.beside,
        )


@dataclass
class Outcome:
    """Result of one run; ``texts`` has the generated tokens by (request id, choice)."""

    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    prompts: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    steps: int = 0
    stats: SchedulerStats | None = None


class KnownTextRunner:
    """A runner without a model that returns the given texts, to try out a setting cheaply."""

    def __init__(self, texts: Mapping[str, abc.Sequence[int]]) -> None:
        self.texts = texts

    def copy(self, work: Work) -> None:
        pass

    def execute(self, work: Work) -> Mapping[int, Result]:
        return {
            row.sequence.id: Result(self.texts[row.sequence.request.id][row.sequence.generated])
            for row in work.rows
            if row.samples
        }


def run_to_end(
    scheduler: Scheduler, device: Executor, arrivals: Iterable[tuple[int, Request]]
) -> Outcome:
    """Run all arrivals (step, request) to their end, checking the invariants every 16 steps."""
    due = sorted(arrivals, key=lambda a: a[0])
    outcome = Outcome()
    while due or scheduler.has_work:
        while due and (due[0][0] <= outcome.steps or not scheduler.has_work):
            scheduler.add(due.pop(0)[1])
        work = scheduler.commit(scheduler.plan())
        device.copy(work)
        for event in scheduler.update(work, device.execute(work)):
            key = (event.sequence.request.id, event.sequence.choice)
            if isinstance(event, Finished):
                pytest.fail(f"{key} ended without a token: {event.failure}")
            outcome.texts.setdefault(key, []).append(event.token)
            if event.prompt:
                assert key[0] not in outcome.prompts, "log-probabilities of a prompt came twice"
                outcome.prompts[key[0]] = event.prompt
            if event.finish is not None:
                outcome.finishes[key] = event.finish
        outcome.steps += 1
        if outcome.steps % 16 == 0:
            scheduler.check()
        if outcome.steps > MAX_STEPS:
            pytest.fail(f"not done after {MAX_STEPS} steps")
    scheduler.check()
    outcome.stats = scheduler.stats()
    assert outcome.stats.used == 0, "units are still held at rest"
    return outcome


def paged(
    family: str,
    *,
    bfloat16: bool = False,
    dtype: torch.dtype | None = None,
    fp8_cache: bool = False,
    **overrides: Any,
) -> PagedModel:
    """A tiny model on our paged attention."""
    if family in tiny_parts.FAMILIES:
        model = tiny_parts.build_text(family, **overrides)
    elif family in tiny_states.FAMILIES:
        model = tiny_states.build(family, **overrides)
    else:
        model = tiny.build(family, **overrides)
    dtype = torch.bfloat16 if bfloat16 else dtype
    if dtype is not None:
        model = model.to(dtype)
    rope.pin(model, MAX_LEN)
    return PagedModel(model, families.check(model.config), fp8_cache=fp8_cache)


def attend_once(model: PagedModel, attention: AttentionBackend, ids: torch.Tensor) -> torch.Tensor:
    """Run one prompt int64 [T] on a cache of the model's ``heads``: its last logits [1,
    vocabulary].
    """
    request = Request("a", tuple(ids.tolist()), SamplingParams(), max_tokens=1)
    sequence, groups = Sequence(0, request, 0, ids.tolist()), model.groups
    blocks = -(-len(ids) // 4)
    tables = torch.randperm(blocks * len(groups)).view(len(groups), blocks)
    sequence.tables = tables.tolist()
    cache = CacheStorage(
        groups, model.cache_heads, units=tables.numel(), block_size=4, device=model.device
    )
    batch = BatchBuilder(groups, 4).build([Row(sequence, 0, len(ids), samples=True)])
    return model.forward(batch, cache, attention)


def choice_of(model: PagedModel, kernels: str) -> BackendChoice:
    """Attention in C++, where it is built and ``kernels`` say so, or in plain torch."""
    if kernels == "ranks ahead":
        return BackendChoice(flashinfer_standin.attention(model.heads, model.kinds), None)
    if kernels == "fixed triton":
        reason = "sums in one order, in Triton's interpreter"
        return BackendChoice(fixed_attention(model.heads), fixed_operations(), reason)
    if kernels == "fixed":
        try:
            return pick(model.heads, model.kinds, model.device, deterministic=True)
        except NotAvailableError as error:
            pytest.skip(str(error))
    auto = kernels in ("cpu", "int8") or kernels.startswith("ranks cpu")
    kernels = "auto" if auto else "torch"
    return pick(model.heads, model.kinds, model.device, kernels)


def operations_of(model: PagedModel, kernels: str) -> LayerOperations | None:
    """Those of fused layers, by the name of a rig's kernels."""
    if kernels == "fixed triton":
        return fixed_operations()
    if kernels.endswith("triton"):
        return gpu_operations("triton")
    if "layers" in kernels:
        return gpu_operations("torch")
    fuses = kernels in ("cpu", "int8", "fixed") or kernels.startswith("ranks cpu")
    return choice_of(model, kernels).operations or (reference if fuses else None)


def use_experts(model: PagedModel, kernels: str) -> None:
    """Let a mixture's experts run on Triton's product, on the stand-in of its kernel, where a rig's
    kernels stand for those of a GPU.
    """
    if kernels in ON_GPU and samples_of(model.model):
        model.use_experts(triton_standin.experts())


def cache_of(
    model: PagedModel, *, units: int, block_size: int, host_units: int, side: int | None = None
) -> CacheStorage:
    """A cache of NaN, which the read of a slot that was not written yields. ``side``: as on a GPU,
    on streams that run in an order drawn from this seed.
    """
    groups, heads = model.groups, model.cache_heads
    sizes: dict[str, Any] = {"units": units, "block_size": block_size, "host_units": host_units}
    if side is None:
        states = model.state_layout
        cache = CacheStorage(groups, heads, device=model.device, states=states, **sizes)
    else:
        states = model.state_layout
        piece = 3 * CacheStorage.unit_bytes(groups, heads, block_size, states)
        sizes |= {"choose": random.Random(side).randrange, "piece_bytes": piece}
        cache = DelayedCache(groups, heads, device=model.device, states=states, **sizes)
    cache.fill(torch.nan)
    return cache


class Rig:
    """One tiny model, run by our engine with any setting, and by transformers one prompt at a
    time.

    ``kernels``: torch, or cpu for fused layers: in C++ where it is built, else by the reference;
    mixers that keep states run once a step there.
    int8 is cpu with int8 weights; their reference, rounded, computes in torch with the same. So do
    the layers of GPUs, for int8 and fp8. flashinfer is its attention on the stand-in of its
    wrappers; resident the same with the decodes' state on the device; graphs with captured steps
    besides; layers are the fused ones of GPUs in torch, beside attention in torch, graphs layers
    those beside graphs, and triton those in Triton, beside flashinfer's. ranks is torch on two
    processes, each with half of the model; ranks cpu, ranks layers and ranks triton are the same
    with layers fused, but for ``odd``, which does not fit on the other one; with int8 or fp8
    behind, some also with such weights; ranks ahead launches steps, on the stand-in of flashinfer's
    wrappers, and ahead does in torch alone. After "fp8 cache " they have one, and the reference
    rounds keys and values. fixed is cpu with ``deterministic``, whose text nothing but itself is
    compared with; fixed triton the same in Triton. After "triton " attention, resident and graphs
    have Triton's attention on the stand-in of its kernels, interpreted in its interpreter. Experts
    are in Triton, on the same stand-in, in all that stand for a GPU.
    """

    def __init__(
        self, family: str, kernels: str = "torch", *, odd: int | None = None, **overrides: Any
    ) -> None:
        self.family = family
        cached = FP8_CACHE if kernels.startswith(FP8_CACHE) else ""
        kernels = kernels.removeprefix(FP8_CACHE)
        self._on_triton = kernels.startswith(ON_TRITON)
        kernels = kernels.removeprefix(ON_TRITON)
        self._described: dict[str, Any] = {"family": family, **overrides}
        if cached:
            self._described["fp8_cache"] = True
        self.model = paged(**self._described)
        because = self.model.torch_because
        if because and (self._on_triton or kernels in (*STANDINS, "fixed triton")):
            # Raises, as where the product is told to take a GPU's attention.
            facts = self.model.heads, self.model.kinds, torch.device("cuda")
            pick(*facts, "flashinfer", torch_because=because)
        if kernels in QUANTIZED and kernels not in QUANTIZED_RANKS:
            quantize_weights(
                self.model, QUANTIZED[kernels], head=kernels in ("int8", UNFUSED["int8"])
            )
        self._kernels, self._cached, self._overrides = kernels, cached, overrides
        self._odd = odd
        pair = self._pair
        ranks = None if pair is None else pair.rank_group
        if pair is not None and ranks is not None:
            pair.hold(kernels, odd=odd, **self._described)
            rank_pair.shard(self.model, ranks, QUANTIZED.get(kernels))
        fixed, states = kernels == "fixed", PackedStates()
        if kernels in ("cpu", "int8", "fixed"):  # as a start does, before weights are packed
            states = pack_states(self.model, choice_of(self.model, kernels).states)
        operations = operations_of(self.model, kernels)
        self.fusion = fuse(self.model, operations, ranks, every_product=fixed)
        if fixed and self.model.states:
            determinism.check(self.model, replace(self.fusion, states=states))
        use_experts(self.model, kernels)
        self.groups: tuple[LayerGroup, ...] = self.model.groups
        self._references: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        self._caches: list[GraphCache] = []

    @property
    def _pair(self) -> rank_pair.Pair | None:
        """Of this moment: a test may have ended an earlier one."""
        return rank_pair.pair() if self._kernels.startswith("ranks") else None

    @functools.cached_property
    def _plain(self) -> "Rig":
        """The rig whose model transformers runs as the reference: one for all kernels, so that each
        text is generated once.
        """
        plain = UNFUSED.get(self._kernels, "torch")
        if self._kernels in (plain, *UNFUSED.values()):
            return self
        if self.model.states and not self.model.packed:  # transformers finds its mixers as it was
            return self
        # Lists are no keys of a cache.
        lists = any(isinstance(value, list) for value in self._overrides.values())
        return (Rig if lists else rig)(self.family, self._cached + plain, **self._overrides)

    def limits(self, setting: Setting) -> Limits:
        """Those of a setting with this model, whose states lie in units, too: beside those of a
        block for each of its layers' groups there are as many as two running sequences have.
        """
        versions = 3 if self._kernels == "ahead" else 2
        limits = replace(
            setting.limits(len(self.groups)),
            state_versions=versions,
            shares_answers=self.model.shares_answers,
        )
        layout = self.model.state_layout
        if layout is None:
            return limits
        size = setting.block_size
        unit = CacheStorage.unit_bytes(self.groups, self.model.cache_heads, size, layout)
        each = layout.units(unit)
        beside = ceil_div(limits.state_versions * each, max(1, len(self.groups)))
        if not self.groups:
            return replace(
                limits, state_units=each, num_blocks=2 * beside + 4, cache_tokens=MAX_LEN
            )
        return replace(
            limits,
            state_units=each,
            num_blocks=limits.num_blocks + STATES * beside,
            cache_tokens=(limits.num_blocks + (STATES - 1) * beside) * size,
            offload_units=limits.offload_units and limits.offload_units + STATES * each,
        )

    def runner(self, setting: Setting, guides: Guides | None = None) -> ModelRunner:
        limits = self.limits(setting)
        units = pool_units(limits.num_blocks, len(self.groups))
        host_units = limits.offload_units
        amounts = {"units": units, "block_size": setting.block_size, "host_units": host_units}
        if self._kernels in ON_GPU:
            amounts["side"] = setting.side
        resident = self._kernels in ("resident", *GRAPHS)
        # The last unit is for padding rows.
        cache = cache_of(self.model, **{**amounts, "units": units + resident})
        pair = self._pair
        attention, decodes = self._choice().attention, None
        sampler = None
        if self._kernels in LAUNCHING:
            lengths = {"sequences": limits.max_requests, "max_model_len": limits.max_model_len}
            sampler = RowSampler.of(self.model, cache, **lengths, listed=setting.listed)
        if pair is not None:
            pair.hold(self._kernels, odd=self._odd, **self._described)
            tables = None if sampler is None else sampler.table.tables_for(attention)
            pair.allocate(None if tables is None else tables.shape, **amounts)
        if resident:
            assert isinstance(attention, DecodeAttention)
            decodes = DecodeSteps(
                self.model,
                cache,
                attention,
                sequences=limits.max_requests,
                max_model_len=limits.max_model_len,
                listed=setting.listed,
                **self._graphs(lambda: decodes, cache, attention, setting),
            )
        return ModelRunner(
            self.model,
            cache,
            attention,
            max_logits=setting.max_logits,
            guides=guides,
            followers=pair,
            decodes=decodes,
            row_sampler=sampler,
        )

    def _graphs(
        self,
        steps: Callable[[], DecodeSteps | None],
        cache: CacheStorage,
        attention: AttentionBackend,
        setting: Setting,
    ) -> dict[str, Any]:
        if self._kernels not in GRAPHS:
            return {}

        def kept() -> list[torch.Tensor]:
            """What lives as long as the engine."""
            model, decodes = self.model.model, steps()
            assert decodes is not None
            own = [x for x in vars(decodes).values() if isinstance(x, torch.Tensor)]
            own += [*decodes.sampler.tensors, *cache.tensors]
            if isinstance(attention, TritonAttention):
                own += triton_standin.kept(attention)
            return [*model.parameters(), *model.buffers(), *self.model.packed, *own]

        recorder = TapeRecorder(kept)
        limits = setting.limits(1)
        config = EngineConfig(
            max_requests=limits.max_requests,
            max_batch_tokens=limits.max_batch_tokens,
            q_padding_interval=setting.interval,
        )
        self._caches.append(GraphCache(recorder, setting.graphs))
        return {"graphs": self._caches[-1], "sizes": step_sizes(config)}

    def captured(self) -> int:
        """Graphs of all runners so far. Raises AssertionError where a step could not be captured:
        it would have run as it is, and given the same text.
        """
        failures = {cache.failure for cache in self._caches} - {""}
        assert not failures, failures
        return sum(map(len, self._caches))

    def _choice(self) -> BackendChoice:
        model = self.model
        if self._on_triton:
            interpreted = self._kernels == "interpreted"
            ours = triton_standin.attention(model.heads, interpreted=interpreted)
            return BackendChoice(ours, None)
        if self._kernels in STANDINS:
            return BackendChoice(flashinfer_standin.attention(model.heads, model.kinds), None)
        return choice_of(model, self._kernels)

    def run(self, setting: Setting, arrivals: Iterable[tuple[int, Request]]) -> Outcome:
        scheduler = Scheduler(self.limits(setting), self.groups, b"rig")
        return run_to_end(scheduler, self.runner(setting), arrivals)

    def dry_run(
        self, setting: Setting, arrivals: Iterable[tuple[int, Request]]
    ) -> SchedulerStats | None:
        """The same run without our model: the greedy texts come from the reference."""
        arrivals = list(arrivals)
        limits = self.limits(setting)
        texts = {r.id: self.reference(r.prompt, r.max_tokens) for _, r in arrivals}
        return run_to_end(
            Scheduler(limits, self.groups, b"rig"), KnownTextRunner(texts), arrivals
        ).stats

    def reference(self, prompt: abc.Sequence[int], max_tokens: int) -> list[int]:
        """transformers' greedy ``generate`` of this prompt alone, with eager attention and our
        end-of-sequence ids.
        """
        if self._plain is not self:
            return self._plain.reference(prompt, max_tokens)
        key = tuple(prompt)
        longest, text = self._references.get(key, (0, []))
        if longest < max_tokens:
            with self.model.plain() as plain, torch.inference_mode():
                generator: Any = plain
                ids = torch.tensor([prompt])
                out = generator.generate(
                    ids,
                    **self._own_cache(),
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    eos_token_id=sorted(EOS),
                    pad_token_id=0,
                )
            text = out[0, len(prompt) :].tolist()
            self._references[key] = max_tokens, text
        # A longer text begins with a shorter one.
        return text[:max_tokens]

    def _own_cache(self) -> dict[str, Any]:
        """The argument of transformers' model that gives it a cache in fp8."""
        if not self.model.heads.fp8_cache:
            return {}
        return {"past_key_values": Fp8Cache(self.model.model.config if self.model.states else None)}

    def margin(self, tokens: abc.Sequence[int]) -> tuple[float, float, float]:
        """How close the reference's choice after ``tokens`` is: the distance of the top two logits,
        the smallest distance between a router's k-th and next score over all tokens and layers
        (inf without experts), and that of a key or value to the middle of two numbers of fp8 (inf
        without an fp8 cache).
        """
        cache = self._own_cache()
        routers: list[float] = []

        def record_router(module: Any, _args: Any, output: Any) -> None:
            ranked = output[0].float().topk(module.top_k + 1, dim=-1).values
            routers.append(float((ranked[:, -2] - ranked[:, -1]).min()))

        with self._plain.model.plain() as plain, torch.inference_mode():
            hooks = [
                m.register_forward_hook(record_router)
                for m in plain.modules()
                if type(m).__name__.endswith("Router")
            ]
            ids = torch.tensor([list(tokens)])
            logits = plain(input_ids=ids, use_cache=bool(cache), **cache).logits[0, -1].float()
            for hook in hooks:
                hook.remove()
        top = logits.topk(2).values
        closest = cache["past_key_values"].closest if cache else float("inf")
        return float(top[0] - top[1]), min(routers, default=float("inf")), closest


@functools.cache
def rig(family: str, kernels: str = "torch", **overrides: Any) -> Rig:
    return Rig(family, kernels, **overrides)


def prompts(seed: int, lengths: abc.Sequence[int], shared: int) -> list[tuple[int, ...]]:
    """Random prompts of these lengths; all but the first begin with the same ``shared`` tokens."""
    generator = np.random.default_rng(seed)
    prefix = generator.integers(3, tiny.VOCAB, shared).tolist()
    random_prompts: list[tuple[int, ...]] = []
    for i, length in enumerate(lengths):
        body = generator.integers(3, tiny.VOCAB, length).tolist()
        random_prompts.append(tuple(body if i == 0 else (prefix + body)[:length]))
    return random_prompts


def greedy(
    request_id: str, prompt: tuple[int, ...], max_tokens: int, n: int = 1, **more: Any
) -> Request:
    params = SamplingParams(temperature=0.0, n=n, max_tokens=max_tokens, **more)
    return Request(request_id, prompt, params, max_tokens, eos_ids=EOS)


# What one run of ``check_greedy_texts`` takes: lengths of prompts, of the beginning that they
# share, and of answers; chunks, single tokens, prefix hits, forks and preemptions.
LENGTHS, SHARED, NEW = (17, 41, 26, 53, 34), 24, 24
TIGHT = Setting(block_size=4, chunk=16, num_blocks=28)


def check_greedy_texts(engine: Rig, seed: int) -> None:
    """Assert that greedy texts are those of the reference, whatever happens beside them."""
    stats = compare_greedy_texts(engine, seed)
    # Layers that all have a window free blocks, so that such a model is never short of them.
    assert stats.preemptions > 0, "no request was preempted"
    assert stats.prefix_hits > 0, "no prompt began with cached blocks"


def compare_greedy_texts(engine: Rig, seed: int) -> SchedulerStats:
    """The same without a look at what happened, which is returned."""
    arrivals = greedy_arrivals(seed)
    return compare_texts(engine, arrivals, engine.run(TIGHT, arrivals))


def greedy_arrivals(seed: int) -> list[tuple[int, Request]]:
    """Five prompts with the steps in which they come, some with two choices."""
    return [
        (due, greedy(str(i), prompt, NEW, 1 + i % 2))
        for i, (due, prompt) in enumerate(
            zip((0, 0, 4, 5, 9), prompts(seed, LENGTHS, SHARED), strict=True)
        )
    ]


def compare_texts(
    engine: Rig, arrivals: Iterable[tuple[int, Request]], outcome: Outcome
) -> SchedulerStats:
    """Assert that each text is that of the reference; what happened beside them is returned."""
    for _, request in arrivals:
        want = engine.reference(request.prompt, NEW)
        for choice in range(request.params.n):
            assert outcome.texts[request.id, choice] == want
    assert outcome.stats is not None
    return outcome.stats
