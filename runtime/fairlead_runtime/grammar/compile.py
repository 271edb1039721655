"""Turns StructuredOutputs into llguidance's grammars and matchers, with the limits that hold for
both the checking child and the engine.

Owns the options and limits. Everything here may take long, use much memory or, for hostile input,
end the process: only the child of ``check`` runs it on input that nobody has checked.
"""

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from fairlead_runtime.grammar.gbnf import LIBRARY_FAILS, is_gbnf, lark_of
from fairlead_runtime.grammar.references import Schema
from fairlead_runtime.grammar.schemas import Begins, SchemaError, enforceable
from fairlead_runtime.request.structured import (
    MAX_SOURCE,
    WHITE_SPACE,
    StructuredOutputs,
    text_rule,
)
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.sizing.arithmetic import ceil_div

_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "coerce_one_of": False,
    "lenient": False,
}
# As Python's json.dumps writes a value, as most models saw calls written in their training.
_COMPACT: Any = {
    **_JSON_OPTIONS,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
}
# Counts of the library's own work units, so that a refusal does not depend on the machine's speed.
MAX_LEXER_STATES = 50_000
MAX_STEP_FUEL = 200_000  # of one mask: about 15 ms
MAX_STEP_ITEMS = 50_000
MAX_INITIAL_FUEL = 1_000_000  # of a compilation: about 20 ms
MAX_GRAMMAR_SIZE = 500_000
MAX_ENFORCED = 4 * MAX_SOURCE  # characters that are compiled in place of a source
# JSON as every reader takes it, of any schema: its numbers are finite doubles, and a name has one
# spelling, so that "\\u0061" is no other name than "a".
JSON_TEXT = StructuredOutputs(
    grammar=r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" (member ("," member)*)? "}"
member: NAME ":" value
array: "[" (value ("," value)*)? "]"
STRING: /"([^"\\]|\\.)*"/
NAME: /"([^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f]|7f))*"/
NUMBER: /-?([0-9]|[1-9][0-9]{1,307})(\.[0-9]+)?/
    | /-?[0-9](\.[0-9]+)?[eE][+-]?(0?[0-9]?[0-9]|[12][0-9][0-9]|30[0-7])/
    | /-?[1-9][0-9]{1,200}(\.[0-9]+)?[eE][+-]?[0-9]{1,2}/
%ignore /[ \t\r\n]+/
"""
)
SPACE_AFTER_REASONING = r"[ \t\r\n]{0,4}"
# What a Lark grammar holds that may look like the beginning of a schema, and that beginning.
_LARK_PIECE = re.compile(
    r"""
    "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | <[^<>\s]+> | (?:\#|//)[^\n]* | %json\s*
    """,
    re.VERBOSE,
)
# Words of a schema that a message may name: they tell what to change.
_KEYWORDS = frozenset(
    """additionalProperties allOf anyOf array boolean const contains dependentRequired
    dependentSchemas else enum exclusiveMaximum exclusiveMinimum format integer items maxContains
    maxItems maxLength maxProperties maximum minContains minItems minLength minProperties minimum
    multipleOf null number object oneOf pattern patternProperties prefixItems properties
    propertyNames required schema string then type unevaluatedItems unevaluatedProperties
    uniqueItems""".split()  # noqa: SIM905 - a list of them would fill a page
)
_WORD = re.compile(r"\w{4,}")
_LEXER_FUEL = re.compile(r'^ *"lexer_cost": (\d+)', re.MULTILINE)
_NO_TOKEN = 2**31
NO_OUTPUT = "allows no output: no text fulfils it"
PANIC = "cannot be compiled by llguidance, which fails at it: write its alternatives in another way"


class GrammarError(ValueError):
    """The source cannot be compiled; the message says why, in the library's words, and repeats no
    word of the source but keywords of JSON Schema.
    """


def definition_of(tokenizer: Any) -> str:
    """The JSON of a tokenizer's Rust part, "" without one: tenths of a second for 50,000 ids."""
    backend = _backend_of(tokenizer)
    if backend is None:
        return ""
    plain = copy.copy(backend)
    plain.no_padding()
    plain.no_truncation()
    definition: str = plain.to_str()
    return definition


def with_definition(tokenizer: Any, text: TextFacts) -> TextFacts:
    """These facts of a tokenizer with its definition and size, where it has a Rust part."""
    backend = _backend_of(tokenizer)
    if backend is None:
        return text
    size = backend.get_vocab_size(with_added_tokens=True)
    return replace(text, definition=definition_of(backend), size=size)


