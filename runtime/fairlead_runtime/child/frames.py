"""Messages between the server and a child program: MessagePack objects, each after its length in 4
bytes.
"""

import os
import struct
from typing import Any, BinaryIO, cast

import msgspec

_LENGTH = struct.Struct("!I")
MAX_FRAME = 256 * 1024 * 1024  # a tokenizer's definition has up to 40 MB


def pack(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def write(target: BinaryIO, message: dict[str, Any]) -> None:
    target.write(pack(message))
    target.flush()


def read(source: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end, also in the middle of a message."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = source.read(size) if size <= MAX_FRAME else b""
    return _unpack(body) if len(body) == size else None


class Reader:
    """Messages from a descriptor that is ready to be read, as far as they have arrived."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._arrived = bytearray()

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that are complete by now; None at the end. Blocks only when nothing is
        there.
        """
        part = os.read(self.descriptor, 1024 * 1024)
        if not part:
            return None
        self._arrived += part
        messages = []
        while len(self._arrived) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._arrived)
            end = _LENGTH.size + size
            if len(self._arrived) < end:
                break
            messages.append(_unpack(bytes(self._arrived[_LENGTH.size : end])))
            del self._arrived[:end]
        return messages


def _unpack(body: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", msgspec.msgpack.decode(body))
