"""The input of a response: items, and the chat messages that they mean."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator

from fairlead_runtime.api.responses.namespaces import joined
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody, text_of

MAX_ITEMS = 1024
TEXT_TYPES = ("input_text", "output_text", "text")  # of parts
Name = Annotated[str, Field(max_length=MAX_NAME)]


# For the OpenAPI document; the validators check the values.
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": list(TEXT_TYPES)},
                    "text": {"type": "string"},
                },
                "required": ["type", "text"],
            },
        },
    ]
}


class MessageItem(StrictBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, WithJsonSchema(_TEXT)]

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any, info: ValidationInfo) -> str:
        own = info.data.get("role") == "assistant"
        return text_of(value, *TEXT_TYPES, refusals=own)


class CallItem(StrictBody):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: str


class ResultItem(StrictBody):
    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[Any, WithJsonSchema(_TEXT)]

    @field_validator("output")
    @classmethod
    def _output(cls, value: Any) -> str:
        return text_of(value, *TEXT_TYPES)


class ReasoningPart(StrictBody):
    text: str


class ReasoningItem(StrictBody):
    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


# What our own answers and OpenAI's have in items beside the fields, and changes no answer.
_OF_ALL = frozenset({"id", "status"})
SILENT: dict[type, frozenset[str]] = {
    MessageItem: _OF_ALL | {"phase"},
    CallItem: _OF_ALL,
    ResultItem: _OF_ALL,
    ReasoningItem: _OF_ALL | {"summary", "encrypted_content"},
    ReasoningPart: frozenset({"type"}),
}


def _kind(value: Any) -> str | None:
    """The item's type; a message may leave it out."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message=(
            "must be a message, a function_call, a function_call_output or a reasoning item; "
            "stored items and other media are not supported"
        ),
    ),
]


def messages_of(items: list[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls that follow each other are one message of the
    assistant.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                open_message = _assistant(messages, closed_by=("content", "tool_calls"))
                open_message["content"] = item.content
            case MessageItem():
                messages.append({"role": item.role, "content": item.content})
            case CallItem():
                name = joined(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case ResultItem():
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                )
            case ReasoningItem():
                text = "".join(part.text for part in item.content or ())
                closed_by = ("reasoning_content", "content", "tool_calls")
                _assistant(messages, closed_by=closed_by)["reasoning_content"] = text
    return messages


def _assistant(
    messages: list[dict[str, Any]], *, closed_by: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The assistant's last message, or a new one where that has what comes first in a message."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(field in last for field in closed_by):
        messages.append({"role": "assistant"})
    return messages[-1]
