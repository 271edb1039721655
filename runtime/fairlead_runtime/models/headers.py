"""The header of a safetensors file, checked in full before the file is mapped into memory.

Owns the rules of the format (8 bytes of little-endian length, a JSON object, then the tensors'
bytes without gap or overlap). Reads nothing beyond the header.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead_runtime.models.model_error import ModelError

LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library itself
MOST_DIMENSIONS = 16
# Bits per element. Several F4 elements share a byte, so sizes are compared in bits.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its bytes are ``begin:end``, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. ``raw`` is its JSON as stored in the file, ``data`` the offset of the first
    tensor.
    """

    tensors: dict[str, TensorEntry]
    raw: bytes
    data: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of one file. Raises ModelError("BadWeights") with the file and the
    error.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(file.read(8), file.read, size)
    except OSError as error:
        raise ModelError("BadWeights", f"{path.name}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(
            "BadWeights", f"{path.name}: {error}"[:300], "fetch the model again"
        ) from None


def _read(prefix: bytes, read: Any, size: int) -> Header:
    if len(prefix) < 8:
        raise ValueError("too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header claims {length} bytes, more than {LARGEST_HEADER}")
    if length > size - 8:
        raise ValueError(f"its header claims {length} bytes of a file of {size}")
    raw = read(length)
    if len(raw) != length or not raw.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its header is not valid JSON: {error}") from None
    _check_metadata(entries.pop("__metadata__", {}))
    tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
    _check_layout(tensors, size - 8 - length)
    return Header(tensors, raw, 8 + length, size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("it has the same key twice")
    return value


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("__metadata__ must map text to text")


def _tensor(name: str, entry: Any) -> TensorEntry:
    label = repr(name[:100])
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{label} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"{label} has the unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{label} has no valid shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{label} has no valid data_offsets")
    begin, end = offsets
    if math.prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise ValueError(f"{label} has {end - begin} bytes, which do not match its shape and dtype")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    # The bound keeps the product of untrusted sizes small enough to compare quickly.
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < 1 << 48 for number in value
    )


def _check_layout(tensors: dict[str, TensorEntry], data_bytes: int) -> None:
    """The tensors must cover the file's data exactly: no gap, no overlap, no rest."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise ValueError(
                f"{name[:100]!r} begins at {tensor.begin}, the tensor before it ends at {position}"
            )
        position = tensor.end
    if position != data_bytes:
        raise ValueError(f"its tensors end at {position} of {data_bytes} bytes")
