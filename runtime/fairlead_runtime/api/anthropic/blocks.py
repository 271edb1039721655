"""The turns of a Messages body, blocks of content, and the chat messages that they mean."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag

from fairlead_runtime.api.bodies.messages import MAX_CALLS
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody, refuse_media

MAX_BLOCKS = 1024  # of one content
# Claude Code's first block of ``system``. It is for the server that bills, and changes with each
# request: in the prompt it would leave nothing of the prefix cache.
BILLING = "x-anthropic-billing-header:"
FAILED = "Error: "  # before the result of a call that failed: templates have no other place for it
THOUGHTS = "reasoning_content"  # of a message; a list of texts until all turns are read
Name = Annotated[str, Field(max_length=MAX_NAME)]
Fields = dict[str, Any]


class TextBlock(StrictBody):
    type: Literal["text"]
    text: str


class ThinkingBlock(StrictBody):
    """``signature`` is not looked at: only Anthropic's own could be checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictBody):
    """Nobody but Anthropic can read it: it says nothing."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(StrictBody):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


def _refuse_others(value: Any) -> Any:
    """Raises ValueError for the blocks of other media and of Anthropic's own servers."""
    refuse_media(value)
    return value


def _listed(content: Any) -> Any:
    """Text alone is one block of it."""
    if not isinstance(content, str | list):
        raise ValueError("must be text or a list of blocks")  # noqa: TRY004 - pydantic's own
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


_OTHER = (
    "must be a block of the type text, thinking, redacted_thinking, tool_use or tool_result; what "
    "tools of a server did and other media are not supported"
)

TextOnly = Annotated[TextBlock, BeforeValidator(_refuse_others)]
Texts = Annotated[
    list[TextOnly],
    Field(max_length=MAX_BLOCKS),
    BeforeValidator(_listed, json_schema_input_type=str | list[TextOnly]),
]


class ToolResultBlock(StrictBody):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind, custom_error_type="block", custom_error_message=_OTHER),
    BeforeValidator(_refuse_others),
]
TAGS = "text|thinking|redacted_thinking|tool_use|tool_result"
Content = Annotated[
    list[Block],
    Field(max_length=MAX_BLOCKS),
    BeforeValidator(_listed, json_schema_input_type=str | list[Block]),
]


# What clients and our own answers have in blocks beside the fields, and changes no answer.
SILENT: dict[type, frozenset[str]] = {
    TextBlock: frozenset({"cache_control", "citations"}),
    ThinkingBlock: frozenset({"signature"}),
    RedactedThinkingBlock: frozenset({"data"}),
    ToolUseBlock: frozenset({"cache_control", "caller"}),
    ToolResultBlock: frozenset({"cache_control"}),
}


class Turn(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: Content


# The blocks that each role may have.
_OF_ROLES: dict[str, tuple[type[StrictBody], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def messages_of(turns: Sequence[Turn], system: Sequence[TextBlock] | None) -> list[Fields]:
    """Chat messages, whose contents are parts of text. Turns of one role that follow each other are
    one message, and each result of a call is one of its own. Raises ApiError 400 for a block that
    its role cannot have.
    """
    messages: list[Fields] = []
    told = [block for block in system or () if not block.text.startswith(BILLING)]
    if told:
        messages.append({"role": "system", "content": [_part(block.text) for block in told]})
    for place, turn in enumerate(turns):
        for number, block in enumerate(turn.content):
            if not isinstance(block, _OF_ROLES[turn.role]):
                path = f"messages.{place}.content.{number}"
                raise invalid(path, f"a turn of the {turn.role} cannot have a block of this type")
        if turn.role == "assistant":
            _add_answer(_open(messages, "assistant"), turn, f"messages.{place}")
        else:
            _add_words(messages, turn)
    for message in messages:
        if THOUGHTS in message:
            message[THOUGHTS] = "".join(message[THOUGHTS])
    return messages


def continued(messages: Sequence[Fields]) -> bool:
    """Whether the answer goes on with the last message, as Anthropic's API says of a last turn of
    the assistant. Raises ApiError 400 for calls there that have no result.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise invalid("messages", "the last tool_use has no result: send its tool_result")
    return any(part["text"] for part in last["content"])


def _add_words(messages: list[Fields], turn: Turn) -> None:
    """The texts and results of a user's turn, or of a system's, in their order."""
    if not turn.content:
        _open(messages, turn.role)
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            content = list(_result(block))
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            _open(messages, turn.role)["content"].append(_part(block.text))


def _add_answer(message: Fields, turn: Turn, path: str) -> None:
    calls = message.get("tool_calls", [])
    for block in turn.content:
        match block:
            case TextBlock():
                message["content"].append(_part(block.text))
            case ThinkingBlock():
                message.setdefault(THOUGHTS, []).append(block.thinking)
            case ToolUseBlock():
                arguments = orjson.dumps(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
    if len(calls) > MAX_CALLS:
        raise invalid(f"{path}.content", f"has more than {MAX_CALLS} blocks of tool_use")
    if calls:
        message["tool_calls"] = calls


def _open(messages: list[Fields], role: str) -> Fields:
    """The last message where it is of this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _result(block: ToolResultBlock) -> Iterator[Fields]:
    texts = [each.text for each in block.content or ()]
    if block.is_error:
        texts = [FAILED + "".join(texts[:1]), *texts[1:]]
    return map(_part, texts)


def _part(text: str) -> Fields:
    return {"type": "text", "text": text}