def _backend_of(tokenizer: Any) -> Tokenizer | None:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return backend if isinstance(backend, Tokenizer) else None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a model's tokenizer that a matcher needs, as plain values.

    ``definition``: the JSON of a ``tokenizers.Tokenizer``. ``size``: the number of ids, at least
    the tokenizer's own and the width of the logits. ``eos_ids``: at least one.
    """

    definition: str
    size: int
    eos_ids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Iterable[int],
        definition: str | None = None,
    ) -> Self | None:
        """Facts about a tokenizer of transformers or of ``tokenizers``; None where the model has no
        end-of-sequence token or its tokenizer is not of ``tokenizers``: then nothing could end or
        spell an output. ``definition``: its ``definition_of``, where that is known.
        """
        backend = _backend_of(tokenizer)
        ids = tuple(sorted(token for token in eos_ids if token < vocab_size))
        if backend is None or not ids:
            return None
        size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return cls(definition or definition_of(backend), size, ids)

    @classmethod
    def of_text(cls, text: TextFacts, vocab_size: int, eos_ids: Iterable[int]) -> Self | None:
        """``of`` a tokenizer that another process has read, with its definition."""
        ids = tuple(sorted(token for token in eos_ids if token < vocab_size))
        return cls(text.definition, max(vocab_size, text.size), ids) if ids else None

    @property
    def words(self) -> int:
        """32-bit words of one mask."""
        return ceil_div(self.size, 32)

    def build(self, *, fast: bool = True) -> LLTokenizer:
        """Holds the interpreter's lock: about a second and 120 MB for 128,000 ids, half as much
        without the tries that make masks ``fast``; the masks are equal.
        """
        slices: list[str] | None = None if fast else []
        return LLTokenizer(
            self.definition, n_vocab=self.size, eos_token=list(self.eos_ids), slices=slices
        )


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of one check in the child: time by the clock, processor time, and bytes of address
    space that it may add. An answer is due 5 s after a request came.
    """

    seconds: float = 3.5
    cpu_seconds: int = 2
    memory: int = 256 * 1024 * 1024


def enforced(tokenizer: LLTokenizer, outputs: StructuredOutputs) -> str:
    """What is compiled in place of the source; empty where that is the source. Pure Python, which
    holds the interpreter's lock. Raises GrammarError.
    """
    begins = functools.partial(_begins, tokenizer)
    try:
        match outputs.kind:
            case "json":
                text = _json_text(enforceable(json.loads(outputs.source), begins))
            case "grammar":
                text = _with_schemas(_lark(tokenizer, outputs.source), begins)
            case _:
                text = ""
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    if len(text) > MAX_ENFORCED:
        raise GrammarError("becomes too large: give it fewer names, patterns or rules")
    return text


