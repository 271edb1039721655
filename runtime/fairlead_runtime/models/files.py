"""The files of a model directory, checked before anything reads them, since they are untrusted.

Owns which files are opened at all, the limits of JSON files, and every check on safetensors files
before they are mapped into memory. Opens no pickle, runs no Python file, follows no link that
leaves the model.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead_runtime.models.headers import Header, read_header
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.arithmetic import DEEPEST_JSON, depth_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    CHAT_TEMPLATE,
)
_JSON = (CONFIG, INDEX, GENERATION_CONFIG, *_TOKENIZER)
# Everything that is downloaded or read. Repositories hold many more files, none of them needed.
PATTERNS = ("*.safetensors", *_JSON, "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
CHAT_TEMPLATES = "additional_chat_templates"  # a folder, which transformers reads since 4.52
PICKLES = (
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".gguf",
    ".msgpack",
    ".h5",
    ".npz",
    ".onnx",
)
READ_AHEAD = 16 << 20  # bytes that are read at a time
LARGEST_JSON = 64 << 20  # bytes; the largest tokenizer.json in use is near 35 MiB
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
# Files that transformers reads as settings: an auto_map in one of them names Python code to run.
_SETTINGS = (CONFIG, "tokenizer_config.json", GENERATION_CONFIG)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked directory: its config.json and the weight files with their headers, in the order of
    names.
    """

    path: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Header]

    @property
    def weight_bytes(self) -> int:
        return sum(header.file_bytes for header in self.weights.values())


def check(path: Path, *, tokenizer: bool = True) -> ModelFiles:
    """Check every file of a model directory that will be read, and refuse unsafe or broken ones;
    with ``tokenizer`` False all but those of ``check_tokenizer``, which takes tenths of a second
    for a large vocabulary.

    Raises ModelError. Checks only the files themselves: ``architecture`` decides whether the model
    is served and whether it needs its own code.
    """
    names = _list(path)
    config = read_json(path, CONFIG, names)
    if GENERATION_CONFIG in names:
        read_json(path, GENERATION_CONFIG, names)
    if tokenizer:
        check_tokenizer(path)
    if (path / "adapter_config.json").exists():
        raise ModelError(
            "UnsupportedModel",
            f"{path.name}: adapter_config.json marks an adapter, not a whole model",
            "merge the adapter into its base model and serve the result",
        )
    shards = _shards(path, names)
    headers = {name: read_header(path / name) for name in sorted(shards)}
    _check_index(shards, headers)
    return ModelFiles(path, config, headers)


def check_tokenizer(path: Path) -> None:
    """Check the JSON files that only tokenizers are read from. Raises ModelError."""
    names = _list(path)
    for name in sorted(names.intersection(_TOKENIZER)):
        read_json(path, name, names)


def read_ahead(path: Path) -> None:
    """Have the weights read into the system's cache, piece by piece as fast as the disk gives them,
    where they are not there: whoever maps them waits for 128 KiB at a time. Reads nothing that the
    cache has, and leaves errors to the reader of the weights.
    """
    piece = bytearray(READ_AHEAD)
    for file in sorted(path.glob("*.safetensors")):
        with contextlib.suppress(OSError), file.open("rb", buffering=0) as opened:
            for at in range(0, os.fstat(opened.fileno()).st_size, READ_AHEAD):
                if not _is_cached(opened.fileno(), at):
                    os.preadv(opened.fileno(), [piece], at)


