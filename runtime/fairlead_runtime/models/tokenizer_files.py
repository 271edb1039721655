"""Reads the tokenizer of a model directory.

The only part of a model that the HTTP process needs, so this module imports no torch. transformers
does while torch can be imported (``commands/serve.py`` sees to that).
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fairlead_runtime.models.files import CHAT_TEMPLATE, has_file, read_json
from fairlead_runtime.models.model_error import ModelError, first_line


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's own fast (Rust) tokenizer, which streaming needs. Raises ModelError."""
    factory: Any = AutoTokenizer  # transformers' classes are untyped
    try:
        tokenizer = factory.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # A tokenizer's files are untrusted: any error while reading them is theirs.
    except Exception as error:
        raise ModelError(
            "BadModelFiles", f"the tokenizer cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise ModelError(
            "UnsupportedModel",
            "the tokenizer has no fast (Rust) implementation",
            "use a revision that has a tokenizer.json",
        )
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = _template_of_the_whole(path)
    return tokenizer


def _template_of_the_whole(path: Path) -> str | None:
    """The template of a model of several parts, of which older ones have it beside the tokenizer's
    own files, where transformers' tokenizers do not look.
    """
    if not has_file(path, CHAT_TEMPLATE):
        return None
    template = read_json(path, CHAT_TEMPLATE).get("chat_template")
    return template if isinstance(template, str) else None


def encodes_as_defined(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's definition (the JSON of its Rust part) alone decides its ids: some
    classes of transformers change a text first.
    """
    kind = type(tokenizer)
    return all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("encode", "_encode_plus")
    )
