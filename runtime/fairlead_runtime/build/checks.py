"""What is refused before anything is loaded: settings, a model's files, kernels that lack.

Owns these checks and the facts of the device that they ask for. Loads no weights.
"""

import logging
from pathlib import Path

import torch

from fairlead_kernels.choice.backend import (
    check_fixed,
    compile_cpu,
    cpu_operations,
    flashinfer_for,
)
from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_runtime.build.host import cpu_limit, has_nvidia_device, memory_limit
from fairlead_runtime.build.load_rank import compilers_of
from fairlead_runtime.build.resolve import resolve
from fairlead_runtime.models import loading
from fairlead_runtime.models.loading import InspectedModel
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError, Device, EngineConfig
from fairlead_runtime.settings.preflight import check_record
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.settings.supported import check_supported
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.checkpoint_formats import as_stored
from fairlead_runtime.sizing.terms import DeviceFacts

log = logging.getLogger("fairlead.build")


def device_facts(choice: Device = "auto", ranks: int = 1) -> DeviceFacts:
    """The first CUDA device if the host has one and ``choice`` allows it, else the share of the
    host of each of ``ranks`` processes. Raises ModelError, and ConfigError for more ranks than
    devices.
    """
    built_for_cpus = not (torch.version.cuda or torch.version.hip)
    # Asked second: one that was trimmed for CPUs finds an accelerator and ends at its first use.
    available = not built_for_cpus and torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise _no_accelerator(built_for_cpus=built_for_cpus)
    if choice != "cpu" and available:
        if (count := torch.cuda.device_count()) < ranks:
            problem = f"{ranks} accelerators are asked for, torch finds {count}"
            raise ConfigError("tensor_parallel", problem, f"use {count} or give the pod more")
        return DeviceFacts("cuda", torch.cuda.get_device_properties(0).total_memory)
    if choice == "auto" and built_for_cpus and has_nvidia_device():
        log.warning("device: cpu, though an NVIDIA device is here: this torch is a CPU build")
    return DeviceFacts("cpu", memory_limit() // ranks)


def _no_accelerator(*, built_for_cpus: bool) -> ModelError:
    if built_for_cpus:
        return ModelError(
            "NoAccelerator",
            "--device: cuda, but this torch is a CPU build",
            "take the GPU build: in the chart's runtime.acceleratorImage, or in the resource's "
            "engine.image; or use --device cpu (accelerator.count 0)",
        )
    return ModelError(
        "NoAccelerator",
        "--device: cuda, but torch finds no accelerator",
        "check the driver, and that the pod was given one; or use --device cpu",
    )


def check(
    path: Path | str,
    config: EngineConfig,
    device: DeviceFacts,
    report: Report = unreported,
    *,
    reads_tokenizer: bool = True,
) -> InspectedModel:
    """Make every check that needs no weights. ``reads_tokenizer``: as ``loading.inspect`` takes it.
    Raises ConfigError or ModelError.

    Kernels of CPUs that have to be compiled first are compiled here: some checks depend on them.
    """
    check_supported(config)
    check_record(config)
    inspected = loading.inspect(path, config, reads_tokenizer=reads_tokenizer)
    resolve(config, inspected.shape, device, dtype=dtype_name(inspected.dtype))
    # States are in C++ whatever the type of the cache of keys is.
    fp8_cache = config.fp8_cache and not inspected.shape.states
    compile_cpu(
        config.kernels,
        device.kind,
        inspected.dtype,
        fp8_cache=fp8_cache,
        compilers=compilers_of(cpu_limit(), memory_limit()),
        begun=lambda: report("kernels"),
    )
    _check_kernels(as_stored(config, inspected.shape.quantized), device, inspected)
    report("weights")
    return inspected


def _check_kernels(config: EngineConfig, device: DeviceFacts, inspected: InspectedModel) -> None:
    """Raise ConfigError for a setting that needs kernels which cannot serve this model here."""
    shape, dtype, ranks = inspected.shape, inspected.dtype, config.tensor_parallel
    fp8_cache = config.fp8_cache
    if config.kernels == "flashinfer":
        kv_heads = ceil_div(shape.kv_heads, ranks)
        dims = shape.head_dim, shape.value_dim
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
        kv_heads, dims = shape.kv_heads, (shape.head_dim, shape.value_dim)
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


def dtype_name(dtype: torch.dtype) -> str:
    """The type's name as settings have it."""
    return str(dtype).removeprefix("torch.")
