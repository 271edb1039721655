"""Grammars over the tokenizer of the tiny models, and outputs to ask for."""

from typing import Any

from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.grammar.guides import Guides
from support import tiny
from support.byte_tokenizer import END

TOKENIZER = tiny.tokenizer()
EOS = frozenset({TOKENIZER.convert_tokens_to_ids(END)})
_FACTS = TokenizerFacts.of(TOKENIZER, tiny.VOCAB, EOS)
assert _FACTS is not None
FACTS = _FACTS
GUIDES = Guides(FACTS)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "regex": {"regex": "[a-z]{3,9}( [a-z]{3,9}){0,6}"},
    "choice": {"choice": ["yes", "no", "perhaps", "perhaps not"]},
    "grammar": {"grammar": 'start: "(" start ")" start | /[0-9]{1,4}/'},
}
