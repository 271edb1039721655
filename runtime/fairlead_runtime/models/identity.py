"""One digest per model, equal when its keys and values are, and cheap enough for every start.

Owns the digest that starts the prefix cache's hash chain, so that blocks of one model never serve
another.
"""

import hashlib
import json
from collections.abc import Mapping

from fairlead_runtime.models.files import ModelFiles
from fairlead_runtime.models.headers import TensorEntry
from fairlead_runtime.sizing.arithmetic import ceil_div

MOST_TENSORS = 512  # sampled per file
SAMPLE = 256  # bytes, at the begin, middle and end of a tensor
# Settings that do not affect keys and values: the origin of the file and the software.
_NEUTRAL = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def identity(files: ModelFiles, *traits: str) -> bytes:
    """sha256 (32 bytes) over config.json, the headers of all weight files and samples of their
    tensors.

    Two checkpoints that share every name, shape and setting, as two fine-tunes of one base do,
    differ in the samples: training changes whole tensors. An edit of single numbers between the
    samples is not detected. ``traits`` are whatever else of a server determines the cached values,
    such as the dtypes of the model and of its cache.
    """
    digest = hashlib.sha256(b"fairlead model 1")
    settings = {key: value for key, value in files.config.items() if key not in _NEUTRAL}
    _add(digest, json.dumps([settings, traits], sort_keys=True).encode())
    for name in sorted(files.weights):
        header = files.weights[name]
        _add(digest, header.raw)
        with (files.path / name).open("rb") as file:
            for tensor in _sampled_tensors(header.tensors):
                for offset in _offsets(tensor):
                    file.seek(header.data + offset)
                    _add(digest, file.read(min(SAMPLE, tensor.end - offset)))
    return digest.digest()


def _add(digest: "hashlib._Hash", field: bytes) -> None:
    # With its length, so that two lists of fields never give the same bytes.
    digest.update(len(field).to_bytes(8, "little") + field)


def _sampled_tensors(tensors: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    """At most MOST_TENSORS, evenly spread over the file."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.begin)
    step = max(1, ceil_div(len(ordered), MOST_TENSORS))
    return ordered[::step]


def _offsets(tensor: TensorEntry) -> list[int]:
    last = max(tensor.begin, tensor.end - SAMPLE)
    return sorted({tensor.begin, (tensor.begin + last) // 2, last})
