"""EngineConfig: one definition for the custom resource's field, the pod's argument and the engine's
setting.

Owns every setting of an engine with its unit, default and bounds, and the conversions between a
configuration and an argument list. Reads no environment, opens no file, imports neither torch nor
kopf.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from fairlead_runtime.settings.other_names import hint_for

SchedulerType = Literal["fifo", "prefill_first", "priority", "fair"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
CacheDtype = Literal["auto", "fp8"]
Quantization = Literal["none", "int8", "fp8", "int4"]
Switch = Literal["auto", "on", "off"]
Device = Literal["auto", "cpu", "cuda"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3"]
GenerationConfig = Literal["auto", "none"]
Kernels = Literal["auto", "torch", "cpu", "flashinfer"]
# The parts of --help and of docs/runtime.md, by the first name of the custom resource's path.
SECTIONS = {"model": "Model", "engine": "Engine", "scheduler": "Scheduler", "cache": "Cache"}
PROCESS = "Process"  # of every other field
# What only a server of HTTP honours: `generate` and other commands do not have these flags.
SERVER_ONLY = frozenset(
    {
        "served_name",
        "max_queue",
        "queue_timeout",
        "shared_memory",
        "api_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "cors_origin",
        "public_metrics",
        "page",
        "tool_call_parser",
        "reasoning_parser",
        "generation_config",
        "chat_template",
        "trust_request_chat_template",
        "drain_grace",
        "drain_timeout",
    }
)
_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


class ConfigError(ValueError):
    """A setting that cannot work. ``field`` names it, the message says the fix."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(f"{flag_of(field)}: {message}" + (f" ({hint})" if hint else ""))
        self.field = field
        self.message = message
        self.hint = hint

    def in_python(self) -> Self:
        """The same error whose text has the names as keywords, not as flags."""
        error = type(self)(self.field, self.message, self.hint)
        spelled = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(self))
        error.args = (spelled,)
        return error


def flag_of(name: str) -> str:
    """The command-line flag of a field: ``max_batch_tokens`` → ``--max-batch-tokens``."""
    return "--" + name.replace("_", "-")


