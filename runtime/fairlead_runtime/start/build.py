"""The composition root: a model directory and a configuration become an engine.

Owns the order: refuse settings → inspect → size → load → self-test → size again with the measured
bytes → cache → runner → scheduler → engine. Each part gets the parts it needs in its constructor;
nothing is configured afterwards.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fairlead_kernels.attention import AttentionBackend, Heads
from fairlead_kernels.backend import check_fixed, cpu_operations, flashinfer_for
from fairlead_kernels.not_available import NotAvailableError
from fairlead_kernels.torch_attention import TorchAttention
from fairlead_runtime.config import ConfigError, Device, EngineConfig
from fairlead_runtime.device import profiling, selftest
from fairlead_runtime.device.group import Group
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.model_runner import ModelRunner
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.device.profiling import Profile
from fairlead_runtime.engine.engine import Bounds, Engine, Observer
from fairlead_runtime.engine.progress import StepTimes
from fairlead_runtime.grammar.checker import NO_GRAMMARS
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.heap import release_memory
from fairlead_runtime.models import loading
from fairlead_runtime.models.loading import InspectedModel, LoadedModel
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.outputs import ModelFacts
from fairlead_runtime.preflight import check_record
from fairlead_runtime.recording.record import RecordedScheduler
from fairlead_runtime.scheduling.plan import Limits
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.detokenize import Vocabulary, vocabulary_of
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.sizing.groups import group_layers
from fairlead_runtime.sizing.published import as_stored
from fairlead_runtime.sizing.report import MemoryReport, memory_report
from fairlead_runtime.sizing.terms import DeviceFacts, decode_state, split
from fairlead_runtime.start.decodes import Decodes
from fairlead_runtime.start.host import cpu_limit, memory_limit, resident_bytes
from fairlead_runtime.start.ranks import Lost, Ranks
from fairlead_runtime.start.resolve import ResolvedConfig, resolve, summary
from fairlead_runtime.supported import check_supported

log = logging.getLogger("fairlead.build")

CACHED = 16 << 20  # bytes of weights that a processor's caches hold
MASK_THREADS = 4  # at most, and one CPU stays for the step
# Terms of the memory report that cannot be measured, and why.
NOT_MEASURED = {
    "shared_memory": "not applicable: it is the pod's limit, and the runtime uses none of it",
    "grammars": "reserved: for the tokenizers of structured output, in two processes",
    "attention": "reserved: what plain torch takes; the C++ kernels take less",
    "bookkeeping": "reserved: for the ids of tokens and blocks, as many as the limits allow",
}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine whose model passed the self-test, and what the HTTP server and LLM need with it."""

    engine: Engine
    facts: ModelFacts
    intake: Intake
    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase
    resolved: ResolvedConfig
    memory: MemoryReport
    grammar_facts: TokenizerFacts | None  # None: the model cannot have structured output
    loaded_at: float  # time of ``now`` at which the weights were in memory
    ranks: Ranks | None  # the other processes of a model that is split

    def close(self) -> None:
        """End what was started; a second call does nothing."""
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True)
class RankParts:
    """One rank's part of a model that is split, and what it takes."""

    loaded: LoadedModel
    served: selftest.ServedModel
    result: selftest.SelfTestResult | None
    profile: Profile
    loaded_at: float

    @property
    def model(self) -> PagedModel:
        return self.served.model

    @property
    def attention(self) -> AttentionBackend:
        return self.served.choice.attention

    @property
    def measured(self) -> Mapping[str, int]:
        return {"weights": self.model.weight_bytes, **self.profile.measured}

    def cache(self, *, units: int, block_size: int, host_units: int) -> CacheStorage:
        return _storage(self.model, units, block_size, host_units)


