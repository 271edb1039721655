"""The types of a model's numbers under an engine's settings, and whether a CPU's kernels, which do
not have all of them, compute its layers. Pure.
"""

from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.config_json import DTYPE_BYTES
from fairlead_runtime.sizing.shape import ModelShape


def dtype_of(shape: ModelShape, config: EngineConfig) -> str:
    """The type of weights and activations: the configured one, else the checkpoint's."""
    return (shape.dtype or "float32") if config.dtype == "auto" else config.dtype


def bytes_of(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of one weight and activation."""
    return DTYPE_BYTES[dtype_of(shape, config)]


def matrix_dtype_of(shape: ModelShape, config: EngineConfig) -> str:
    """The type in which a CPU's kernels hold the matrices that they multiply by, unless quantized:
    the model's, but bfloat16 in a model in float32 whose checkpoint is that. They widen it in
    registers, so no bit of a result differs.
    """
    dtype = dtype_of(shape, config)
    widens = (
        (shape.dtype, dtype) == ("bfloat16", "float32")
        and (config.quantization, shape.quantized) == ("none", "")
        and shape.packs_all
        and packs_on_cpu(shape, config)
    )
    return "bfloat16" if widens else dtype


def cache_bytes_of(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of one element of a cached key or value."""
    return 1 if config.fp8_cache else bytes_of(shape, config)


def packs_on_cpu(shape: ModelShape, config: EngineConfig) -> bool:
    """Whether a CPU's kernels multiply by the head, where they are built and it fits, and compute
    all layers that fit in one call. A model that is split keeps its own head.
    """
    return _runs_on_cpu(shape, config) and config.tensor_parallel == 1


def fuses_on_cpu(shape: ModelShape, config: EngineConfig) -> bool:
    """Whether a CPU's kernels compute its layers, where they are built and these fit; with states
    some of them.
    """
    return _runs_on_cpu(shape, config) and (not shape.unfused or bool(shape.states))


def _runs_on_cpu(shape: ModelShape, config: EngineConfig) -> bool:
    plain = config.kernels == "torch" or config.fp8_cache
    return not plain and dtype_of(shape, config) != "float16"