def compile_matcher(tokenizer: LLTokenizer, outputs: StructuredOutputs) -> LLMatcher:
    """A matcher at its start; at once where the check has told what is compiled. Raises
    GrammarError.
    """
    source = outputs.enforced or enforced(tokenizer, outputs)
    try:
        grammar = _grammar(outputs, source)
        if outputs.reasoning_end:
            grammar = _after_reasoning(grammar, tokenizer, outputs.reasoning_end)
    except ValueError as error:
        raise GrammarError(_brief(str(error), outputs.source)) from None
    matcher = _matcher(tokenizer, grammar)
    check(matcher, outputs.source)
    return matcher


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that may have failed already."""
    limits = LLParserLimits(
        initial_lexer_fuel=MAX_INITIAL_FUEL,
        step_lexer_fuel=MAX_STEP_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=True,  # for ``lexer_fuel``; ``_brief`` leaves out what they say more
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def _panics(matcher: LLMatcher) -> bool:
    return matcher.get_error().startswith("panic: ")


def check(matcher: LLMatcher, source: str = "") -> None:
    """Raises GrammarError when the matcher has failed; it never recovers. ``source``: what it was
    compiled from, which the message may quote at compilation only.
    """
    if matcher.is_error():
        if _panics(matcher):
            raise GrammarError(PANIC)
        error = matcher.get_error()
        empty = error.startswith("NoExtension")
        raise GrammarError(NO_OUTPUT if empty else _brief(error, source))


def lexer_fuel(matcher: LLMatcher) -> int:
    """Work units that this matcher and its copies had spent on the states of their lexer by this
    one's last mask; 0 where the library does not tell. It tells them only in the message of an
    error, which a copy makes.
    """
    failing = matcher.deep_copy()
    failing.consume_tokens([_NO_TOKEN])
    # The last: an output may hold such a line, and the message quotes it before.
    return int(["0", *_LEXER_FUEL.findall(failing.get_error())][-1])


def _grammar(outputs: StructuredOutputs, enforced: str) -> str:
    match outputs.kind:
        case "json":
            return _schema_grammar(enforced, _COMPACT if outputs.compact else _JSON_OPTIONS)
        case "json_object":
            return _schema_grammar('{"type":"object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(outputs.source)
        case "choice":
            return LLMatcher.grammar_from_lark(_choices(outputs.choice or ()))
        case "grammar":
            return LLMatcher.grammar_from_lark(enforced)


def _schema_grammar(schema: str, options: Any = _JSON_OPTIONS) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _json_text(schema: Schema) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _begins(tokenizer: LLTokenizer, schema: Schema, text: str) -> bool:
    """Whether an output of the schema can begin with the text."""
    tokens = tokenizer.greedy_tokenize(text)
    matcher = _matcher(tokenizer, _schema_grammar(_json_text(schema)))
    return matcher.try_consume_tokens(tokens) == len(tokens)


def mark_ids(tokenizer: LLTokenizer, mark: str) -> list[int]:
    """The tokens that spell a mark; one, where the vocabulary has it whole."""
    ids = tokenizer.tokenize_str(mark, parse_special=True)
    return ids if len(ids) == 1 else tokenizer.greedy_tokenize(mark)


def _after_reasoning(grammar: str, tokenizer: LLTokenizer, end: str) -> str:
    """The grammar behind any text that ends with ``end``, and white space. A token that is the
    whole mark is no text to the library.
    """
    output = json.loads(grammar)["grammars"][0] if grammar[0] == "{" else {"lark_grammar": grammar}
    ids = mark_ids(tokenizer, end)
    token = f" | TEXT <[{ids[0]}]>" if len(ids) == 1 else ""
    rules = (
        f"start: (reasoning{token}) SPACE @output",
        f"reasoning[suffix={text_rule(end)}]: /(?s:.*)/",
        "TEXT: /(?s:.*)/",
        f"SPACE: /{SPACE_AFTER_REASONING}/",
    )
    start = {"lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [start, {**output, "name": "output"}]})


def _choices(choices: Sequence[str]) -> str:
    """One terminal, so that all choices become one automaton: 40 times faster than a rule each."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(text_rule, choices))}"


def _lark(tokenizer: LLTokenizer, grammar: str) -> str:
    """The grammar in Lark's syntax."""
    if not is_gbnf(grammar):
        return grammar
    try:
        text = lark_of(grammar)
        matcher = _matcher(tokenizer, LLMatcher.grammar_from_lark(text))
        # The library's expressions fail where they spell a text in two ways, such as "ab" and
        # "a" "b"; its rules do not.
        return lark_of(grammar, LIBRARY_FAILS) if _panics(matcher) else text
    # The converter raises its own errors, and whatever its recursion over the input raises.
    except Exception as error:  # noqa: BLE001 - the grammar is at fault
        raise GrammarError(_brief(f"is not valid GBNF: {error}", grammar)) from None


def _with_schemas(grammar: str, begins: Begins) -> str:
    """The Lark grammar with schemas that are enforced. Raises SchemaError."""
    pieces, end = [], 0
    while piece := _LARK_PIECE.search(grammar, end):
        pieces.append(grammar[end : piece.end()])
        end = piece.end()
        if piece[0].startswith("%json"):
            schema, rest = _json_at(grammar, end)
            if isinstance(schema, dict):
                pieces.append(_json_text(enforceable(schema, begins)))
                end = rest
    return "".join([*pieces, grammar[end:]])


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON that begins at the place, and where it ends; None where the library refuses it."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _brief(message: str, source: str) -> str:
    """The first line, and the reason that a regular expression is refused, without the words that
    they quote of the source; the other lines quote the grammar or the library's state.
    """
    first, *details = message.strip().splitlines() or [""]
    reasons = [line for line in details if line.startswith("error: ")]
    written = source + _unescaped(source)

    def redact(word: re.Match[str]) -> str:
        return "…" if word[0] in written and word[0] not in _KEYWORDS else word[0]

    # Cut first: a message may quote the whole source.
    return _WORD.sub(redact, "; ".join([first, *reasons[:1]])[:300])


def _unescaped(source: str) -> str:
    """A schema's text without escapes, as messages quote it; of other sources nothing."""
    try:
        return json.dumps(json.loads(source), ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
