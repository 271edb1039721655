"""Which formats a model's calls and reasoning have, and the parser of one choice.

Owns the names of ``--tool-call-parser`` and ``--reasoning-parser``, how a format is recognized in a
chat template, and which special tokens are marks of a format and so must be text.
"""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairlead_runtime.api.tools.forced import NamedParser, RequiredParser
from fairlead_runtime.api.tools.hermes import HermesParser
from fairlead_runtime.api.tools.llama import LlamaParser
from fairlead_runtime.api.tools.marked import MarkedParser, NewId
from fairlead_runtime.api.tools.mistral import MistralParser
from fairlead_runtime.api.tools.parts import Parser, Part, PlainParser
from fairlead_runtime.api.tools.reasoning import BEGIN, END, ReasoningParser
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.models.chat import template_text
from fairlead_runtime.request.structured import Reasoning

_ALPHANUMERIC = string.ascii_letters + string.digits


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates refuse any other id in the next turn."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of calls. ``marks``: its marks that are special tokens in some tokenizers."""

    name: str
    parser: Callable[[frozenset[str], NewId], MarkedParser]
    recognized: Callable[[str], bool]  # in a chat template
    marks: tuple[str, ...]
    new_id: NewId = _new_id


# Qwen3-Coder and GLM have the tags of Hermes around another format.
_OTHER_HERMES = ("<function=", "<arg_key>")
HERMES = ToolFormat(
    "hermes",
    HermesParser,
    lambda template: "<tool_call>" in template and not any(x in template for x in _OTHER_HERMES),
    ("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(
    "llama3_json",
    LlamaParser,
    lambda template: '"parameters": dictionary of argument name' in template,
    ("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    "mistral",
    MistralParser,
    lambda template: "[TOOL_CALLS]" in template,
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    _mistral_id,
)
TOOL_FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The formats of one model. ``tools`` None: its calls are not known. ``reasoning``: the name of
    the reasoning's format, "" for none. ``special``: ids of the tokenizer's special tokens, by
    text.
    """

    tools: ToolFormat | None = None
    reasoning: str = ""
    special: tuple[tuple[str, int], ...] = ()

    def check(self, uses: "ToolUse") -> None:
        """Raises ApiError 400 for tools whose calls could not be read."""
        if uses.names and not uses.required and uses.forced is None and self.tools is None:
            raise invalid(
                "tools",
                "how this model writes its calls is not known; set tool_choice to required, or "
                "start the server with --tool-call-parser",
                "unsupported_parameter",
            )

    def shown_ids(self, *, tools: bool) -> frozenset[int]:
        """Special tokens that are text for the parsers of a request with or without tools."""
        marks = {BEGIN, END} if self.reasoning else set()
        if tools and self.tools is not None:
            marks |= {*self.tools.marks}
        return frozenset(token for text, token in self.special if text in marks)

    def parser(self, uses: "ToolUse", *, prompt_end: str, show_reasoning: bool) -> Parser:
        """The parser of one choice. ``prompt_end``: the last characters of the prompt."""
        answer = self._answer_parser(uses)
        if not self.reasoning:
            return answer
        inside = self.begins_inside(prompt_end)
        return ReasoningParser(answer, inside=inside, show=show_reasoning)

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether an answer begins within reasoning, so that what the request asks for begins
        after its end.
        """
        if not self.reasoning or prompt_end.rstrip().endswith(END):
            return False
        return self.reasoning == "deepseek_r1" or prompt_end.rstrip().endswith(BEGIN)

    def bounded(self, prompt_end: str, most: int) -> Reasoning:
        """Reasoning of at most so many tokens after a prompt that ends so. Raises ApiError 400
        where the reasoning of the model is not known.
        """
        if not self.reasoning:
            raise invalid(
                "thinking_token_budget",
                "this model is not known to reason; leave it out, or start the server with "
                "--reasoning-parser",
                "unsupported_parameter",
            )
        begin = "" if self.begins_inside(prompt_end) else BEGIN
        return Reasoning(most=most, end=END, begin=begin)

    def _answer_parser(self, uses: "ToolUse") -> Parser:
        """The parser of what follows the reasoning."""
        new_id = self.tools.new_id if self.tools is not None else _new_id
        if uses.forced is not None:
            return uses.limited(NamedParser(uses.forced, new_id))
        if uses.required:
            return uses.limited(RequiredParser(uses.names, new_id))
        if uses.names and self.tools is not None:
            return uses.limited(self.tools.parser(uses.names, new_id))
        return PlainParser()


PLAIN = ReplyFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request lets the model call: the ``names`` of tools. ``forced``: the one that it must
    call; ``required``: it must call one or more. ``parallel``: more than one call is allowed.
    """

    names: frozenset[str] = frozenset()
    forced: str | None = None
    required: bool = False
    parallel: bool = True

    def limited(self, parser: Parser) -> Parser:
        return parser if self.parallel else FirstCallOnly(parser)


class FirstCallOnly:
    """Drops all calls but the first."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Part]:
        return self._first(self._parser.feed(text))

    def finish(self) -> list[Part]:
        return self._first(self._parser.finish())

    def _first(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if not getattr(part, "index", 0)]


def reply_format(tokenizer: Any, *, tool_call_parser: str, reasoning_parser: str) -> ReplyFormat:
    """The formats by name; "auto": recognized from the chat template, "none": text is text."""
    template = template_text(tokenizer)
    tools = TOOL_FORMATS.get(tool_call_parser)
    if tool_call_parser == "auto":
        tools = next((form for form in TOOL_FORMATS.values() if form.recognized(template)), None)
    reasoning = {"none": "", "auto": "qwen3" if END in template else ""}
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return ReplyFormat(
        tools=tools,
        reasoning=reasoning.get(reasoning_parser, reasoning_parser),
        special=tuple((str(text), int(token)) for text, token in special),
    )
