"""The composition root: a model directory and a configuration become an engine.

Owns the order: refuse settings → inspect → size → load → self-test → size again with the measured
bytes → cache → runner → scheduler → engine. Each gets what it needs in its constructor;
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

from fairlead_runtime.build.checks import check, device_facts, dtype_name
from fairlead_runtime.build.host import cpu_limit, resident_bytes
from fairlead_runtime.build.load_rank import LoadedRank, load_rank
from fairlead_runtime.build.rank_leader import Lost, Ranks
from fairlead_runtime.build.resolve import ResolvedConfig, resolve, summary
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.device.warmup.decode_plan import DecodePlan
from fairlead_runtime.device.warmup.profiling import Profile
from fairlead_runtime.engine.engine import Bounds, Engine, Observer
from fairlead_runtime.engine.progress import StepTimes
from fairlead_runtime.grammar.checker import NO_GRAMMARS
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.models.loading import InspectedModel, LoadedModel
from fairlead_runtime.outputs import ModelFacts
from fairlead_runtime.recording.record import RecordedScheduler
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.scheduling.plan import Limits
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.sizing.groups import pool_units
from fairlead_runtime.sizing.report import MemoryReport, memory_report
from fairlead_runtime.sizing.terms import DeviceFacts, decode_state

log = logging.getLogger("fairlead.build")

CACHED = 16 << 20  # bytes of weights that a processor's caches hold
MASK_THREADS = 4  # at most, and one CPU stays for the step
# Terms of the memory report that cannot be measured, and why.
NOT_MEASURED = {
    "shared_memory": "not applicable: it is the pod's limit, of which only NCCL may use some",
    "grammars": "reserved: for the tokenizers of structured output, in two processes",
    "tokenizers": "reserved: for the tokenizers of text, in all processes",
    "attention": "reserved: what plain torch takes; the C++ kernels take less",
    "http": "reserved: for connections beyond 2,048, TLS, and bodies beyond 2 MiB",
    "bookkeeping": "reserved: for the ids of tokens and blocks, as many as the limits allow",
}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine whose model passed the self-test, and what the HTTP server and LLM need with it."""

    engine: Engine
    facts: ModelFacts
    intake: Intake
    read_tokenizer: Callable[[], PreTrainedTokenizerBase]
    resolved: ResolvedConfig
    memory: MemoryReport
    grammar_facts: TokenizerFacts | None  # None: the model cannot have structured output
    ranks: Ranks | None  # the other processes of a model that is split

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.read_tokenizer()

    def close(self) -> None:
        """End what was started; a second call does nothing."""
        if self.ranks is not None:
            self.ranks.close()


def build(
    path: Path | str,
    config: EngineConfig,
    *,
    observer: Observer | None = None,
    now: Callable[[], float] = time.monotonic,
    queue_timeout: float | None = None,
    http_process_bytes: int | None = None,
    lost: Lost | None = None,
    text: Callable[[], TextFacts | None] | None = None,
    report: Report = unreported,
) -> BuiltEngine:
    """Load the model in directory ``path`` and build its engine; takes seconds to minutes.

    ``queue_timeout`` (seconds) overrides the configured one. ``http_process_bytes``: the bytes of
    RAM that the HTTP process takes beside this one; None without one. With ``tensor_parallel`` this
    process is rank 0 and starts the others; ``lost`` is called in another thread when one of them
    ends or refuses to start, after which no step succeeds. ``text``: as ``loading.load`` takes it,
    where the HTTP process reads the tokenizer. ``report`` hears what the start does,
    from the weights on. Raises ConfigError, ModelError,
    EngineDead when another rank cannot start, or SelfTestError when the model's logits differ from
    those of transformers.
    """
    device = device_facts(config.device, config.tensor_parallel)
    process_bytes = resident_bytes() + (http_process_bytes or 0)
    inspected = check(path, config, device, report, reads_tokenizer=text is None)
    threads = _limit_threads(
        has_http_process=http_process_bytes is not None,
        cached=inspected.weight_bytes <= CACHED,
        ranks=config.tensor_parallel,
    )
    ranks = None
    if config.tensor_parallel > 1:
        ranks = Ranks(path, config, threads=threads, lost=lost)
    try:
        group = ranks.rank_group if ranks else None
        loaded_rank = load_rank(path, config, device, group, report, inspected=inspected, text=text)
        report("cache")
        return _with_engine(
            loaded_rank,
            inspected,
            config,
            device,
            process_bytes,
            observer,
            now,
            queue_timeout,
            ranks,
        )
    except BaseException as error:
        if ranks is not None:
            ranks.close()
            if ranks.error is not None and isinstance(error, Exception):
                raise ranks.error from error  # which has ended the sum that this one was in
        raise


