"""The messages of a chat body, and what a chat template gets of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import MAX_NAME, ObjectsOf, StrictBody, TextPart, text_of

MAX_MESSAGES = 1024
MAX_CALLS = 128  # of one message
TEXT_TYPES = ("text", "input_text", "output_text")  # of parts; the latter two are of responses
THOUGHTS = "thinking"  # the type of a part, and where its text lies


# For the OpenAPI document; the validator checks the values.
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": [*TEXT_TYPES]}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


def _as_text(arguments: Any) -> Any:
    """Arguments that a client left out, or has as the object that their text says."""
    if arguments is None:
        return ""
    return orjson.dumps(arguments).decode() if isinstance(arguments, dict) else arguments


class CalledFunction(StrictBody):
    name: str = Field(max_length=MAX_NAME)
    arguments: Annotated[str, BeforeValidator(_as_text)] = ""


class ToolCall(StrictBody):
    id: str = Field(max_length=MAX_NAME)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(StrictBody):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema(_CONTENT), ObjectsOf(TextPart)] = None
    name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)
    function_call: CalledFunction | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _thoughts(cls, value: Any) -> Any:
        """The assistant's parts of thinking become its reasoning, where it has no other."""
        parts = value.get("content") if isinstance(value, dict) else None
        if not isinstance(parts, list) or value.get("role") != "assistant":
            return value
        thoughts = [text for part in parts if (text := _thought(part)) is not None]
        if not thoughts:
            return value
        rest = [part for part in parts if _thought(part) is None]
        fields = {**value, "content": rest or None}
        if not (value.get("reasoning") or value.get("reasoning_content")):
            fields["reasoning_content"] = "\n".join(thoughts)
        return fields

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any, info: ValidationInfo) -> str:
        own = info.data.get("role") == "assistant"
        return "" if value is None else text_of(value, *TEXT_TYPES, refusals=own)


def _thought(part: Any) -> str | None:
    text = part.get(THOUGHTS) if isinstance(part, dict) and part.get("type") == THOUGHTS else None
    return text if isinstance(text, str) else None


def for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Raises ApiError 400, which names the message. Calls and results in OpenAI's older form, which
    had one a turn and no ids, are those of tools.
    """
    open_call, answered = "", {message.tool_call_id for message in messages}
    by_name: dict[str, list[str]] = {}  # the ids of the last turn that called that function
    templated = []
    for place, message in enumerate(messages):
        path = f"messages.{place}"
        newer = message
        if message.function_call is not None:
            open_call = _id_of(place)
            newer = _with_call(path, message, open_call)
        elif message.role == "function":
            named = (each for each in by_name.get(message.name or "", ()) if each not in answered)
            call_id = next(named, open_call) or _id_of(place)
            answered.add(call_id)
            open_call = "" if call_id == open_call else open_call
            newer = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        calls = newer.tool_calls or ()
        by_name |= {call.function.name: [] for call in calls}
        for call in calls:
            by_name[call.function.name].append(call.id)
        templated.append(_templated(path, newer))
    return tuple(templated)


def _with_call(path: str, message: Message, call_id: str) -> Message:
    if message.tool_calls or message.role != "assistant":
        raise invalid(
            f"{path}.function_call",
            "is allowed only in a message of the assistant without tool_calls; send tool_calls",
        )
    call = ToolCall.model_construct(id=call_id, function=message.function_call)
    return message.model_copy(update={"tool_calls": [call]})


def _id_of(place: int) -> str:
    """Of a call that has none: nine letters or digits, as Mistral's templates want them."""
    return f"call{place:05d}"


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
