"""Messages between a process and its child: their form on the socket, and what refuses it.

Owns the frames: a length of 4 bytes, big-endian, then a message of that many bytes (MessagePack,
read back by the types of its fields). What does not fit the types raises FrameError; nothing that
is read can run code. A field that a message gets crosses without a change here.
"""

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import asyncio

MAX_FRAME = 256 << 20  # bytes; a tokenizer's definition has up to 40 MB
_LENGTH = 4

T = TypeVar("T")
SentT = TypeVar("SentT")
ReadT = TypeVar("ReadT")


class FrameError(Exception):
    """The other side sent what is no message of it, or a message is too large to be sent."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message, as an array: the name of its class, then its fields."""


class Codec(Generic[T]):
    """The messages of one direction, ``kind``: a union of them, or another type.

    ``to_plain`` and ``from_plain`` convert what MessagePack and msgspec do not know. ``max_frame``
    in bytes.
    """

    def __init__(
        self,
        kind: Any,
        *,
        to_plain: Callable[[Any], Any] | None = None,
        from_plain: Callable[[type, Any], Any] | None = None,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_plain)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kind, dec_hook=from_plain
        )
        self.max_frame = max_frame

    def encode(self, message: T) -> bytes:
        """The message as one frame. Raises FrameError when it is larger than ``max_frame``."""
        frame = bytearray(_LENGTH)
        self._encoder.encode_into(message, frame, _LENGTH)
        size = len(frame) - _LENGTH
        if size > self.max_frame:
            raise FrameError(f"a message of {size} bytes is larger than {self.max_frame}")
        frame[:_LENGTH] = size.to_bytes(_LENGTH, "big")
        return bytes(frame)

    def decode(self, content: bytes | bytearray | memoryview) -> T:
        """The message in a frame's content. Raises FrameError."""
        try:
            return self._decoder.decode(content)
        # The checks of a value's own constructor raise ValueError, among them RequestError.
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise FrameError(f"unreadable message: {type(error).__name__}: {error}"[:300]) from None

    async def read(self, reader: "asyncio.StreamReader") -> T | None:
        """The next message; None at the end, also within a frame. Raises FrameError."""
        try:
            size = self._size(await reader.readexactly(_LENGTH))
            content = await reader.readexactly(size)
        except (EOFError, ConnectionError):
            return None
        return self.decode(content)

    def receive(self, connection: socket.socket) -> T | None:
        """``read`` for a thread that may wait."""
        prefix = _receive(connection, _LENGTH)
        content = None if prefix is None else _receive(connection, self._size(prefix))
        return None if content is None else self.decode(content)

    def _size(self, prefix: bytes | bytearray) -> int:
        """The length that a frame begins with. Raises FrameError beyond ``max_frame``."""
        size = int.from_bytes(prefix, "big")
        if size > self.max_frame:
            raise FrameError(
                f"a frame of {size} bytes is announced; at most {self.max_frame} are read"
            )
        return size


class Channel(Generic[SentT, ReadT]):
    """A blocking end of the socket. Any thread may send."""

    def __init__(
        self, connection: socket.socket, sent: Codec[SentT], incoming: Codec[ReadT]
    ) -> None:
        self.connection = connection
        self._sent = sent
        self._incoming = incoming
        self._sending = threading.Lock()

    def send(self, message: SentT) -> None:
        """Blocks while the other side does not read, which bounds what waits for it. Raises OSError
        when it is gone, FrameError for a message that is too large.
        """
        self.send_frame(self._sent.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what ``Codec.encode`` has made, as ``send`` does."""
        with self._sending:
            self.connection.sendall(frame)

    def receive(self) -> ReadT | None:
        """The next message; None once the other side is gone. Raises FrameError."""
        return self._incoming.receive(self.connection)


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view, count = memoryview(content), 0
    while count < size:
        try:
            received = connection.recv_into(view[count:])
        except ConnectionError:
            return None
        if not received:
            return None
        count += received
    return content
