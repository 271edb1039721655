"""The messages between the HTTP process and the engine's process, and their form on the socket.

Owns the messages, their encoding (MessagePack, read back by the types of the fields) and the
frames: a length of 4 bytes, big-endian, then that many bytes. A field that Request, ChoiceEvent or
another value gets crosses without a change here. What does not fit the types raises WireError;
nothing that is read can run code.
"""

import asyncio
import socket
import threading
from array import array
from typing import Any, Literal

import msgspec

from fairlead_runtime import outputs
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.outputs import (
    CacheView,
    ChoiceEvent,
    EngineState,
    ModelFacts,
    RequestView,
    ServiceError,
)
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.serving.measurements import EngineReport
from fairlead_runtime.settings.engine_config import EngineConfig

MAX_FRAME = 64 << 20  # bytes; the largest body of a request becomes a fifth of it
PULSE_SECONDS = 1.0  # between two messages of an engine, at most
_LENGTH = 4

# By code, and the class itself for one that has none of its own.
_ERRORS: dict[str, type[ServiceError]] = {
    kind.code: kind
    for kind in vars(outputs).values()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
}


class WireError(Exception):
    """The other side sent what is no message of it."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message, as an array: the name of its class, then its fields."""


# -- from the HTTP process


class Start(_Message):
    """The first message: load the model in this directory. ``beside`` is the memory, in bytes, of
    the processes of the pod besides the engine's.
    """

    path: str
    config: EngineConfig
    beside: int


class Submit(_Message):
    request: Request
    bounded: bool


class Abort(_Message):
    request_id: str
    error: ServiceError | None


class Finish(_Message):
    request_id: str
    choice: int


class Ask(_Message):
    """Answered by a message of the same ``number``. ``start``: the first unit, of the cache."""

    number: int
    subject: Literal["requests", "cache", "report"]
    start: int = 0


class Stop(_Message):
    """End after the current step."""


ToEngine = Start | Submit | Abort | Finish | Ask | Stop


# -- from the engine's process


class Loaded(_Message):
    """The model passed its self-test, and the engine steps. Times on the machine's monotonic
    clock, in seconds; ``memory`` is the body of /debug/memory.
    """

    facts: ModelFacts
    bounds: Bounds
    memory: dict[str, Any]
    loaded_at: float


class Refused(_Message):
    """The start failed with an exception that has a meaning for users."""

    kind: Literal["ConfigError", "ModelError", "SelfTestError", "EngineDead"]
    arguments: tuple[str, ...]


class Events(_Message):
    """All events of one step."""

    events: list[ChoiceEvent]


class Pulse(_Message):
    """Sent every PULSE_SECONDS, while a step runs too."""

    state: EngineState


class Views(_Message):
    number: int
    views: list[RequestView] | None


class Cache(_Message):
    number: int
    view: CacheView | None


class Report(_Message):
    number: int
    report: EngineReport


class Gone(_Message):
    """The engine gave up; the process ends. Its last message."""

    reason: str


FromEngine = Loaded | Refused | Events | Pulse | Views | Cache | Report | Gone


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


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_other)
from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_other)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as one frame. Raises WireError when it is larger than MAX_FRAME."""
    frame = bytearray(_LENGTH)
    _encoder.encode_into(message, frame, _LENGTH)
    size = len(frame) - _LENGTH
    if size > MAX_FRAME:
        raise WireError(f"a message of {size} bytes is larger than {MAX_FRAME}")
    frame[:_LENGTH] = size.to_bytes(_LENGTH, "big")
    return bytes(frame)


def decode(
    decoder: "msgspec.msgpack.Decoder[Any]", content: "bytes | bytearray | memoryview"
) -> Any:
    """The message in a frame's content. Raises WireError."""
    try:
        return decoder.decode(content)
    # The checks of a value's own constructor raise ValueError, among them RequestError.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"unreadable message: {type(error).__name__}: {error}"[:300]) from None


def size_of(prefix: "bytes | bytearray") -> int:
    """The length that the first bytes of a frame state. Raises WireError beyond MAX_FRAME."""
    size = int.from_bytes(prefix, "big")
    if size > MAX_FRAME:
        raise WireError(f"a frame of {size} bytes is announced; at most {MAX_FRAME} are read")
    return size


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The content of the next frame; None at the end of the stream. Raises WireError."""
    try:
        return await reader.readexactly(size_of(await reader.readexactly(_LENGTH)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Channel:
    """The blocking end of the socket, in the engine's process. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Blocks while the other side does not read, which bounds what waits for it. Raises OSError
        when it is gone.
        """
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> ToEngine | None:
        """The next message; None once the other side is gone. Raises WireError."""
        prefix = self._read(_LENGTH)
        content = None if prefix is None else self._read(size_of(prefix))
        if content is None:
            return None
        message: ToEngine = decode(to_engine, content)
        return message

    def _read(self, size: int) -> bytearray | None:
        content = bytearray(size)
        view, read = memoryview(content), 0
        while read < size:
            try:
                count = self._socket.recv_into(view[read:])
            except ConnectionError:
                return None
            if not count:
                return None
            read += count
        return content
