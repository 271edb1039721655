"""From a checked directory to a model in memory.

Owns the order: files, architecture, settings, then weights, so that whatever can be refused is
refused before a weight is read. Downloads nothing and runs no forward pass; the attention
implementation is set by the runner.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fairlead_runtime.config import ConfigError, EngineConfig
from fairlead_runtime.models import architecture
from fairlead_runtime.models import files as model_files
from fairlead_runtime.models.files import ModelFiles
from fairlead_runtime.models.identity import identity
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.shape import ModelShape

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Inspected:
    """A model that will be loaded as far as its files and settings tell; no weight has been read.

    ``dtype`` is what it will run in, ``max_model_len`` the configured limit or the model's own, in
    tokens.
    """

    files: ModelFiles
    shape: ModelShape
    dtype: torch.dtype
    max_model_len: int

    @property
    def config_json(self) -> Mapping[str, Any]:
        """config.json as it stands in the directory."""
        return self.files.config


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, with what every other part asks about it.

    ``identity`` (32 bytes) differs whenever cached keys and values would; ``eos_ids`` are all ids
    that end a text; ``max_model_len`` is the configured limit or the model's own, in tokens.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    identity: bytes
    shape: ModelShape
    eos_ids: frozenset[int]
    max_model_len: int
    dtype: torch.dtype
    config_json: Mapping[str, Any]


def inspect(path: Path | str, config: EngineConfig | None = None) -> Inspected:
    """Check a model directory in full, but for its weights' values.

    Raises ModelError for the model, ConfigError for a setting that does not fit it.
    """
    settings = config or EngineConfig()
    found = model_files.check(Path(path))
    maps = model_files.auto_maps(found.path)
    shape = architecture.check(
        found.config, maps, trusted=settings.trust_remote_code, weights=found.weights
    )
    if settings.quantization != "none":
        raise ConfigError(
            "quantization", f"{settings.quantization} is not supported yet", "use none"
        )
    own = shape.max_len
    if settings.max_model_len is not None and settings.max_model_len > own:
        raise ConfigError(
            "max_model_len",
            f"{settings.max_model_len} is more than the model's {own} tokens",
            f"set at most {own}",
        )
    return Inspected(found, shape, _dtype(found, shape, settings), settings.max_model_len or own)


def load(
    path: Path | str, *, config: EngineConfig | None = None, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Read a checkpoint (safetensors only) onto ``device``, with eager attention. Raises as
    ``inspect`` does.
    """
    settings = config or EngineConfig()
    found = inspect(path, settings)
    started = time.monotonic()
    size = found.files.weight_bytes / 2**30
    log.info("loading %.2f GiB of weights as %s", size, str(found.dtype).removeprefix("torch."))
    tokenizer = load_tokenizer(found.files.path)
    model = _load_weights(found).to(torch.device(device))
    model.requires_grad_(False).eval()
    log.info("loaded %.2f GiB in %.1f s", size, time.monotonic() - started)
    # RoPE is pinned to the longest sequence, so for some models that length decides the keys.
    traits = (str(found.dtype), str(found.max_model_len))
    return LoadedModel(
        model=model,
        config=model.config,
        tokenizer=tokenizer,
        identity=identity(found.files, *traits),
        shape=found.shape,
        eos_ids=eos_ids(model, tokenizer, found.shape.vocab),
        max_model_len=found.max_model_len,
        dtype=found.dtype,
        config_json=found.config_json,
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, in its Rust form: streaming text needs it. Raises ModelError."""
    factory: Any = AutoTokenizer  # transformers' classes are untyped
    try:
        tokenizer = factory.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # A tokenizer's files are a stranger's: whatever reading them raises, they are at fault.
    except Exception as error:
        raise ModelError(
            "BadModelFiles", f"the tokenizer cannot be read: {_first_line(error)}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise ModelError(
            "UnsupportedModel",
            "the tokenizer has no Rust form",
            "use a revision that has a tokenizer.json",
        )
    return tokenizer


def eos_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab: int
) -> frozenset[int]:
    """The ids that end a text: generation_config's (else config's) and the tokenizer's, inside the
    vocabulary.
    """
    found: set[int] = set()
    generation = getattr(model.generation_config, "eos_token_id", None)
    for value in (
        generation if generation is not None else model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found |= set(value) if isinstance(value, list | tuple) else {value}
    return frozenset(token for token in found if isinstance(token, int) and 0 <= token < vocab)


def _load_weights(found: Inspected) -> PreTrainedModel:
    path = found.files.path
    factory: Any = AutoModelForCausalLM  # transformers' classes are untyped
    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with _progress_on_terminals_only():
            model, info = factory.from_pretrained(
                path,
                config=settings,
                dtype=found.dtype,
                attn_implementation="eager",  # a config.json may name an implementation to download
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    # Any of transformers' many errors here means that the checkpoint contradicts itself.
    except Exception as error:
        raise ModelError(
            "BadWeights", f"the model cannot be loaded: {_first_line(error)}"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ModelError("UnsupportedModel", f"{type(model).__name__} is no transformers model")
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill them with random numbers and go on.
        raise ModelError(
            "BadWeights",
            f"{len(missing)} tensors are missing, first {missing[0]}",
            "fetch the model again",
        )
    if info["unexpected_keys"]:
        log.warning(
            "ignored %d tensors the architecture does not have", len(info["unexpected_keys"])
        )
    return model


def _dtype(found: ModelFiles, shape: ModelShape, settings: EngineConfig) -> torch.dtype:
    """The configured type, else config.json's, else that of the first stored float tensor."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if shape.dtype:
        return DTYPES[shape.dtype]
    for header in found.weights.values():
        for tensor in header.tensors.values():
            if tensor.dtype in _STORED:
                return DTYPES[_STORED[tensor.dtype]]
    raise ConfigError(
        "dtype", "the checkpoint says no type that is served", "set float32, float16 or bfloat16"
    )


@contextmanager
def _progress_on_terminals_only() -> Iterator[None]:
    """Transformers' bar where someone watches; where stderr is a file, the log lines of ``load``
    stand for it.
    """
    control: Any = transformers.utils.logging
    shown = control.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        control.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            control.enable_progress_bar()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
