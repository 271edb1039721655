"""llama.cpp's grammars in llguidance's form of Lark, by its converter.

Owns what the converter lacks: rules of names that become the same, ``start`` among them,
characters written by their number, and runs of characters that give some back.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from fairlead_runtime.grammar.longest import by_characters

_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_PIECE = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\])
    | (?P<skipped>\#[^\n]* | \{[^}]*\})
    | (?P<name>[A-Za-z0-9_-]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ROOT = "root"
# All escapes that the converter knows, so that no digit is taken for the beginning of one.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_SPECIAL = frozenset('"\\[]^-/')


def is_gbnf(grammar: str) -> bool:
    """``::=`` stands in no Lark grammar outside of strings."""
    return _RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """Raises whatever the converter and its recursion over the input raise."""
    names: dict[str, str] = {_ROOT: _ROOT}

    def piece(match: re.Match[str]) -> str:
        if text := match["text"]:
            return _ESCAPE.sub(_character, text)
        if name := match["name"]:
            # The converter writes names in one case, "-" as "_", and calls the root "start".
            return names.setdefault(name, f"rule{len(names)}")
        return match[0]

    readable = _PIECE.sub(piece, grammar)
    return by_characters(readable) or str(gbnf_to_lark(readable))


def _character(escape: re.Match[str]) -> str:
    """The character whose number the escape has; another escape as it is."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    character = chr(int(digits, 16))
    if character in _SPECIAL or not character.isprintable():
        # Below 128: of the others none is special, and these have no other spelling here.
        return f"\\x{ord(character):02x}" if ord(character) < 128 else character
    return character
