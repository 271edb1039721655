"""The messages between the HTTP process and the engine's process.

Owns the messages, and what ``child.frames`` cannot know of their values. A field that Request,
ChoiceEvent or another value gets crosses without a change here.
"""

from array import array
from collections.abc import Callable
from typing import Any, Literal, Self

import msgspec

from fairlead_runtime import outputs
from fairlead_runtime.child.frames import Channel, Codec, Message
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.outputs import (
    CacheReset,
    CacheView,
    ChoiceEvent,
    EngineDead,
    EngineState,
    ModelFacts,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving.measurements import EngineReport
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.startup_parts import Part

MAX_FRAME = 64 << 20  # bytes; the largest body of a request becomes a fifth of it
PULSE_SECONDS = 1.0  # between two messages of an engine, at most

# By code, and the class itself for one that has none of its own.
_ERRORS: dict[str, type[ServiceError]] = {
    kind.code: kind
    for kind in vars(outputs).values()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
}
_REFUSALS: dict[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError, SelfTestError, EngineDead)
}


# -- from the HTTP process


class Start(Message):
    """The first message: load the model in this directory. ``beside`` is the memory, in bytes, of
    the processes of the pod besides the engine's.
    """

    path: str
    config: EngineConfig
    beside: int


class Words(Message):
    """The second message: what this process has read of the model's tokenizer, beside the loading
    of its weights; None where it could not.
    """

    text: TextFacts | None


class Submit(Message):
    request: Request
    bounded: bool


class Abort(Message):
    request_id: str
    error: ServiceError | None


class Finish(Message):
    request_id: str
    choice: int


class Ask(Message):
    """Answered by a message of the same ``number``. ``start``: the first unit, of the cache."""

    number: int
    subject: Literal["requests", "cache", "reset", "report"]
    start: int = 0


class Stop(Message):
    """End after the current step."""


ToEngine = Start | Words | Submit | Abort | Finish | Ask | Stop


# -- from the engine's process


class Loaded(Message):
    """The model passed its self-test, and the engine steps. ``memory``: the body of
    /debug/memory.
    """

    facts: ModelFacts
    bounds: Bounds
    memory: dict[str, Any]


class Progress(Message):
    """The start is in this part since ``at``, of the machine's monotonic clock in seconds, or has
    done more of it: as ``startup_parts.Report``.
    """

    part: Part
    done: int
    total: int
    at: float


class Refused(Message):
    """The start failed with an exception that has a meaning for users."""

    kind: Literal["ConfigError", "ModelError", "SelfTestError", "EngineDead"]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """The message from which the other process raises an equal error."""
        match error:
            case ConfigError():
                return cls("ConfigError", (error.field, error.message, error.hint))
            case ModelError():
                return cls("ModelError", (error.code, error.message, error.hint))
            case SelfTestError():
                return cls("SelfTestError", (str(error),))
            case EngineDead():
                return cls("EngineDead", (str(error),))
        reason = f"the engine process failed to start: {type(error).__name__}"
        return cls("EngineDead", (reason,))

    @property
    def error(self) -> Exception:
        return _REFUSALS[self.kind](*self.arguments)


class Events(Message):
    """All events of one step."""

    events: list[ChoiceEvent]


class Pulse(Message):
    """Sent every PULSE_SECONDS, while a step runs too."""

    state: EngineState


class Views(Message):
    number: int
    views: list[RequestView] | None


class Cache(Message):
    number: int
    view: CacheView | None


class Reset(Message):
    number: int
    reset: CacheReset | None


class Report(Message):
    number: int
    report: EngineReport


class Gone(Message):
    """The engine gave up; the process ends. Its last message."""

    reason: str


FromEngine = Loaded | Progress | Refused | Events | Pulse | Views | Cache | Reset | Report | Gone


def _encode_other(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, ServiceError):
        return [value.code, str(value), value.retry_after]
    raise NotImplementedError(f"{type(value).__name__} has no form on the socket")


def _decode_other(kind: type, value: Any) -> object:
    if kind is not ServiceError:
        raise NotImplementedError(f"{kind.__name__} has no form on the socket")
    code, message, retry_after = msgspec.convert(value, tuple[str, str, float | None])
    return _ERRORS.get(code, ServiceError)(message, retry_after)


TO_ENGINE: Codec[ToEngine] = Codec(
    ToEngine, to_plain=_encode_other, from_plain=_decode_other, max_frame=MAX_FRAME
)
FROM_ENGINE: Codec[FromEngine] = Codec(
    FromEngine, to_plain=_encode_other, from_plain=_decode_other, max_frame=MAX_FRAME
)
EngineChannel = Channel[FromEngine, ToEngine]  # the end in the engine's process
