"""One rank's shard of a model, or all of it: loaded, tested, measured, and the cache beside it.

Owns what every rank does alike, before the first of them sizes the cache.
"""

import functools
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_kernels.packages.humming_memory import COMPILER
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_kernels.proofs.attention_timing import timing
from fairlead_runtime.build.host import cpu_limit, memory_limit
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.device.warmup.profiling import Profile
from fairlead_runtime.models import loading
from fairlead_runtime.models.loading import InspectedModel, LoadedModel
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.sizing.terms import DeviceFacts, gib, state_units, state_versions

log = logging.getLogger("fairlead.build")


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """What a rank serves, and what it takes."""

    loaded: LoadedModel
    served: selftest.ServedModel
    result: selftest.SelfTestResult | None
    profile: Profile

    @property
    def model(self) -> PagedModel:
        return self.served.model

    @property
    def attention(self) -> AttentionBackend:
        return self.served.choice.attention

    @property
    def measured(self) -> Mapping[str, int]:
        return {"weights": self.model.weight_bytes, **self.profile.measured}

    @property
    def losses(self) -> Mapping[str, str]:
        """What it costs that weights or cache are rounded, by the term of the memory plan."""
        roundings = (
            {"weights": self.result.rounding, "kv": self.result.cache} if self.result else {}
        )
        return {name: str(loss) for name, loss in roundings.items() if loss is not None}

    def cache(self, *, units: int, block_size: int, host_units: int) -> CacheStorage:
        return _storage(self.model, units, block_size, host_units)


def load_rank(
    path: Path | str,
    config: EngineConfig,
    device: DeviceFacts,
    ranks: RankGroup | None,
    report: Report = unreported,
    *,
    inspected: InspectedModel | None = None,
    text: Callable[[], TextFacts | None] | None = None,
) -> LoadedRank:
    """Load the model, or with ``ranks`` this rank's shard of it, test and measure it; ``report``
    hears what it does. ``inspected`` and ``text``: as ``loading.load`` takes them.

    Every rank makes the same passes in the same order: they meet in each of them. Raises as
    ``build`` does.
    """
    place, fp8_cache = torch.device(device.kind), config.fp8_cache
    rank_device = torch.device("cuda", ranks.rank) if ranks and device.kind == "cuda" else place
    if rank_device.type == "cuda" and (shared := taken_by_others(config, rank_device)):
        log.warning("%s", shared)
    sum_in_float32()
    compilers = compilers_of(cpu_limit(), memory_limit())
    result: selftest.SelfTestResult | None
    if ranks is None:
        loaded, served, result = _load_and_test(
            path, config, place, compilers, inspected, text, report
        )
    else:
        loaded = loading.load(path, config=config, inspected=inspected, text=text, report=report)
        served, result = selftest.prepare_rank(
            loaded,
            ranks,
            rank_device,
            config.kernels,
            config.quantization,
            fp8_cache=fp8_cache,
            block_size=config.block_size,
            compilers=compilers,
            report=report,
        )
    report("profile")
    model, choice = served.model, served.choice
    if served.fusion.stored is not torch.float32 or model.matrix_dtype is not torch.float32:
        release_memory()  # of the weights in float32, before they were packed
    log.info("kernels: %s, %s", choice, served.fusion)
    if rank_device.type == "cuda":
        log.info("%s", price_of_attention(choice.attention, model, config))
    if result is not None:
        log.info("%s", result)
    profile = _profile(loaded, model, choice.attention, config)
    return LoadedRank(loaded, served, result, profile)