def device_facts(choice: Device = "auto", ranks: int = 1) -> DeviceFacts:
    """The first CUDA device if the host has one and ``choice`` allows it, else the share of the
    host of each of ``ranks`` processes. Raises ModelError, and ConfigError for more ranks than
    devices.
    """
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ModelError(
            "NoAccelerator",
            "--device: cuda, but torch finds no accelerator",
            "check the driver, and that the pod was given one; or use --device cpu",
        )
    if choice != "cpu" and available:
        if (count := torch.cuda.device_count()) < ranks:
            problem = f"{ranks} accelerators are asked for, torch finds {count}"
            raise ConfigError("tensor_parallel", problem, f"use {count} or give the pod more")
        return DeviceFacts("cuda", torch.cuda.get_device_properties(0).total_memory)
    return DeviceFacts("cpu", memory_limit() // ranks)


def check(path: Path | str, config: EngineConfig, device: DeviceFacts) -> InspectedModel:
    """Make every check that needs no weights. Raises ConfigError or ModelError."""
    check_supported(config)
    check_record(config)
    inspected = loading.inspect(path, config)
    resolve(config, inspected.shape, device, dtype=_dtype_name(inspected.dtype))
    _check_kernels(as_stored(config, inspected.shape.quantized), device, inspected)
    return inspected


def _check_kernels(config: EngineConfig, device: DeviceFacts, inspected: InspectedModel) -> None:
    """Raise ConfigError for a setting that needs kernels which cannot serve this model here."""
    shape, dtype, ranks = inspected.shape, inspected.dtype, config.tensor_parallel
    fp8_cache = config.fp8_cache
    if config.kernels == "flashinfer":
        kv_heads = split(shape.kv_heads, ranks)
        dims = shape.head_dim, shape.head_dim
        heads = Heads(shape.heads // ranks, kv_heads, *dims, dtype, fp8_cache)
        try:
            flashinfer_for(heads, torch.device(device.kind))
        except NotAvailableError as error:
            raise ConfigError("kernels", f"flashinfer: {error}", "use auto or torch") from error
    if config.kernels == "cpu":
        try:
            cpu_operations(device.kind, dtype, fp8_cache=fp8_cache)
        except NotAvailableError as error:
            raise ConfigError("kernels", f"cpu: {error}", "use auto or torch") from error
    if config.quantization != "none":
        _check_quantization(config, device, inspected)
    if config.deterministic:
        kv_heads, dims = shape.kv_heads, (shape.head_dim, shape.head_dim)
        heads = Heads(shape.heads, kv_heads, *dims, dtype, fp8_cache)
        try:
            check_fixed(heads, torch.device(device.kind), config.kernels)
        except NotAvailableError as error:
            raise ConfigError("deterministic", str(error), "use false") from error


def _check_quantization(
    config: EngineConfig, device: DeviceFacts, inspected: InspectedModel
) -> None:
    """Raise ConfigError where no kernels can multiply by the quantized weights."""
    name = config.quantization
    plain = "use the unquantized checkpoint" if inspected.shape.quantized else "use none"
    if config.kernels == "torch":
        problem = f"{name} needs kernels of its own, --kernels is torch"
        raise ConfigError("quantization", problem, "use --kernels auto")
    if device.kind == "cpu":
        try:
            cpu_operations(device.kind, inspected.dtype)
        except NotAvailableError as error:
            problem = f"{name} needs the C++ kernels: {error}"
            raise ConfigError("quantization", problem, plain) from error


def build(
    path: Path | str,
    config: EngineConfig,
    *,
    observer: Observer | None = None,
    now: Callable[[], float] = time.monotonic,
    queue_timeout: float | None = None,
    beside: int | None = None,
    lost: Lost | None = None,
) -> EngineParts:
    """Load the model in directory ``path`` and build its engine; takes seconds to minutes.

    ``queue_timeout`` (seconds) overrides the configured one. ``beside``: the bytes of RAM that the
    HTTP process takes beside this one; None without one. With ``tensor_parallel`` this process is
    rank 0 and starts the others; ``lost`` is called in another thread with the reason when one of
    them ends, after which no step succeeds. Raises ConfigError, ModelError, EngineDead when another
    rank cannot start, or SelfTestError when the model's logits differ from those of transformers.
    """
    device = device_facts(config.device, config.tensor_parallel)
    process_bytes = resident_bytes() + (beside or 0)
    inspected = check(path, config, device)
    threads = _limit_threads(
        others=beside is not None,
        cached=inspected.files.weight_bytes <= CACHED,
        ranks=config.tensor_parallel,
    )
    ranks = None
    if config.tensor_parallel > 1:
        ranks = Ranks(path, config, threads=threads, lost=lost)
    try:
        parts = load_rank(path, config, device, ranks.group if ranks else None, now)
        return _with_engine(
            parts, inspected, config, device, process_bytes, observer, now, queue_timeout, ranks
        )
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def load_rank(
    path: Path | str,
    config: EngineConfig,
    device: DeviceFacts,
    group: Group | None,
    now: Callable[[], float] = time.monotonic,
) -> RankParts:
    """Load the model, or with ``group`` this rank's part of it, test and measure it.

    Every rank makes the same passes in the same order: they meet in each of them. Raises as
    ``build`` does.
    """
    place, fp8_cache = torch.device(device.kind), config.fp8_cache
    loaded = loading.load(path, config=config, device=place if group is None else "cpu")
    result: selftest.SelfTestResult | None
    if group is None:
        served, result = selftest.prepare_and_test(
            loaded,
            config.kernels,
            config.quantization,
            fp8_cache=fp8_cache,
            deterministic=config.deterministic,
        )
    else:
        if place.type == "cuda":
            place = torch.device("cuda", group.rank)
        served, result = selftest.prepare_rank(
            loaded, group, place, config.kernels, config.quantization, fp8_cache=fp8_cache
        )
    loaded_at = now()
    model, choice = served.model, served.choice
    if served.fusion.stored is not torch.float32:
        release_memory()  # of the weights in float32, before they were packed
    log.info("kernels: %s, %s", choice, served.fusion)
    if result is not None:
        log.info("%s", result)
    profile = _profile(model, choice.attention, config, loaded.max_model_len)
    return RankParts(loaded, served, result, profile, loaded_at)


def _with_engine(
    parts: RankParts,
    inspected: InspectedModel,
    config: EngineConfig,
    device: DeviceFacts,
    process_bytes: int,
    observer: Observer | None,
    now: Callable[[], float],
    queue_timeout: float | None,
    ranks: Ranks | None,
) -> EngineParts:
    loaded, model, profile = parts.loaded, parts.model, parts.profile
    measured = parts.measured if ranks is None else ranks.sync(parts.measured)
    if device.kind == "cpu":
        measured = {**measured, "process": process_bytes}
    choice = Decodes.choose(config, model, parts.attention, split=ranks is not None)
    resident, host_batch = choice.keeps, measured["batch"]
    if resident:
        kept = decode_state(inspected.shape, config, group_layers(model.windows))
        graphs = choice.measure(loaded.max_model_len)
        measured = {**measured, "batch": host_batch + kept, "graphs": graphs}
    resolved = resolve(
        config, inspected.shape, device, dtype=_dtype_name(loaded.dtype), measured=measured
    )
    units = resolved.num_blocks * len(group_layers(model.windows))
    # One more for padding.
    sizes = {"units": units + resident, "block_size": resolved.plan.block_size}
    cache = parts.cache(**sizes, host_units=resolved.offload_units)
    if ranks is not None:
        ranks.serve(**sizes, host_units=resolved.offload_units)
    limits = resolved.config
    decodes = choice.steps(cache, resolved.max_model_len)
    sampler = choice.sampler(cache, resolved.max_model_len)
    if (kept_there := decodes or sampler) is not None:
        measured = {**measured, "batch": host_batch + kept_there.nbytes}
    if (graph_bytes := choice.capture(decodes)) is not None:
        measured = {**measured, "graphs": graph_bytes}
    grammar_facts = TokenizerFacts.of(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    guides = _guides(grammar_facts)
    runner = ModelRunner(
        model,
        cache,
        parts.attention,
        max_logits=min(limits.max_requests, limits.max_batch_tokens),
        guides=guides,
        followers=ranks,
        decodes=decodes,
        row_sampler=sampler,
    )
    for warning in resolved.warnings:
        log.warning("%s", warning)
    log.info("%s", summary(resolved))
    if queue_timeout is None:
        queue_timeout = resolved.config.queue_timeout
    if device.kind == "cuda":
        log.info("asynchronous steps: %s", f"off: {choice.waits}" if choice.waits else "on")
    launcher = None if choice.waits else runner
    engine = _engine(
        loaded, cache, runner, launcher, resolved, profile, queue_timeout, observer, now, guides
    )
    facts = ModelFacts(loaded.eos_ids, loaded.shape.vocab, resolved.config.seed)
    return EngineParts(
        engine=engine,
        facts=facts,
        intake=Intake(engine.bounds.resolve_max_tokens, facts),
        vocabulary=vocabulary_of(loaded.tokenizer),
        tokenizer=loaded.tokenizer,
        resolved=resolved,
        memory=_memory_report(
            config,
            inspected,
            device,
            resolved,
            {**measured, **_cache_bytes(cache, units, device)},
            choice.off,
            cache,
        ),
        grammar_facts=grammar_facts,
        loaded_at=parts.loaded_at,
        ranks=ranks,
    )


def _engine(
    loaded: LoadedModel,
    cache: CacheStorage,
    runner: ModelRunner,
    launcher: ModelRunner | None,
    resolved: ResolvedConfig,
    profile: Profile,
    queue_timeout: float,
    observer: Observer | None,
    now: Callable[[], float],
    guides: Guides | None,
) -> Engine:
    limits = Limits.of(
        resolved.config,
        num_blocks=resolved.num_blocks,
        max_model_len=resolved.max_model_len,
        offload_units=resolved.offload_units,
        prefill_beside_decodes=resolved.prefill_beside_decodes,
    )
    config = resolved.config
    return Engine(
        _schedulers(limits, cache, loaded.identity, config.record, now),
        runner,
        Bounds.of(limits, max_queue=config.max_queue, queue_timeout=queue_timeout),
        now=now,
        observer=observer,
        step_times=StepTimes(
            profile.token_seconds,
            profile.decode_seconds,
            full=profile.token_seconds * config.max_batch_tokens,
        ),
        prepare=None if guides is None else guides.prepare,
        launcher=launcher,
    )


def _schedulers(
    limits: Limits, cache: CacheStorage, identity: bytes, record: str, now: Callable[[], float]
) -> Callable[[], Scheduler]:
    """A factory of the engine's schedulers. With ``record`` each writes a recording: the first to
    FILE, those that replace it after a fault to FILE.1, FILE.2 …
    """
    numbers = itertools.count()

    def make() -> Scheduler:
        if not record:
            return Scheduler(limits, cache.groups, identity)
        number = next(numbers)
        path = f"{record}.{number}" if number else record
        try:
            return RecordedScheduler(limits, cache.groups, identity, path=path, clock=now)
        except OSError as error:
            raise ConfigError(
                "record", f"{path}: {error.strerror}", "name a writable file"
            ) from error

    return make


def _storage(model: PagedModel, units: int, block_size: int, host_units: int) -> CacheStorage:
    groups = group_layers(model.windows)
    try:
        return CacheStorage(
            groups,
            model.heads,
            units=units,
            block_size=block_size,
            device=model.device,
            host_units=host_units,
        )
    except OSError as error:
        raise ConfigError(
            "cpu_offload_space",
            f"{host_units} units of host memory could not be mapped: {error.strerror}",
            "lower it or give the pod more memory",
        ) from error
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise ConfigError(
            "num_blocks",
            f"{units // len(groups)} blocks could not be allocated",
            "lower it or max_memory_percent",
        ) from error


def _guides(facts: TokenizerFacts | None) -> Guides | None:
    """Built before anything is served: the tokenizer takes the interpreter's lock for a second."""
    if facts is None:
        log.warning("no structured output: %s", NO_GRAMMARS)
        return None
    return Guides(facts, threads=max(1, min(MASK_THREADS, cpu_limit() - 1)))


def _cache_bytes(cache: CacheStorage, units: int, device: DeviceFacts) -> Mapping[str, int]:
    """Bytes of the cache's units that sequences can hold and, on a CPU, of its offload space, on a
    GPU of what the way there takes.
    """
    kv = {"kv": cache.nbytes * units // cache.units}
    if device.kind == "cpu":
        return kv | {"offload": cache.host_nbytes}
    return kv | ({"staging": cache.staging_nbytes} if cache.staging_nbytes else {})


def _profile(
    model: PagedModel, attention: AttentionBackend, config: EngineConfig, max_model_len: int
) -> Profile:
    """Bytes that the largest steps take in addition to weights and cache, and their times."""
    if isinstance(attention, TorchAttention):
        attention = TorchAttention(model.heads, model.device)  # one that keeps no memory yet
    try:
        return profiling.profile(
            model,
            attention,
            max_batch_tokens=config.max_batch_tokens,
            max_requests=config.max_requests,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "max_batch_tokens",
            f"a step of {config.max_batch_tokens} tokens does not fit in memory with the weights",
            "lower it or max_requests",
        ) from error


def _memory_report(
    config: EngineConfig,
    inspected: InspectedModel,
    device: DeviceFacts,
    resolved: ResolvedConfig,
    measured: Mapping[str, int],
    no_graphs: str,
    cache: CacheStorage,
) -> MemoryReport:
    """Compare each measured term with the plan that was made before the weights were loaded."""
    planned = resolve(config, inspected.shape, device, dtype=resolved.dtype).plan.terms
    notes = {**NOT_MEASURED, "graphs": f"not applicable: {no_graphs}"}
    if no_graphs:
        measured = {name: size for name, size in measured.items() if name != "graphs"}
    pinned = None
    if device.kind == "cuda":  # every rank has as much
        note = f"not pinned: {cache.not_pinned}" if cache.not_pinned else ""
        pinned = cache.host_nbytes * config.tensor_parallel, note
    return memory_report(replace(resolved.plan, terms=planned), measured, notes, pinned)


def _limit_threads(*, others: bool, cached: bool, ranks: int) -> int:
    """Let torch use at most as many threads as there are CPUs, unless OMP_NUM_THREADS is set.
    Processes that compute together share them. Returns their number.

    With ``others`` to run, one CPU of more than two is theirs, and one of two for a model whose
    weights are ``cached``: its steps are so short that the threads would wait for each other longer
    than they compute, whenever one of the others runs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = min(cpu_limit(), torch.get_num_threads())
        left = others and (cached or threads > 2)
        torch.set_num_threads(max(1, (threads - left) // ranks))
    return torch.get_num_threads()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