def knob(
    default: Any,
    help: str,  # noqa: A002 - it becomes argparse's help
    *,
    unit: str = "",
    when: str = "",
    cr: str | None = None,
    low: float | None = None,
    high: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of EngineConfig with its help, unit and bounds.

    ``cr`` is the dotted path of the custom resource's field (None: the resource has none), ``low``
    and ``high`` the inclusive bounds, ``when`` the advice in docs/runtime.md on when to change it.
    """
    meta = {
        "help": help,
        "unit": unit,
        "when": when,
        "cr": cr,
        "low": low,
        "high": high,
        "metavar": metavar,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of one engine. Frozen: resolved values of "auto" and None are kept elsewhere.

    Raises ConfigError on construction when a value is out of bounds or two values contradict each
    other.
    """

    # -- model
    revision: str = knob(
        "",
        "commit, tag or branch of a hub model",
        when="Pin a commit in production.",
        cr="model.revision",
    )
    served_name: str = knob(
        "",
        "model name clients use, or several, separated by commas (default: the source)",
        when="To keep clients unchanged when the source changes. An answer has the name that it "
        "was asked by, metrics have the first. The resource takes one name.",
        cr="model.servedName",
    )
    trust_remote_code: bool = knob(
        False,
        "consent to Python code that a model ships; no effect yet: none is run",
        when="Leave it off.",
        cr="model.trustRemoteCode",
    )
    # -- engine
    dtype: Dtype = knob(
        "auto",
        "type of weights and activations; auto: the checkpoint's",
        when="float32 where text must not depend on rounding; it takes twice the memory.",
        cr="engine.dtype",
    )
    device: Device = knob(
        "auto",
        "where the model runs; auto: an accelerator if there is one; cuda: refuse to start without",
        when="cuda, so that a missing accelerator does not mean a slow start on the CPU.",
    )
    kernels: Kernels = knob(
        "auto",
        "kernels of layers and attention; cpu: C++, for float32 and bfloat16, flashinfer: its "
        "attention on a GPU, or refuse to start; auto: the first that can serve the model",
        when="torch to find out whether a kernel causes a fault.",
    )
    quantization: Quantization = knob(
        "none",
        "none: weights as stored, plain or quantized; int8, fp8: a plain checkpoint's matrices are "
        "rounded at load, with a scale per row; int4: only what is stored in 4 bits",
        when="int8 to decode faster on a CPU; either to leave memory to the cache.",
        cr="engine.quantization",
    )
    max_model_len: int | None = knob(
        None,
        "longest prompt plus output of one request; unset: the model's limit",
        unit="tokens",
        when="Lower it when one full-length sequence does not fit.",
        cr="engine.maxModelLen",
        low=2,  # one token of prompt, one of output
    )
    tensor_parallel: int = knob(
        1,
        "accelerators that share one copy of the model",
        when="When the weights do not fit into one accelerator.",
        cr="engine.tensorParallel",
        low=1,
        high=64,
    )
    deterministic: bool = knob(
        False,
        "give a request the same text in every batch, in every dtype",
        when="When reproducibility in bfloat16 is worth speed.",
        cr="engine.deterministic",
    )
    async_batching: Switch = knob(
        "auto",
        "launch the next step before this one's tokens are known",
        when="off to find out whether it causes a fault.",
        cr="engine.asyncBatching",
    )
    cuda_graphs: Switch = knob(
        "auto",
        "replay captured CUDA graphs",
        when="off to find out whether a graph causes a fault.",
        cr="engine.cudaGraphs.enabled",
    )
    q_padding_interval: int = knob(
        64,
        "graphs are captured for 1, 2, 4, ... rows up to this many, from there for its multiples; "
        "doubled while that makes more sizes than max_cached_graphs",
        unit="rows",
        when="Smaller, with more max_cached_graphs: less padding.",
        cr="engine.cudaGraphs.qPaddingInterval",
        low=1,
    )
    max_cached_graphs: int = knob(
        32,
        "captured graphs kept; the least recently used is dropped first; 0: none",
        unit="graphs",
        when="Lower it when graphs take memory that the cache needs.",
        cr="engine.cudaGraphs.maxCachedGraphs",
        low=0,
    )
    # -- scheduler
    scheduler_type: SchedulerType = knob(
        "fifo",
        "order of service: fifo, prefill_first, priority or fair (per tenant)",
        when=(
            "fair when tenants share a deployment, priority when requests carry one, prefill_first "
            "for time to first token."
        ),
        cr="scheduler.type",
    )
    max_batch_tokens: int = knob(
        8192,
        "tokens one step may process",
        unit="tokens",
        when=(
            "Lower for steadier inter-token latency, higher for prefill throughput; on a CPU "
            "prompts take 96 a step while answers run, more where many wait."
        ),
        cr="scheduler.maxBatchTokens",
        low=1,
    )
    max_requests: int = knob(
        256,
        "requests one step may process",
        unit="requests",
        when="Raise it while the cache has room and the accelerator is not busy.",
        cr="scheduler.maxRequests",
        low=1,
    )
    safety_margin: float = knob(
        0.2,
        "share of cache blocks kept free for running requests; below it no request starts",
        unit="share",
        when="Raise it when preemptions are frequent, lower it for short outputs.",
        cr="scheduler.safetyMargin",
        low=0.0,
        high=0.9,
    )
    max_queue: int = knob(
        1024,
        "requests that may wait; more, and more prompt tokens than memory is planned for, get 429",
        unit="requests",
        when="Lower it to fail fast.",
        cr="scheduler.maxQueue",
        low=1,
    )
    queue_timeout: float = knob(
        60.0,
        "longest wait for the first step; then the answer is 429",
        unit="seconds",
        when="Set it to how long your clients wait.",
        cr="scheduler.queueTimeoutSeconds",
        low=0.001,
    )
    # -- cache
    block_size: int = knob(
        16,
        "tokens per cache block; a power of two from 4",
        unit="tokens",
        when="Larger for long prompts, smaller for more prefix hits.",
        cr="cache.blockSize",
        low=4,
    )
    num_blocks: int | None = knob(
        None,
        "cache blocks, each of block_size tokens in every layer; unset: solved from memory, on a "
        "CPU for at most 4 GiB",
        unit="blocks",
        when="To pin the cache in tests.",
        cr="cache.numBlocks",
        low=1,
    )
    max_memory_percent: float = knob(
        0.9,
        (
            "share of the accelerator's total memory for weights, activations, graphs and cache "
            "together; on a CPU the cache takes at most 4 GiB of it unless num_blocks asks for more"
        ),
        unit="share",
        when="Lower when something else shares the device.",
        cr="cache.maxMemoryPercent",
        low=0.01,
        high=1.0,
    )
    allow_block_sharing: bool = knob(
        True,
        "reuse cached blocks of equal prefixes (prefix caching)",
        when="Off only to measure without it.",
        cr="cache.allowBlockSharing",
    )
    cpu_offload_space: float = knob(
        0.0,
        "host memory for the cache of preempted requests; 0: recompute it",
        unit="GiB",
        when="When preemptions of long requests are frequent.",
        cr="cache.cpuOffloadSpace",
        low=0.0,
    )
    cache_dtype: CacheDtype = knob(
        "auto",
        "type of cached keys and values; auto: the model's; fp8: 8-bit floats, without scales",
        when="fp8 to hold twice as many tokens as in 16 bits.",
        cr="cache.dtype",
    )
    # -- process
    shared_memory: float = knob(
        0.0,
        "host memory that the pod's /dev/shm may take (part of the CPU sizing)",
        unit="GiB",
        when="Set by the operator.",
        cr="resources.sharedMemory",
        low=0.0,
    )
    seed: int = knob(
        0,
        "seed of requests that set none",
        when="To vary or to repeat a whole run.",
        low=0,
        high=2**63 - 1,
    )
    api_key_file: str = knob(
        "",
        "file of API keys with their limits, read again when it changes; unset: no keys",
        when="Whenever others can reach the port.",
        metavar="FILE",
    )
    ssl_certfile: str = knob(
        "",
        "PEM file of the public port's certificate and its chain, read again when it changes; "
        "unset: no TLS",
        when="When clients reach the port without a proxy that has TLS.",
        metavar="FILE",
    )
    ssl_keyfile: str = knob(
        "",
        "PEM file of the certificate's private key, not encrypted; read again when it changes",
        when="With --ssl-certfile.",
        metavar="FILE",
    )
    cors_origin: str = knob(
        "",
        "origin whose web pages may use the public port, or *; unset: no other origin's",
        when="When pages in a browser call the server.",
        metavar="ORIGIN",
    )
    public_metrics: bool = knob(
        False,
        "/metrics on the public port too, behind the API keys where there are any",
        when="Where what scrapes cannot reach the admin port.",
    )
    page: Switch = knob(
        "auto",
        "a page to chat, / on the public port; auto: where a person starts it in a terminal",
        when="off on a machine that others reach; on to try a pod, through kubectl port-forward.",
    )
    tool_call_parser: ToolCallParser = knob(
        "auto",
        "format of the model's tool calls; auto: recognized from its chat template",
        when="When the log at start names no format, or the wrong one.",
    )
    reasoning_parser: ReasoningParser = knob(
        "auto",
        "how the model marks its reasoning; auto: qwen3 for a chat template that knows thinking",
        when="deepseek_r1 when every answer begins with reasoning, none to leave it in the text.",
    )
    generation_config: GenerationConfig = knob(
        "auto",
        "sampling values of HTTP requests that leave them out; auto: temperature, top_k, top_p, "
        "min_p and repetition_penalty of the model's generation_config.json; none: OpenAI's",
        when="none where clients rely on temperature 1 and no filter.",
    )
    chat_template: str = knob(
        "",
        "file of the chat template, in Jinja, in place of the model's own; unset: that one",
        when="When the model has none, or a faulty one.",
        metavar="FILE",
    )
    trust_request_chat_template: bool = knob(
        False,
        "take a request's own chat_template, rendered in a process with limits of time and memory",
        when="Where clients bring templates of their own; each is still a program of theirs.",
    )
    drain_grace: float = knob(
        5.0,
        "time after SIGTERM in which a server that is no longer ready still serves new requests",
        unit="seconds",
        when="Longer than your load balancer takes to stop sending requests to a pod.",
        low=0.0,
        high=3600.0,
    )
    drain_timeout: float = knob(
        300.0,
        "longest time that running streams may take to finish after the grace",
        unit="seconds",
        when="At least your longest answer.",
        cr="rollout.drainTimeoutSeconds",
        low=0.0,
    )
    record: str = knob(
        "",
        (
            "write requests and decisions to this file for `fairlead replay` and `fairlead trace` "
            "(it holds prompts as token ids)"
        ),
        when="To report or study a scheduling problem.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_value(f, getattr(self, f.name))
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                "block_size",
                f"{self.block_size} is not a power of two",
                "use 4, 8, 16, 32, 64, 128 or 256",
            )

        if "" in self.served_names or len({*self.served_names}) < len(self.served_names):
            raise ConfigError(
                "served_name", "has an empty name, or one twice", "write each name once: a,b"
            )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            missing = "ssl_keyfile" if self.ssl_certfile else "ssl_certfile"
            raise ConfigError(missing, "is missing", "set --ssl-certfile and --ssl-keyfile or none")
        if self.cors_origin and not _ORIGIN.fullmatch(self.cors_origin):
            raise ConfigError(
                "cors_origin",
                "is not an origin",
                "use SCHEME://HOST or SCHEME://HOST:PORT without a path, in lower case, or *",
            )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names in ``served_name``; none where it is the source's."""
        return tuple(name.strip() for name in self.served_name.split(",") if self.served_name)

    @property
    def fp8_cache(self) -> bool:
        """Whether keys and values are cached as 8-bit floats."""
        return self.cache_dtype == "fp8"

    @property
    def max_rows(self) -> int:
        """The most rows of a step: max_requests, each with one of max_batch_tokens or more."""
        return min(self.max_requests, self.max_batch_tokens)

    def clamped(self) -> Self:
        """A copy whose max_requests all have a row in each step."""
        return dataclasses.replace(self, max_requests=self.max_rows)

    def to_args(self) -> list[str]:
        """Flags of all settings that differ from their default, in field order.

        Defaults are left out, so that a release with a new flag does not change the arguments of
        running pods.
        """
        args: list[str] = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value == f.default:
                continue
            if isinstance(value, bool):
                args.append(flag_of(f.name) if value else "--no-" + f.name.replace("_", "-"))
            else:
                args.append(f"{flag_of(f.name)}={value}")
        return args

    @classmethod
    def from_args(cls, args: Sequence[str]) -> Self:
        """The configuration of an argument list; the inverse of ``to_args``."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(parser)
        return cls.from_namespace(parser.parse_args(list(args)))

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """Of a parser of ``add_arguments``; what it left out has its default."""
        names = (f.name for f in dataclasses.fields(cls) if hasattr(namespace, f.name))
        return cls(**{name: getattr(namespace, name) for name in names})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of keyword settings. Raises ConfigError for an unknown one, with our
        name for it or the nearest.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(name, "is not a setting", hint_for(name, names))
        return cls(**values)


_HINTS = get_type_hints(EngineConfig)


def choices_of(name: str) -> tuple[str, ...]:
    """The allowed values of a field; empty if any value of its type is allowed."""
    hint = _HINTS[name]
    return get_args(hint) if get_origin(hint) is Literal else ()


def base_type(name: str) -> type:
    """The type of a field's value other than None: bool, int, float or str."""
    if choices_of(name):
        return str
    hint = _HINTS[name]
    for option in get_args(hint) or (hint,):
        if option is not type(None):
            return option  # type: ignore[no-any-return]
    raise TypeError(name)


def section_of(f: "dataclasses.Field[Any]") -> str:
    """The part of --help and of docs/runtime.md that a setting is in."""
    return SECTIONS.get((f.metadata["cr"] or "").partition(".")[0], PROCESS)


def add_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """One flag per field, in groups, with its help line, unit and default. ``without``: fields that
    the command does not honour.
    """
    titles = (*SECTIONS.values(), PROCESS)
    groups = {title: parser.add_argument_group(title.lower()) for title in titles}
    for f in dataclasses.fields(EngineConfig):
        if f.name in without:
            continue
        meta, kind, section = f.metadata, base_type(f.name), groups[section_of(f)]
        text = f"{meta['help']}{_default_words(f)}".replace("%", "%%")
        if kind is bool:
            section.add_argument(
                flag_of(f.name), action=argparse.BooleanOptionalAction, default=f.default, help=text
            )
        else:
            section.add_argument(
                flag_of(f.name),
                type=_share if f.name == "max_memory_percent" else kind,
                default=f.default,
                choices=choices_of(f.name) or None,
                metavar=meta["metavar"] or (None if choices_of(f.name) else kind.__name__.upper()),
                help=text,
            )


def _default_words(f: "dataclasses.Field[Any]") -> str:
    """`` (default: 16 tokens)``; nothing where the help says it."""
    if f.default in (None, ""):
        said = re.search(r"\bunset\b|\(default:", f.metadata["help"])
        return "" if said else " (default: none)"
    value = f.default
    if isinstance(value, bool):
        value = "on" if value else "off"
    unit = f.metadata["unit"]
    return f" (default: {value}{f' {unit}' if unit and unit != 'share' else ''})"


def _share(text: str) -> float:
    """A share, or a percentage: above 1 it can be no share."""
    value = float(text.removesuffix("%"))
    return value / 100 if 1 < value <= 100 or text.endswith("%") else value


_share.__name__ = "float"  # argparse's word for the type, in its refusals


def _check_value(f: "dataclasses.Field[Any]", value: Any) -> None:
    if value is None:
        if f.default is not None:
            raise ConfigError(f.name, "must be set")
        return
    kind = base_type(f.name)
    has_type = (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))) or (
        kind is float and isinstance(value, int) and not isinstance(value, bool)
    )
    if not has_type:
        raise ConfigError(f.name, f"expected {kind.__name__}, got {value!r}")
    if choices_of(f.name) and value not in choices_of(f.name):
        raise ConfigError(
            f.name, f"{value!r} is not supported", "use " + ", ".join(choices_of(f.name))
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f.name, f"{value} is not finite")
    low, high = f.metadata["low"], f.metadata["high"]
    if low is not None and value < low:
        raise ConfigError(
            f.name, f"{value} is below the smallest allowed, {low}", f"set at least {low}"
        )
    if high is not None and value > high:
        hint = f"set at most {high}"
        if f.metadata["unit"] == "share":
            hint += ": it is a share, 0.9 is 90 %"
        raise ConfigError(f.name, f"{value} is above the largest allowed, {high}", hint)
