"""Loads a checked model directory into memory.

Owns the order: files, architecture, settings, then weights, so that refusals come before any weight
is read. Downloads nothing and runs no forward pass; ``device`` sets the attention implementation.
"""

import errno
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fairlead_runtime.models import architecture, published, text_model
from fairlead_runtime.models import files as model_files
from fairlead_runtime.models.files import ModelFiles
from fairlead_runtime.models.identity import identity
from fairlead_runtime.models.model_error import ModelError, first_line
from fairlead_runtime.models.tokenizer_files import load_tokenizer, text_facts
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.settings.engine_config import ConfigError, Dtype, EngineConfig
from fairlead_runtime.settings.startup_parts import Report, unreported
from fairlead_runtime.settings.supported import check_supported
from fairlead_runtime.sizing.checkpoint_formats import published as stored_format
from fairlead_runtime.sizing.config_json import has_parts
from fairlead_runtime.sizing.element_types import matrix_dtype_of
from fairlead_runtime.sizing.shape import ModelShape

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """A model whose files and settings have been checked; no weight has been read.

    ``dtype`` is the type it will run in, ``matrix_dtype`` that in which a CPU's kernels hold its
    matrices; ``max_model_len`` the configured limit or the model's own, in tokens.
    """

    files: ModelFiles
    shape: ModelShape
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    max_model_len: int

    @property
    def config_json(self) -> Mapping[str, Any]:
        """config.json as stored in the directory."""
        return self.files.config

    @property
    def weight_bytes(self) -> int:
        """Bytes to read: those of the files, or what a model of several parts has for its text."""
        text_alone = self.config_json.get("model_type") in text_model.BESIDE
        if text_alone or has_parts(self.config_json):
            text = self.shape.parameters * self.dtype.itemsize
            return min(text, self.files.weight_bytes)
        return self.files.weight_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, with the facts that other modules need.

    ``identity`` (32 bytes) differs whenever cached keys and values would; ``eos_ids`` are all ids
    that end a text; ``max_model_len`` is the configured limit or the model's own, in tokens.
    ``matrix_dtype``: in which a CPU's kernels hold its matrices. ``read_tokenizer`` reads it,
    unless this process has.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    text: TextFacts
    read_tokenizer: Callable[[], PreTrainedTokenizerBase]
    identity: bytes
    shape: ModelShape
    eos_ids: frozenset[int]
    max_model_len: int
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    config_json: Mapping[str, Any]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.read_tokenizer()


def inspect(
    path: Path | str, config: EngineConfig | None = None, *, reads_tokenizer: bool = True
) -> InspectedModel:
    """Check a model directory, except for the values of its weights, and for the tokenizer's files
    where another process checks and reads those.

    Raises ModelError for the model, ConfigError for a setting that it does not support.
    """
    settings = config or EngineConfig()
    files = model_files.check(Path(path), tokenizer=reads_tokenizer)
    maps = model_files.auto_maps(files.path)
    shape = architecture.check(
        files.config, maps, trusted=settings.trust_remote_code, weights=files.weights
    )
    check_supported(settings)
    model_len = shape.max_len
    if settings.max_model_len is not None and settings.max_model_len > model_len:
        raise ConfigError(
            "max_model_len",
            f"{settings.max_model_len} is more than the model's {model_len} tokens",
            f"set at most {model_len}",
        )
    dtype = _dtype(files, shape, settings)
    resolved = replace(settings, dtype=cast("Dtype", str(dtype).removeprefix("torch.")))
    matrix_dtype = DTYPES[matrix_dtype_of(shape, resolved)]
    return InspectedModel(files, shape, dtype, matrix_dtype, settings.max_model_len or model_len)


def load(
    path: Path | str,
    *,
    config: EngineConfig | None = None,
    device: str | torch.device = "cpu",
    inspected: InspectedModel | None = None,
    text: Callable[[], TextFacts | None] | None = None,
    report: Report = unreported,
) -> LoadedModel:
    """Read a checkpoint (safetensors only) onto ``device``, with eager attention; ``report`` hears
    how many bytes are read. ``inspected``: what ``inspect`` has just given of the same arguments;
    without it, raises as that does. ``text`` waits for what another process has read of the
    tokenizer, None where that failed: then, and without it, the tokenizer is read here.
    """
    report("weights")
    settings = config or EngineConfig()
    inspected = inspected or inspect(path, settings)
    started = time.monotonic()
    size = _size(inspected.weight_bytes)
    log.info("loading %s of weights as %s", size, str(inspected.dtype).removeprefix("torch."))
    folder = inspected.files.path
    tokenizer = load_tokenizer(folder) if text is None else None
    sharded = settings.tensor_parallel > 1
    model = _load_weights(inspected, torch.device(device), report, sharded=sharded)
    model.requires_grad_(False).eval()
    log.info("loaded %s in %.1f s", size, time.monotonic() - started)
    facts = text() if text is not None else None
    if facts is None:
        tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
        facts = text_facts(tokenizer)

    @functools.cache
    def read_tokenizer() -> PreTrainedTokenizerBase:
        return load_tokenizer(folder) if tokenizer is None else tokenizer

    # RoPE is pinned to the longest sequence, so for some models that length decides the keys.
    traits = (str(inspected.max_model_len), settings.quantization, settings.cache_dtype)
    return LoadedModel(
        model=model,
        config=model.config,
        text=facts,
        read_tokenizer=read_tokenizer,
        identity=identity(inspected.files, str(inspected.dtype), *traits),
        shape=inspected.shape,
        eos_ids=eos_ids(model, facts, inspected.shape.vocab),
        max_model_len=inspected.max_model_len,
        dtype=inspected.dtype,
        matrix_dtype=inspected.matrix_dtype,
        config_json=inspected.config_json,
    )


