"""What the output of a request must look like: one JSON schema, regular expression, list of choices
or grammar, as a plain value.

Owns the value's shape, which is vLLM's, and the bounds that can be checked without compiling it.
Compiles nothing and imports no library: ``fairlead_runtime.grammar`` does.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]

MAX_SOURCE = 64 * 1024  # bytes of a schema, of all choices or of a grammar
MAX_REGEX = 4 * 1024  # bytes
MAX_CHOICES = 10_000
MAX_DEPTH = 32  # levels of lists and objects in a schema

# Between two tokens of JSON: at most one line break and 16 blanks. With unbounded white space small
# models write blanks until max_tokens.
WHITE_SPACE = r"(\r?\n)?[ \t]{0,16}"

PARAM = "structured_outputs"  # the field of SamplingParams
TOO_COMPLEX = (
    "the grammar became too complex to follow: simplify its patterns, counts or alternatives"
)


class StructuredOutputsError(ValueError):
    """The value is invalid. ``field`` is the part of it that is wrong, "" for the whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one field is set; the names are those of vLLM's ``StructuredOutputsParams``.

    ``json``: a JSON schema, as text or as the parsed object (kept as text; the order of its
    properties is the order of the output). ``json_object``: any JSON object. ``regex``: the whole
    output matches it (syntax of Rust's ``regex``). ``choice``: the output is one of these texts.
    ``grammar``: a context-free grammar, in Lark's syntax as llguidance extends it, or in
    llama.cpp's GBNF. Raises StructuredOutputsError.

    A grammar can hold schemas (``%json {...}``), expressions, alternatives and fixed text, which is
    how an answer in a format of its own is enforced, for example tool calls. ``schema_rule``
    and ``text_rule`` write such parts: ``f"start: {text_rule(before)} {schema_rule(schema)}"``.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    compiled_bytes: int = 0  # memory that the compiled form takes; known once it was checked
    enforced: str = ""  # what is compiled in place of the source; known once it was checked
    compact: bool = False  # JSON of a schema has one form of white space, that of json.dumps
    reasoning_end: str = ""  # the model reasons up to this mark, and then begins the output

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise StructuredOutputsError(
                "", f"set exactly one of {', '.join(KINDS)}, not {len(kinds)} of them"
            )
        _CHECKS[kinds[0]](self)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Read the value itself or a mapping of the same fields; fields that are None or False
        count as left out.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise StructuredOutputsError("", f"must be an object with one of {', '.join(KINDS)}")
        known = {field.name for field in fields(cls)}
        kinds = {name: kind for name, kind in value.items() if kind not in (None, False)}
        for name in kinds:
            if name not in known:
                raise StructuredOutputsError(str(name)[:64], "is not supported: leave it out")
        return cls(**kinds)

    @property
    def kind(self) -> Kind:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The schema, the expression, the choices as a JSON list, or the grammar."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        return str(self.json or self.regex or self.grammar or "")

    @property
    def digest(self) -> str:
        """Equal for values whose outputs compile to the same."""
        form = "compact " if self.compact else ""
        return hashlib.sha256(f"{form}{self.kind}\0{self.source}".encode()).hexdigest()

    def checked(self, compiled_bytes: int, enforced: str = "") -> Self:
        """The value with the memory that its compiled form takes, and what is compiled in place of
        its source; empty for the source.
        """
        return self._with(compiled_bytes=compiled_bytes, enforced=enforced)

    def after_reasoning(self, end: str) -> Self:
        """The value for a model whose prompt has begun its reasoning, which ``end`` closes."""
        return self._with(reasoning_end=end)

    def _with(self, **values: object) -> Self:
        changed = copy.copy(self)  # ``replace`` would check its text again
        for field, value in values.items():
            object.__setattr__(changed, field, value)
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A model may reason for at most ``most`` tokens; then ``end``, the closing mark, is all that
    it may write. ``begin``: the mark with which it begins to reason, if it does; "" where the
    prompt has begun it.
    """

    most: int
    end: str
    begin: str = ""


KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")


def schema_rule(schema: Mapping[str, Any]) -> str:
    """A part of a Lark rule: a JSON value of ``schema``, with bounded white space. Raises
    StructuredOutputsError for a schema outside the bounds of ``json``.
    """
    return f"%json {_schema_text({**schema, 'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


def text_rule(text: str) -> str:
    """A part of a Lark rule, or of a terminal: exactly ``text``, which is not empty. The model may
    spell it with any tokens but special ones; ``<|name|>`` outside of quotes is a special token.
    """
    # Lark's strings are JSON's, but for DEL.
    return json.dumps(text).replace("\x7f", "\\u007f")


def _schema_text(schema: Any) -> str:
    """A schema, given as text or parsed, as text without spaces."""
    if isinstance(schema, str):
        _check_size("json", schema, MAX_SOURCE)
        _check_depth(schema)
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise StructuredOutputsError("json", f"is not JSON: {error}"[:200]) from None
    if not isinstance(schema, Mapping):
        raise StructuredOutputsError("json", "must be a JSON schema, which is an object")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise StructuredOutputsError("json", f"is not JSON: {error}"[:200]) from None
    _check_size("json", text, MAX_SOURCE)
    _check_depth(text)
    return text


def _check_depth(text: str) -> None:
    depth, quoted, escaped = 0, False, False
    for character in text:
        if quoted:
            quoted, escaped = escaped or character != '"', character == "\\" and not escaped
        elif character == '"':
            quoted, escaped = True, False
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise StructuredOutputsError(
                    "json", f"is nested more than {MAX_DEPTH} deep: use $defs and $ref"
                )
        elif character in "]}":
            depth -= 1


def _check_size(field: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise StructuredOutputsError(field, f"is not valid Unicode text: {error.reason}") from None
    if size > limit:
        raise StructuredOutputsError(field, f"has {size} bytes; at most {limit} are allowed")


def _check_json(value: StructuredOutputs) -> None:
    object.__setattr__(value, "json", _schema_text(value.json))


def _check_json_object(value: StructuredOutputs) -> None:
    if value.json_object is not True:
        raise StructuredOutputsError("json_object", "must be true or false")


def _check_regex(value: StructuredOutputs) -> None:
    _check_size("regex", _text("regex", value.regex), MAX_REGEX)


def _check_grammar(value: StructuredOutputs) -> None:
    grammar = _text("grammar", value.grammar)
    _check_size("grammar", grammar, MAX_SOURCE)
    if grammar.lstrip().startswith("{"):
        raise StructuredOutputsError(
            "grammar", "is JSON: give a grammar in Lark's syntax or GBNF, or a schema as json"
        )


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise StructuredOutputsError(field, "must be a text that is not empty")
    return value


def _check_choice(value: StructuredOutputs) -> None:
    choices: Any = value.choice
    if (
        not isinstance(choices, list | tuple)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise StructuredOutputsError("choice", "must be a list of texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise StructuredOutputsError(
            "choice", f"has {len(choices)} texts; at most {MAX_CHOICES} are allowed"
        )
    _check_size("choice", "".join(choices), MAX_SOURCE)
    object.__setattr__(value, "choice", tuple(choices))


_CHECKS = {
    "json": _check_json,
    "json_object": _check_json_object,
    "regex": _check_regex,
    "choice": _check_choice,
    "grammar": _check_grammar,
}
