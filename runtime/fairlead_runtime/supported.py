"""What this build supports: the only table of settings whose values are not all implemented.

Owns which values of EngineConfig work, which are refused and why. The runtime, the reader of the
custom resource, ``fairlead plan`` and its advice ask it; tests compare the CRD's rules and the
tables in docs/ with it. A setting that is not listed supports every value within its bounds. A
change that implements a value changes its row, and nothing else refuses it. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from fairlead_runtime.config import ConfigError, EngineConfig, flag_of

Setting = bool | int | str
_NO_GRAPHS = "no CUDA graph is captured"


@dataclass(frozen=True, slots=True)
class Limit:
    """One setting of which only the values in ``works`` are implemented.

    ``refused`` names the other values, ``reason`` says why they do not work. With ``dtypes`` the
    other values work too while the model runs in one of these types.
    """

    field: str
    works: tuple[Setting, ...]
    refused: str
    reason: str
    dtypes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted path of the custom resource's field; "" where the resource has none."""
        return next(f.metadata["cr"] or "" for f in fields(EngineConfig) if f.name == self.field)

    @property
    def fix(self) -> str:
        """The values that work: ``auto or off``; then the types in which every value works."""
        values = " or ".join(_shown(value) for value in self.works)
        return f"{values}, or dtype {' or '.join(self.dtypes)}" if self.dtypes else values

    def refuses(self, config: EngineConfig, dtype: str | None = None) -> bool:
        """``dtype``: the type the model runs in. Unknown (None, and the configured one is auto), it
        counts as one that works.
        """
        if getattr(config, self.field) in self.works:
            return False
        runs_in = dtype or config.dtype
        return not self.dtypes or runs_in not in ("auto", *self.dtypes)

    @property
    def rule(self) -> str:
        """The CRD's CEL rule: on the field, or on ``spec`` where it reads a second field."""
        values = ", ".join(_literal(value) for value in self.works)
        if not self.dtypes:
            return f"self in [{values}]"
        dtypes = ", ".join(_literal(dtype) for dtype in ("auto", *self.dtypes))
        return f"self.{self.path} in [{values}] || self.engine.dtype in [{dtypes}]"

    @property
    def message(self) -> str:
        """The refusal of the CRD and of the reader of the resource: what is wrong, then the fix."""
        return (
            f"{self.path} {self.refused} is not supported yet ({self.reason}): set it to {self.fix}"
        )


NOT_YET = (
    Limit("quantization", ("none",), "int8 or fp8", "weights keep their type"),
    Limit("tensor_parallel", (1,), "above 1", "a model runs on one accelerator"),
    Limit(
        "deterministic",
        (False,),
        "true below float32",
        "rounding there depends on the other requests in the batch",
        dtypes=("float32",),
    ),
    Limit("kernels", ("auto", "torch", "cpu"), "flashinfer", "its kernels are not used yet"),
    Limit("async_batching", ("auto", "off"), "on", "steps are prepared one after another"),
    Limit("cuda_graphs", ("auto", "off"), "on", _NO_GRAPHS),
    # Without graphs the next three change nothing. They stay in the resource, whose fields are
    # fixed, and only at their default: a value that somebody chose is never ignored.
    Limit("q_padding_interval", (64,), "other than 64", _NO_GRAPHS),
    Limit("kv_padding_interval", (16384,), "other than 16384", _NO_GRAPHS),
    Limit("max_cached_graphs", (32,), "other than 32", _NO_GRAPHS),
    Limit("cache_dtype", ("auto",), "fp8", "the cache keeps the model's type"),
)
IN_RESOURCE = tuple(limit for limit in NOT_YET if limit.path)
REMOTE_CODE = (
    "has no effect yet: no model's own code is run, and a model that needs it is refused either way"
)


def check_supported(config: EngineConfig, dtype: str | None = None) -> None:
    """Raise ConfigError for a value that is not implemented. ``dtype``: the model's in the pod."""
    for limit in NOT_YET:
        if limit.refuses(config, dtype):
            value = _shown(getattr(config, limit.field))
            below = f" in {dtype or config.dtype}" if limit.dtypes else ""
            raise ConfigError(
                limit.field,
                f"{value} is not supported{below} yet: {limit.reason}",
                f"use {limit.fix}",
            )


def is_supported(config: EngineConfig, dtype: str | None = None) -> bool:
    return not any(limit.refuses(config, dtype) for limit in NOT_YET)


def without_effect(config: EngineConfig) -> Iterator[str]:
    """A warning for each setting that is accepted and changes nothing."""
    if config.trust_remote_code:
        yield f"{flag_of('trust_remote_code')} {REMOTE_CODE}"


def _shown(value: Setting) -> str:
    """A value as the custom resource has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _literal(value: Setting) -> str:
    """A value as CEL writes it."""
    return f"'{value}'" if isinstance(value, str) else _shown(value)
