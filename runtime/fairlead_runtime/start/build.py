"""The composition root: a model directory and a configuration become an engine.

Owns the order: refuse settings → inspect → size → load → prove by the self-test → size again with
what was measured → cache → runner → scheduler → engine. Everything gets what it needs ready made;
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

from fairlead_kernels.backend import pick
from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.device import profiling, selftest
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.model_runner import ModelRunner
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.engine.engine import Bounds, Engine, Observer
from fairlead_runtime.models import loading
from fairlead_runtime.models.loading import Inspected, LoadedModel
from fairlead_runtime.preflight import check_record
from fairlead_runtime.recording.record import RecordedScheduler
from fairlead_runtime.scheduling.plan import Limits
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.detokenize import Vocabulary, vocabulary_of
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.sizing.groups import group_layers
from fairlead_runtime.sizing.report import MemoryReport, memory_report
from fairlead_runtime.sizing.terms import DeviceFacts
from fairlead_runtime.start.host import cpu_limit, memory_limit
from fairlead_runtime.start.resolve import Resolved, check_supported, resolve, summary

log = logging.getLogger("fairlead.build")

# Terms of the report that have no measured side, and why.
NOT_MEASURED = {
    "graphs": "not applicable: no graph is captured yet",
    "shared_memory": "not applicable: the pod's limit, of which the runtime uses nothing",
}


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that has proven its model, and what its faces need beside it."""

    engine: Engine
    intake: Intake
    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    resolved: Resolved
    memory: MemoryReport
    loaded_at: float  # by the clock given: when the weights were in memory


def device_facts() -> DeviceFacts:
    """The first CUDA device if there is one, else this host."""
    if torch.cuda.is_available():
        return DeviceFacts("cuda", torch.cuda.get_device_properties(0).total_memory)
    return DeviceFacts("cpu", memory_limit())


def check(path: Path | str, config: EngineConfig, device: DeviceFacts) -> Inspected:
    """Everything that can be refused before a weight is read. Raises ConfigError or ModelError."""
    check_supported(config)
    check_record(config)
    found = loading.inspect(path, config)
    resolve(config, found.shape, device, dtype=_name(found.dtype))
    return found


def build(
    path: Path | str,
    config: EngineConfig,
    *,
    observer: Observer | None = None,
    now: Callable[[], float] = time.monotonic,
    queue_timeout: float | None = None,
) -> Built:
    """Load the model in directory ``path`` and build its engine; takes seconds to minutes.

    ``queue_timeout`` (seconds) takes the place of the configured one, which is for clients that
    wait. Raises ConfigError, ModelError, or SelfTestError when the model's logits are not
    transformers'.
    """
    device = device_facts()
    _bound_threads()
    process = _resident()
    found = check(path, config, device)
    loaded = loading.load(path, config=config, device=device.kind)
    loaded_at = now()
    model, proof = selftest.prove(loaded)
    log.info("%s", proof)
    measured = {
        **_measured(model, device, process),
        **_profiled(model, config, loaded.max_model_len),
    }
    resolved = resolve(config, found.shape, device, dtype=_name(loaded.dtype), measured=measured)
    cache = _cache(model, resolved)
    runner = ModelRunner(model, cache)
    for warning in resolved.warnings:
        log.warning("%s", warning)
    log.info("%s", summary(resolved))
    patience = resolved.config.queue_timeout if queue_timeout is None else queue_timeout
    engine = _engine(loaded, cache, runner, resolved, patience, observer, now)
    intake = Intake(
        engine.resolve_max_tokens,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.shape.vocab,
        seed=resolved.config.seed,
    )
    return Built(
        engine=engine,
        intake=intake,
        vocabulary=vocabulary_of(loaded.tokenizer),
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.shape.vocab,
        resolved=resolved,
        memory=_report(config, found, device, resolved, {**measured, **_allocated(cache, device)}),
        loaded_at=loaded_at,
    )


def _engine(
    loaded: LoadedModel,
    cache: CacheStorage,
    runner: ModelRunner,
    resolved: Resolved,
    queue_timeout: float,
    observer: Observer | None,
    now: Callable[[], float],
) -> Engine:
    limits = Limits.of(
        resolved.config,
        num_blocks=resolved.num_blocks,
        max_model_len=resolved.max_model_len,
        offload_units=resolved.offload_units,
    )
    config = resolved.config
    return Engine(
        _schedulers(limits, cache, loaded.identity, config.record, now),
        runner,
        Bounds.of(limits, max_queue=config.max_queue, queue_timeout=queue_timeout),
        now=now,
        observer=observer,
    )


def _schedulers(
    limits: Limits, cache: CacheStorage, identity: bytes, record: str, now: Callable[[], float]
) -> Callable[[], Scheduler]:
    """Makes the engine's schedulers; with ``record`` each writes a file, those after a fault
    FILE.1, FILE.2 …
    """
    made = itertools.count()

    def make() -> Scheduler:
        if not record:
            return Scheduler(limits, cache.groups, identity)
        number = next(made)
        path = f"{record}.{number}" if number else record
        try:
            return RecordedScheduler(limits, cache.groups, identity, path=path, clock=now)
        except OSError as error:
            raise ConfigError(
                "record", f"{path}: {error.strerror}", "name a file that can be written"
            ) from error

    return make


def _cache(model: PagedModel, resolved: Resolved) -> CacheStorage:
    groups = group_layers(model.windows)
    try:
        return CacheStorage(
            groups,
            model.heads,
            units=resolved.num_blocks * len(groups),
            block_size=resolved.plan.block_size,
            device=model.device,
            host_units=resolved.offload_units,
        )
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise ConfigError(
            "num_blocks",
            f"{resolved.num_blocks} blocks could not be allocated",
            "lower it or max_memory_percent",
        ) from error


def _measured(model: PagedModel, device: DeviceFacts, process: int) -> Mapping[str, int]:
    """Bytes of the terms that are known now; tied weights count once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.model.parameters(), *model.model.buffers())
    }
    found = {"weights": sum(storages.values())}
    return found | {"process": process} if device.kind == "cpu" else found


def _allocated(cache: CacheStorage, device: DeviceFacts) -> Mapping[str, int]:
    """Bytes of the terms that exist once the cache does."""
    found = {"kv": cache.nbytes}
    return found | {"offload": cache.host_nbytes} if device.kind == "cpu" else found


def _profiled(model: PagedModel, config: EngineConfig, max_model_len: int) -> Mapping[str, int]:
    """Bytes that the largest steps take beside weights and cache."""
    try:
        return profiling.profile(
            model,
            pick(model.heads, model.device).attention,
            max_batch_tokens=config.max_batch_tokens,
            max_requests=config.max_requests,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "max_batch_tokens",
            f"a step of {config.max_batch_tokens} tokens does not fit beside the weights",
            "lower it or max_requests",
        ) from error


def _report(
    config: EngineConfig,
    found: Inspected,
    device: DeviceFacts,
    resolved: Resolved,
    measured: Mapping[str, int],
) -> MemoryReport:
    """The outcome, with each term as it was planned before anything was measured."""
    planned = resolve(config, found.shape, device, dtype=resolved.dtype).plan.terms
    return memory_report(replace(resolved.plan, terms=planned), measured, NOT_MEASURED)


def _bound_threads() -> None:
    """Let torch use no more threads than this process has CPUs; OMP_NUM_THREADS, if set, has
    decided already.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(cpu_limit(), torch.get_num_threads()))


def _resident() -> int:
    """Bytes of RAM this process has before it reads a weight."""
    with Path("/proc/self/statm").open(encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