def _is_cached(file: int, at: int) -> bool:
    """Whether the byte there can be read without waiting, where the file system tells."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def auto_maps(path: Path) -> dict[str, str]:
    """The places where the model's settings name their own Python code: file → dotted keys, at any
    depth.
    """
    names = _list(path)
    maps = {}
    for name in _SETTINGS:
        if name in names:
            keys = list(_find_auto_map(read_json(path, name, names), ""))
            if keys:
                maps[name] = ", ".join(keys)
    return maps


def _find_auto_map(value: Any, prefix: str) -> list[str]:
    keys = []
    if isinstance(value, dict):
        for key, item in value.items():
            if key in {"auto_map", "custom_pipelines"} and item:
                keys.append(f"{prefix}{key}")
            keys += _find_auto_map(item, f"{prefix}{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            keys += _find_auto_map(item, f"{prefix}{index}.")
    return keys


def has_file(path: Path, name: str) -> bool:
    """Whether the model has this file, of those that may be read. Raises ModelError as ``check``
    does.
    """
    return name in _list(path)


def read_json(path: Path, name: str, names: set[str] | None = None) -> dict[str, Any]:
    """One JSON object of the model. Raises ModelError unless it is small, shallow, unambiguous and
    an object.
    """
    if name not in (names if names is not None else _list(path)):
        raise ModelError(
            "ModelNotFound",
            f"{path}: {name} is missing",
            "point MODEL at a directory in transformers' format",
        )
    file = path / name
    if file.stat().st_size > LARGEST_JSON:
        raise ModelError("BadModelFiles", f"{name}: larger than {LARGEST_JSON >> 20} MiB")
    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=_unique)
    except RecursionError:
        raise ModelError("BadModelFiles", f"{name}: nested too deeply") from None
    except ValueError as error:
        raise ModelError("BadModelFiles", f"{name}: not valid JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise ModelError("BadModelFiles", f"{name}: not a JSON object")
    if depth_of(value) > DEEPEST_JSON:
        raise ModelError("BadModelFiles", f"{name}: nested too deeply")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two equal keys one reader may take the first and another the second: the checked value
    # would not be the one used.
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("the same key twice in one object")
    return value


def is_read(name: str) -> bool:
    """Whether a file of a model is downloaded and read, by its path within the model."""
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == CHAT_TEMPLATES and Path(file).match("*.jinja")
    return any(Path(file).match(pattern) for pattern in PATTERNS)


def _list(path: Path) -> set[str]:
    """Paths of the files that may be read, within the model. Raises ModelError for links that leave
    the model and for non-files.
    """
    if not path.is_dir():
        raise ModelError(
            "ModelNotFound", f"{path}: no such directory", "check the path, or the mounted volume"
        )
    allowed = [path.resolve(), *_blobs(path)]
    names = set()
    templates = (f"{CHAT_TEMPLATES}/{name}" for name in _names(path / CHAT_TEMPLATES))
    for name in filter(is_read, (*_names(path), *templates)):
        # Accepts a loop of links, which Path.resolve does not.
        real = Path(os.path.realpath(path / name))
        if not any(real.is_relative_to(root) for root in allowed):
            raise ModelError(
                "BadModelFiles",
                f"{name}: a link that leaves the model's directory",
                "copy the file there",
            )
        try:
            mode = real.stat().st_mode
        except OSError:
            raise ModelError(
                "BadModelFiles",
                f"{name}: the target of this link does not exist",
                "fetch the model again",
            ) from None
        if stat.S_ISDIR(mode):
            continue
        # Opening a pipe would block, and a device has no end.
        if not stat.S_ISREG(mode):
            raise ModelError("BadModelFiles", f"{name}: not a regular file")
        names.add(name)
    return names


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _blobs(path: Path) -> list[Path]:
    """The directory that links of a hub cache point into: models--o--n/snapshots/<commit> →
    models--o--n/blobs.
    """
    repository = path.resolve().parent.parent
    if path.resolve().parent.name == "snapshots" and repository.name.startswith("models--"):
        return [repository / "blobs"]
    return []


def read_index(path: Path) -> dict[str, set[str]]:
    """Weight file → names of its tensors, from the index. Checks that the file names are plain, not
    that the files exist.
    """
    weight_map = read_json(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("BadWeights", f"{INDEX}: weight_map must map tensor names to files")
    listed: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file) or ".." in file:
            raise ModelError(
                "BadWeights",
                f"{INDEX}: {str(file)[:100]!r} is not a plain name of a safetensors file",
            )
        listed.setdefault(file, set()).add(tensor)
    return listed


def _shards(path: Path, names: set[str]) -> dict[str, set[str]]:
    """Weight file → tensor names that it must contain."""
    if WEIGHTS in names:
        # transformers prefers this file to an index, so an index beside it is not read.
        return {WEIGHTS: set()}
    if INDEX not in names:
        raise _no_safetensors(path)
    shards = read_index(path)
    for file in shards:
        if file not in names:
            raise ModelError("BadWeights", f"{INDEX}: {file} is missing", "fetch the model again")
    return shards


def _no_safetensors(path: Path) -> ModelError:
    names = sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(PICKLES))
    pickles = f"; found {', '.join(names[:5])}, which are never opened" if names else ""
    return ModelError(
        "NoSafetensors",
        f"{path}: neither {WEIGHTS} nor {INDEX} exists{pickles}",
        "use a revision with safetensors, or convert the weights",
    )


def _check_index(shards: Mapping[str, set[str]], headers: Mapping[str, Header]) -> None:
    tensors: set[str] = set()
    for file, header in headers.items():
        missing = shards[file] - set(header.tensors)
        if missing:
            raise ModelError(
                "BadWeights", f"{file}: {min(missing)[:100]!r} is in the index but not in the file"
            )
        duplicates = tensors & set(header.tensors)
        if duplicates:
            raise ModelError(
                "BadWeights", f"{file}: {min(duplicates)[:100]!r} is in another file too"
            )
        tensors |= set(header.tensors)
