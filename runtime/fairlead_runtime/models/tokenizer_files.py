"""Reads the tokenizer of a model directory.

The only part of a model that the HTTP process needs, so this module imports no torch. transformers
does while torch can be imported (``commands/serve.py`` sees to that).
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fairlead_runtime.models.files import CHAT_TEMPLATE, has_file, read_json
from fairlead_runtime.models.model_error import ModelError, first_line
from fairlead_runtime.request.text_facts import TextFacts

# What people write, for the self-test: of random tokens alone nobody could tell what a rounded
# model loses.
SAMPLE_TEXT = (
    "Before the first ferry leaves, the harbour belongs to the gulls. They sit on the masts of the "
    "fishing boats, which are moored two by two along the northern quay, and watch the baker's van "
    "come down the hill. At half past five the light in the office goes on. The harbour master "
    "writes the wind, the height of the water and the names of the ships into a book that is older "
    "than she is, although all of it is in the computer, too. Then she unlocks the gate, and the "
    "people who have waited in their cars drive on board, one after the other, slowly, because the "
    "ramp is wet. Nobody speaks much at that hour. On the other side of the bay lies the town with "
    "its schools and hospitals, and when the engines start, the whole deck trembles for a moment "
    "and then is quiet again."
)


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


def text_facts(tokenizer: PreTrainedTokenizerBase) -> TextFacts:
    """What a start needs of it, without the definition. Raises ModelError."""
    eos: Any = tokenizer.eos_token_id
    ends = eos if isinstance(eos, list | tuple) else (eos,)
    try:
        ids: list[int] = tokenizer(SAMPLE_TEXT)["input_ids"]
    except Exception as error:  # as above
        raise ModelError(
            "BadModelFiles", f"the tokenizer encodes no text: {first_line(error)}"
        ) from error
    return TextFacts(tuple(end for end in ends if isinstance(end, int)), tuple(ids))


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