def _load_and_test(
    path: Path | str,
    config: EngineConfig,
    device: torch.device,
    compilers: int,
    inspected: InspectedModel | None,
    text: Callable[[], TextFacts | None] | None,
    report: Report,
) -> tuple[LoadedModel, selftest.ServedModel, selftest.SelfTestResult]:
    """The whole model, and on what it is served. What rounding in float32 does to it takes as long
    as the expected logits, and few models need it: where one does, all is done once more.
    """
    told = text and functools.cache(text)  # it comes once

    def attempt(
        *, judged: bool
    ) -> tuple[LoadedModel, selftest.ServedModel, selftest.SelfTestResult]:
        loaded = loading.load(
            path, config=config, device=device, inspected=inspected, text=told, report=report
        )
        served, result = selftest.prepare_and_test(
            loaded,
            config.kernels,
            config.quantization,
            fp8_cache=config.fp8_cache,
            deterministic=config.deterministic,
            block_size=config.block_size,
            compilers=compilers,
            judged=judged,
            report=report,
        )
        return loaded, served, result

    try:
        return attempt(judged=False)
    except selftest.UnexplainedError:
        log.info(
            "self-test: logits differ by more than rounding explains in most models; loading the "
            "model again to measure what it does to this one"
        )
    gc.collect()  # the first model, before there is another one
    release_memory()
    return attempt(judged=True)


def sum_in_float32() -> None:
    """Let products of 16 bits on a GPU sum in float32 alone: by default their partial sums may be
    rounded to 16 bits, in one size of step and not in the next.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def taken_by_others(config: EngineConfig, device: torch.device) -> str:
    """Why a GPU has less memory free than the plan takes of its total, in words; "" where it has as
    much. To be read before this process allocates anything there.
    """
    free, total = torch.cuda.mem_get_info(device)
    share = config.max_memory_percent
    if free >= share * total:
        return ""
    return (
        f"{gib(total - free)} GiB of the accelerator's {gib(total)} are taken already, by other "
        f"processes or its driver: {gib(free)} are free, and the plan takes "
        f"{gib(int(share * total))}: stop them, or set --max-memory-percent "
        f"{int(100 * free / total) / 100:g} or lower"
    )


def compilers_of(cpus: int, memory: int) -> int:
    """How many compilers run at a time in a pod with so many CPUs and bytes of RAM: one, which is
    planned, and more in a quarter of the RAM.
    """
    return max(1, min(cpus, memory // 4 // COMPILER))


def price_of_attention(attention: AttentionBackend, model: PagedModel, config: EngineConfig) -> str:
    """What a step's decodes take of it, in words, measured now."""
    rows = config.max_rows
    sizes = model.heads, model.kinds, model.device, rows, config.block_size
    return f"attention on {attention.name}: {timing(_keeps_nothing(attention, model), *sizes)}"


def _profile(
    loaded: LoadedModel, model: PagedModel, attention: AttentionBackend, config: EngineConfig
) -> Profile:
    """Bytes that the largest steps take in addition to weights and cache, and their times."""
    attention = _keeps_nothing(attention, model)
    try:
        return profiling.profile(
            model,
            attention,
            max_batch_tokens=config.max_batch_tokens,
            max_requests=config.max_requests,
            max_model_len=loaded.max_model_len,
            block_size=config.block_size,
            chunk=loaded.shape.mixer_chunk,
            state_units=state_units(loaded.shape, config, model.groups),
            state_versions=state_versions(config, model.device.type),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "max_batch_tokens",
            f"a step of {config.max_batch_tokens} tokens does not fit in memory with the weights",
            "lower it or max_requests",
        ) from error


def _keeps_nothing(attention: AttentionBackend, model: PagedModel) -> AttentionBackend:
    """The same, in torch one that keeps no memory yet: it keeps what its largest step took."""
    if isinstance(attention, TorchAttention):
        return TorchAttention(model.heads, model.device)
    return attention


def _storage(model: PagedModel, units: int, block_size: int, host_units: int) -> CacheStorage:
    groups = model.groups
    try:
        return CacheStorage(
            groups,
            model.cache_heads,
            units=units,
            block_size=block_size,
            device=model.device,
            host_units=host_units,
            states=model.state_layout,
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
            f"{units // max(1, len(groups))} blocks could not be allocated",
            "lower it or max_memory_percent",
        ) from error
