"""llama.cpp's grammars in llguidance's form of Lark, by its converter's reading.

Owns what the converter lacks: rules of names that become the same, ``start`` among them,
characters written by their number, runs of characters that give some back, repetitions of
repetitions and of none, and sets of characters that mean another thing in an expression.
"""

import re

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    SequenceNode,
    resolve,
)

from fairlead_runtime.grammar.longest import (
    GIVES_BACK,
    TOO_DEEP,
    TOO_LARGE,
    difference,
    escapes,
    members_of,
)

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
LIBRARY_FAILS = "llguidance fails at a rule that is read whole"
_HEAD = "%llguidance {}"
_WHY = f"{_HEAD}\n// by characters: "
# All escapes that the converter knows, so that no digit is taken for the beginning of one.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_SPECIAL = frozenset('"\\[]^-/')


def is_gbnf(grammar: str) -> bool:
    """``::=`` stands in no Lark grammar outside of strings."""
    return _RULE.search(grammar) is not None


def why_by_characters(lark: str) -> str:
    """Why ``lark_of`` gave this grammar pieces of one character; empty where it did not."""
    reasons = (GIVES_BACK, TOO_LARGE, TOO_DEEP, LIBRARY_FAILS)
    return next((why for why in reasons if lark.startswith(f"{_WHY}{why}\n")), "")


def lark_of(grammar: str, why: str = "") -> str:
    """``why``: for which reason pieces have one character each, whose masks take up to ten times
    as long; otherwise they do where longer ones may mean another thing. Raises whatever the
    converter and its recursion over the input raise.
    """
    names: dict[str, str] = {_ROOT: _ROOT}

    def piece(match: re.Match[str]) -> str:
        if text := match["text"]:
            return _ESCAPE.sub(_character, text)
        if name := match["name"]:
            # The converter writes names in one case, "-" as "_", and calls the root "start".
            return names.setdefault(name, f"rule{len(names)}")
        return match[0]

    rules = GrammarParser().parse(_PIECE.sub(piece, grammar))
    resolve(rules)
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    why = why or difference(ordered)
    for rule in ordered if why else ():
        rule.name = rule.name.lower()  # no piece, which has a name in capitals
    lines = [f"{_WHY}{why}" if why else _HEAD]
    for rule in ordered:
        lines.append(f"{rule.name}: {_written(rule.alternatives, split=bool(why)).top_str()}")
    return "\n".join(lines)


def _written(node: ASTNode, *, split: bool) -> ASTNode:
    """The node as Lark has it; ``split``: with a literal for each character of one."""
    match node:
        case LiteralNode() if split and len(chars := [*escapes(node.value)]) > 1:
            return AlternativeNode([SequenceNode([LiteralNode(char) for char in chars])])
        case RegexNode():
            return RegexNode(_expression(node.rx))
        case RepetitionNode(max_times=0):
            return LiteralNode("")
        case RepetitionNode():
            inner = _written(node.node, split=split)
            # The converter takes it for one that needs no parentheses.
            repeated = SequenceNode([inner]) if isinstance(inner, RepetitionNode) else inner
            return RepetitionNode(repeated, node.min_times, node.max_times)
        case SequenceNode():
            return SequenceNode([_written(each, split=split) for each in node.nodes])
        case AlternativeNode():
            return AlternativeNode([_written(each, split=split) for each in node.alternatives])
    return node


def _expression(written: str) -> str:
    """A set of characters as an expression: no ``&&``, ``--`` or ``~~`` is an operator there, and
    any character may be a line end.
    """
    negated, ranges = members_of(written)
    if not ranges:
        return "(?s:.)" if written == "." else written
    members = (
        _member(low) if low == high else f"{_member(low)}-{_member(high)}" for low, high in ranges
    )
    return f"[{'^' * negated}{''.join(members)}]"


def _member(char: int) -> str:
    return chr(char) if char > 127 or chr(char).isalnum() else rf"\x{char:02x}"


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