def _with_engine(
    loaded_rank: LoadedRank,
    inspected: InspectedModel,
    config: EngineConfig,
    device: DeviceFacts,
    process_bytes: int,
    observer: Observer | None,
    now: Callable[[], float],
    queue_timeout: float | None,
    ranks: Ranks | None,
) -> BuiltEngine:
    loaded, model, profile = loaded_rank.loaded, loaded_rank.model, loaded_rank.profile
    profiled = loaded_rank.measured if ranks is None else ranks.sync(loaded_rank.measured)
    process = {"process": process_bytes} if device.kind == "cpu" else {}
    choice = DecodePlan.choose(config, model, loaded_rank.attention, sharded=ranks is not None)
    resident, host_batch = choice.state_on_device, profiled["batch"]
    groups = model.groups
    state_bytes = decode_state(inspected.shape, config, groups) if resident else 0
    graphs = choice.measure(loaded.max_model_len) if resident else 0
    measured = {**profiled, **process, "batch": host_batch + state_bytes, "graphs": graphs}
    resolved = resolve(
        config, inspected.shape, device, dtype=dtype_name(loaded.dtype), measured=measured
    )
    units = pool_units(resolved.num_blocks, len(groups))
    # One more for padding.
    sizes = {"units": units + resident, "block_size": resolved.plan.block_size}
    cache = loaded_rank.cache(**sizes, host_units=resolved.offload_units)
    not_pinned = cache.not_pinned
    limits = resolved.config
    decodes = choice.steps(cache, resolved.max_model_len)
    sampler = choice.sampler(cache, resolved.max_model_len)
    if ranks is not None:
        attention = loaded_rank.attention
        tables = None if sampler is None else sampler.table.tables_for(attention)
        shape = None if tables is None else tables.shape
        elsewhere = ranks.serve(shape, **sizes, host_units=resolved.offload_units)
        not_pinned = not_pinned or elsewhere
    allocated = {**measured, **_cache_bytes(cache, units, device)}
    if (state := decodes or sampler) is not None:
        allocated["batch"] = host_batch + state.nbytes
    if (graph_bytes := choice.capture(decodes)) is not None:
        allocated["graphs"] = graph_bytes
    ids = loaded.shape.vocab, loaded.eos_ids
    if loaded.text.definition:
        grammar_facts = TokenizerFacts.of_text(loaded.text, *ids)
    else:
        grammar_facts = TokenizerFacts.of(loaded.tokenizer, *ids)
    guides = _guides(grammar_facts)
    runner = ModelRunner(
        model,
        cache,
        loaded_rank.attention,
        max_logits=limits.max_rows,
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
        log.info(
            "asynchronous steps: %s", f"off: {choice.sync_because}" if choice.sync_because else "on"
        )
    launcher = None if choice.sync_because else runner
    engine = _engine(
        loaded, cache, runner, launcher, resolved, profile, queue_timeout, observer, now, guides
    )
    facts = ModelFacts(loaded.eos_ids, loaded.shape.vocab, resolved.config.seed)
    return BuiltEngine(
        engine=engine,
        facts=facts,
        intake=Intake(engine.bounds.resolve_max_tokens, facts),
        read_tokenizer=loaded.read_tokenizer,
        resolved=resolved,
        memory=_memory_report(
            config,
            inspected,
            device,
            resolved,
            allocated,
            choice.graphs_off_because,
            cache.host_nbytes,
            not_pinned,
            loaded_rank.losses,
        ),
        grammar_facts=grammar_facts,
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
        state_units=resolved.plan.state_units,
        state_versions=resolved.plan.state_versions,
        cache_tokens=resolved.plan.cache_tokens,
        shares_answers=runner.shares_answers,
    )
    config = resolved.config
    return Engine(
        _schedulers(limits, cache, loaded.identity, config.record, now),
        runner,
        Bounds.of(
            limits,
            max_queue=config.max_queue,
            queue_timeout=queue_timeout,
            waiting=resolved.plan.traffic.waiting_tokens,
        ),
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


def _memory_report(
    config: EngineConfig,
    inspected: InspectedModel,
    device: DeviceFacts,
    resolved: ResolvedConfig,
    measured: Mapping[str, int],
    no_graphs: str,
    host_nbytes: int,
    not_pinned: str,
    losses: Mapping[str, str],
) -> MemoryReport:
    """Compare each measured term with the plan that was made before the weights were loaded, and
    say what it costs that weights or cache are rounded.
    """
    planned = resolve(config, inspected.shape, device, dtype=resolved.dtype).plan.terms
    notes = {**NOT_MEASURED, "graphs": f"not applicable: {no_graphs}"}
    if no_graphs:
        measured = {name: size for name, size in measured.items() if name != "graphs"}
    pinned = None
    if device.kind == "cuda":  # every rank has as much
        note = f"not pinned: {not_pinned}" if not_pinned else ""
        pinned = host_nbytes * config.tensor_parallel, note
    return memory_report(replace(resolved.plan, terms=planned), measured, notes, pinned, losses)


def _limit_threads(*, has_http_process: bool, cached: bool, ranks: int) -> int:
    """Let torch use at most as many threads as there are CPUs, unless OMP_NUM_THREADS is set.
    Processes that compute together share them. Returns their number.

    With ``has_http_process``, one CPU of more than two is the HTTP process's, and one of two for a
    model whose weights are ``cached``: its steps are so short that the threads would wait for each
    other longer than they compute, whenever the HTTP process runs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = min(cpu_limit(), torch.get_num_threads())
        reserved = has_http_process and (cached or threads > 2)
        torch.set_num_threads(max(1, (threads - reserved) // ranks))
    return torch.get_num_threads()
