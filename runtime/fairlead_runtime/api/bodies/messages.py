"""The messages of a chat body, and what a chat template gets of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator

from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import MAX_NAME, ObjectsOf, StrictBody, TextPart, text_of

MAX_MESSAGES = 1024
MAX_CALLS = 128  # of one message


# For the OpenAPI document; the validator checks the values.
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


class CalledFunction(StrictBody):
    name: str = Field(max_length=MAX_NAME)
    arguments: str


class ToolCall(StrictBody):
    id: str = Field(max_length=MAX_NAME)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(StrictBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(_CONTENT), ObjectsOf(TextPart)] = None
    name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)
    reasoning: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any, info: ValidationInfo) -> str:
        own = info.data.get("role") == "assistant"
        return "" if value is None else text_of(value, "text", refusals=own)


def for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Raises ApiError 400, which names the message."""
    return tuple(_templated(f"messages.{place}", message) for place, message in enumerate(messages))


def characters(message: dict[str, Any]) -> int:
    """Characters of the texts in a message for the template."""
    functions = (call["function"] for call in message.get("tool_calls", ()))
    return (
        len(message["content"])
        + len(message.get("reasoning_content", ""))
        + sum(len(function["name"]) + len(function["arguments"]) for function in functions)
    )


def _templated(path: str, message: Message) -> dict[str, Any]:
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid(f"{path}.tool_call_id", "a tool's result needs the id of its call")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", "only a message of the assistant has tool calls")
    # Chat templates know "system"; "developer" is OpenAI's newer name for it.
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning  # the name that templates know
    return fields


def _call(call: ToolCall) -> dict[str, Any]:
    """Many clients and models write the arguments of a tool without parameters as empty text."""
    arguments = call.function.arguments
    function = {
        "name": call.function.name,
        "arguments": "{}" if not arguments.strip() else arguments,
    }
    return {"id": call.id, "type": "function", "function": function}
