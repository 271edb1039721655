"""What is refused at once: everything about a command that is known without torch and weights.

Owns the order of these checks. Imports neither torch nor transformers, which take seconds: the
engine makes the same checks again, with those that need them.
"""

import importlib.util
import threading
from collections.abc import Mapping
from typing import Any

from fairlead_runtime.hub import source
from fairlead_runtime.models import architecture, files
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.preflight import check_chat_template, check_record
from fairlead_runtime.settings.supported import check_supported
from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.verdict import check_against

# The extra `runtime`, without what only some commands need.
ENGINE = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "llguidance")


class MissingLibrary(ModuleNotFoundError):  # noqa: N818 - named for the condition
    """A library of an extra is not installed. ``name``: which."""


def require(*modules: str) -> None:
    """Raise MissingLibrary unless they are installed. Imports none of them."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise MissingLibrary(f"No module named {name!r}", name=name)


def check_model(model: str, config: EngineConfig) -> ModelShape | None:
    """Check settings and the model's files but for its tokenizer's, those of a hub model when they
    are fetched. Returns the shape where it is known already. Raises ConfigError or ModelError.
    """
    check_supported(config)
    asked = source.parse(model)
    source.check_revision(asked, config.revision)
    check_record(config)
    check_chat_template(config)
    if asked.kind == "hub":
        return None
    local = files.check(source.resolve(model).path, tokenizer=False)
    if not _is_listed(local.config):
        return None
    maps = files.auto_maps(local.path)
    trusted = config.trust_remote_code
    shape = architecture.check(local.config, maps, trusted=trusted, weights=local.weights)
    check_against(shape, config)
    return shape


def check_tokenizer(model: str) -> None:
    """Check the tokenizer's files, unless they are to be fetched. Raises ModelError."""
    if source.parse(model).kind != "hub":
        files.check_tokenizer(source.resolve(model).path)


def read_ahead(model: str) -> None:
    """Begin to read a local model's weights, in a thread that the process does not wait for."""
    if source.parse(model).kind != "hub":
        path = source.resolve(model).path
        threading.Thread(target=files.read_ahead, args=(path,), daemon=True).start()


def _is_listed(config: Mapping[str, Any]) -> bool:
    """Whether our own table decides on the architecture; else transformers does, which is imported
    for that.
    """
    try:
        ModelShape.from_config(config)
    except UnknownFamilyError:
        return False
    except (ShapeError, ConfigError):
        return True
    return True
