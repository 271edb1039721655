"""What this build supports: the only table of settings whose values are not all implemented.

Owns which values of EngineConfig work, which are refused and why. The runtime, the reader of the
custom resource, ``fairlead plan`` and its advice ask it; tests compare the CRD's rules and the
tables in docs/ with it. A setting that is not listed supports every value within its bounds. A
change that implements a value changes its row, and nothing else refuses it. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, flag_of

Setting = bool | int | str


def _path_of(name: str) -> str:
    """The dotted path of a setting in the custom resource; "" where it has none."""
    return next(f.metadata["cr"] or "" for f in fields(EngineConfig) if f.name == name)


@dataclass(frozen=True, slots=True)
class Limit:
    """One setting of which only the values in ``works`` are implemented.

    ``refused`` names the other values, ``reason`` says why they do not work. With ``dtypes`` the
    other values, or only those in ``sometimes``, work too while the model runs in one of these
    types, with ``only_on`` while it runs on such a device, with ``companions``, other settings and
    their values, beside these values of all of them; with several of these where all hold.
    """

    field: str
    works: tuple[Setting, ...]
    refused: str
    reason: str
    dtypes: tuple[str, ...] = ()
    sometimes: tuple[Setting, ...] = ()
    only_on: Literal["", "cpu", "cuda"] = ""
    companions: tuple[tuple[str, tuple[Setting, ...]], ...] = ()

    @property
    def alone(self) -> bool:
        """Whether the value alone decides."""
        return not (self.dtypes or self.only_on or self.companions)

    @property
    def path(self) -> str:
        """The dotted path of the custom resource's field; "" where the resource has none."""
        return _path_of(self.field)

    @property
    def fix(self) -> str:
        """The values that work: ``auto or off``; then where others work: ``; on a GPU also on``."""
        values = _either(self.works)
        choices = (f"{_path_of(x).rpartition('.')[2]} {_either(y)}" for x, y in self.companions)
        conditions = " and ".join(choices)
        if self.alone:
            return values
        if not (self.dtypes or self.only_on):
            return f"{values}, or {conditions}"
        if self.dtypes:
            dtype = f"dtype {' or '.join(self.dtypes)}"
            conditions = f"{dtype} and {conditions}" if conditions else dtype
        device = {"": "", "cpu": "on a CPU", "cuda": "on a GPU"}[self.only_on]
        where = " ".join(filter(None, (device, f"with {conditions}" if conditions else "")))
        return f"{values}; {where} also {_either(self.sometimes) or 'the others'}"

    def refuses(
        self, config: EngineConfig, dtype: str | None = None, device: str | None = None
    ) -> bool:
        """``dtype``: the type the model runs in, ``device``: cpu or cuda. Unknown (None, and the
        configured one is auto), each counts as one that works.
        """
        value = getattr(config, self.field)
        if value in self.works:
            return False
        if self.alone or (self.sometimes and value not in self.sometimes):
            return True
        if any(getattr(config, name) not in values for name, values in self.companions):
            return True
        if self.only_on and (device or config.device) not in ("auto", self.only_on):
            return True
        return bool(self.dtypes) and (dtype or config.dtype) not in ("auto", *self.dtypes)

    @property
    def rule(self) -> str:
        """The CRD's CEL rule: on the field, or on ``spec`` where it reads a second field."""
        if self.alone:
            return f"self in {_literals(self.works)}"
        conditions = [f"self.{self.path} in {_literals(self.sometimes)}"] if self.sometimes else []
        if self.dtypes:
            conditions.append(f"self.engine.dtype in {_literals(('auto', *self.dtypes))}")
        if self.only_on:
            count = {"cpu": "== 0", "cuda": "> 0"}[self.only_on]
            conditions.append(f"self.resources.accelerator.count {count}")
        conditions += [f"self.{_path_of(x)} in {_literals(y)}" for x, y in self.companions]
        return f"self.{self.path} in {_literals(self.works)} || {' && '.join(conditions)}"

    @property
    def message(self) -> str:
        """The refusal of the CRD and of the reader of the resource: what is wrong, then the fix."""
        return (
            f"{self.path} {self.refused} is not supported yet ({self.reason}): set it to {self.fix}"
        )