def eos_ids(model: PreTrainedModel, text: TextFacts, vocab: int) -> frozenset[int]:
    """The ids that end a text: generation_config's (else config's) and the tokenizer's, inside the
    vocabulary.
    """
    ids: set[int] = set()
    generation = getattr(model.generation_config, "eos_token_id", None)
    configs = (model.config, text_model.text_of(model.config))
    stored = [getattr(config, "eos_token_id", None) for config in configs]
    values: list[Any] = [generation] if generation is not None else stored
    for value in (*values, text.eos_ids):
        ids |= set(value) if isinstance(value, list | tuple) else {value}
    return frozenset(token for token in ids if isinstance(token, int) and 0 <= token < vocab)


def _load_weights(
    inspected: InspectedModel, device: torch.device, report: Report, *, sharded: bool
) -> PreTrainedModel:
    try:
        return _read_weights(inspected, device, report, sharded=sharded).to(device)
    except (MemoryError, RuntimeError, OSError) as error:
        if not _out_of_memory(error):
            raise
        size = inspected.weight_bytes / 2**30
        raise ModelError(
            "OutOfMemory",
            f"no memory is left to load {size:.2f} GiB of weights on {device.type}",
            "give the process more memory, or take a smaller model",
        ) from error


def _out_of_memory(error: BaseException) -> bool:
    """An accelerator has an exception class for this; the CPU allocator has only its words."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    )


def _read_weights(
    inspected: InspectedModel, device: torch.device, report: Report, *, sharded: bool
) -> PreTrainedModel:
    path, stored = inspected.files.path, stored_format(inspected.config_json)
    if inspected.shape.states:
        text_model.refuse_kernels()
    try:
        settings = text_model.config_to_load(path, inspected.config_json)
        factory = text_model.class_to_load(settings)
        with text_model.without_kernels(), _reported(inspected, report):
            model, info = factory.from_pretrained(
                path,
                config=settings,
                dtype=inspected.dtype,
                attn_implementation="eager",  # a config.json may name an implementation to download
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **published.loader_arguments(settings, stored, inspected.files.weights),
            )
    # Any other of transformers' errors here means that the checkpoint is inconsistent.
    except Exception as error:
        if _out_of_memory(error):
            raise
        raise ModelError(
            "BadWeights", f"the model cannot be loaded: {first_line(error)}"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ModelError("UnsupportedModel", f"{type(model).__name__} is not a transformers model")
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill them with random numbers and continue.
        raise ModelError(
            "BadWeights",
            f"{len(missing)} tensors are missing, first {missing[0]}",
            "fetch the model again",
        )
    published.check_biases(model, path, inspected.files.weights)
    published.finish(model, device, sharded=sharded)
    if info["unexpected_keys"]:
        log.warning(
            "ignored %d tensors that the architecture does not have", len(info["unexpected_keys"])
        )
    return model


def _dtype(files: ModelFiles, shape: ModelShape, settings: EngineConfig) -> torch.dtype:
    """The configured type, else config.json's, else that of most stored numbers: a few, as the
    biases of routers, have a wider one than the model.
    """
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if shape.dtype:
        return DTYPES[shape.dtype]
    stored = Counter[str]()
    for header in files.weights.values():
        for tensor in header.tensors.values():
            if tensor.dtype in _STORED:
                stored[tensor.dtype] += math.prod(tensor.shape)
    if stored:
        return DTYPES[_STORED[max(stored, key=stored.__getitem__)]]
    raise ConfigError(
        "dtype", "the checkpoint has no supported type", "set float32, float16 or bfloat16"
    )


@contextmanager
def _reported(inspected: InspectedModel, report: Report) -> Iterator[None]:
    """In place of transformers' progress bar, ``report`` hears the bytes of the tensors that its
    loop has done. Those that are stored under another name count as a mean one.
    """
    sizes = {
        name: tensor.end - tensor.begin
        for header in inspected.files.weights.values()
        for name, tensor in header.tensors.items()
    }
    total = sum(sizes.values())

    def hook(_factory: Any, arguments: tuple[Any, ...], _options: Mapping[str, Any]) -> Any:
        tensors = arguments[0]

        def counted() -> Iterator[Any]:
            done = 0
            for name, mapping in tensors:
                yield name, mapping
                done += sizes.get(name, total // max(1, len(tensors)))
                report("weights", min(done, total), total)

        return counted()

    control: Any = transformers.utils.logging
    before = control.set_tqdm_hook(hook)
    try:
        yield
    finally:
        control.set_tqdm_hook(before)


def _size(count: int) -> str:
    """Bytes in GiB, or in MiB where that would be 0.0."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