NOT_YET = (
    Limit(
        "quantization",
        ("none", "int8"),
        "fp8 and int4 on a CPU or in float32",
        "fp8 and int4 weights need a GPU and a type of 16 bits",
        dtypes=("bfloat16", "float16"),
        sometimes=("fp8", "int4"),
        only_on="cuda",
    ),
    Limit(
        "tensor_parallel",
        (1, 2, 4, 8),
        "other than 1, 2, 4 and 8",
        "heads are split evenly over the accelerators of one pod",
    ),
    Limit(
        "deterministic",
        (False,),
        "true beside tensorParallel above 1, fp8 or int4 weights",
        "the order of their sums may depend on the batch",
        companions=(("tensor_parallel", (1,)), ("quantization", ("none", "int8"))),
    ),
    Limit(
        "kernels",
        ("auto", "torch", "cpu"),
        "flashinfer on a CPU or in float32",
        "its kernels run on GPUs, in float16 and bfloat16",
        dtypes=("float16", "bfloat16"),
        sometimes=("flashinfer",),
        only_on="cuda",
    ),
    Limit(
        "async_batching",
        ("auto", "off"),
        "'on' on a CPU or beside deterministic true",
        "steps are launched ahead on GPUs alone, and not while results are deterministic",
        sometimes=("on",),
        only_on="cuda",
        companions=(("deterministic", (False,)),),
    ),
    Limit(
        "cuda_graphs",
        ("auto", "off"),
        "'on' on a CPU or beside tensorParallel above 1 or deterministic true",
        "graphs are captured on one GPU alone, and not while results are deterministic",
        sometimes=("on",),
        only_on="cuda",
        companions=(("tensor_parallel", (1,)), ("deterministic", (False,))),
    ),
)
IN_RESOURCE = tuple(limit for limit in NOT_YET if limit.path)
REMOTE_CODE = (
    "has no effect yet: no model's own code is run, and a model that needs it is refused either way"
)


def check_supported(
    config: EngineConfig, dtype: str | None = None, device: str | None = None
) -> None:
    """Raise ConfigError for a value that is not implemented. ``dtype``: the model's in the pod;
    ``device``: cpu or cuda.
    """
    for limit in NOT_YET:
        if limit.refuses(config, dtype, device):
            value = _text(getattr(config, limit.field))
            runs_in, runs_on = dtype or config.dtype, device or config.device
            below = f" in {runs_in}" if limit.dtypes and runs_in != "auto" else ""
            elsewhere = runs_on not in ("auto", limit.only_on) or bool(limit.dtypes)
            place = f" on {runs_on}" if limit.only_on and elsewhere and runs_on != "auto" else ""
            raise ConfigError(
                limit.field,
                f"{value} is not supported{below}{place} yet: {limit.reason}",
                f"use {limit.fix}",
            )


def is_supported(config: EngineConfig, dtype: str | None = None, device: str | None = None) -> bool:
    return not any(limit.refuses(config, dtype, device) for limit in NOT_YET)


def without_effect(config: EngineConfig) -> Iterator[str]:
    """A warning for each setting that is accepted and changes nothing."""
    if config.trust_remote_code:
        yield f"{flag_of('trust_remote_code')} {REMOTE_CODE}"


def _text(value: Setting) -> str:
    """A value as the custom resource has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _either(values: Iterable[Setting]) -> str:
    *others, last = [*map(_text, values)] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def _literal(value: Setting) -> str:
    """A value as CEL writes it."""
    return f"'{value}'" if isinstance(value, str) else _text(value)


def _literals(values: Iterable[Setting]) -> str:
    return f"[{', '.join(map(_literal, values))}]"
