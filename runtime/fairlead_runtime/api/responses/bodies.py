"""The body of ``/v1/responses``, and its meaning as a chat.

Owns the fields that only this route has. Everything else (sampling, tools, structured output) is
checked as a chat's, under the names that the client sent.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.refused_fields import (
    Refused,
    refuse_fields,
    unread,
    unsupported,
)
from fairlead_runtime.api.bodies.request_bodies import ChatBody, GenerationRequest
from fairlead_runtime.api.bodies.sent_names import SentNames, without_tags
from fairlead_runtime.api.bodies.tool_bodies import ALLOWED, MAX_TOOLS
from fairlead_runtime.api.responses.items import MAX_ITEMS, SILENT, Item, messages_of
from fairlead_runtime.api.responses.namespaces import (
    KIND,
    Placed,
    functions_of,
    is_search,
    joined,
    searches_in,
)
from fairlead_runtime.front.errors import ApiError, invalid
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody, Whole, check_model, validated
from fairlead_runtime.request.sequence import RequestError

MAX_METADATA = 16  # pairs, as OpenAI
LOGPROBS = "message.output_text.logprobs"  # in ``include``

_STORED = "nothing is stored: leave it out"
# Fields that need stored state, change the answer or have another name here.
_REFUSED: dict[str, Refused] = {
    "previous_response_id": Refused(instead=_STORED),
    "conversation": Refused(instead=_STORED),
    "store": Refused((False,), _STORED),
    "background": Refused((False,), _STORED),
    "prompt": Refused(instead=_STORED),
    "truncation": Refused(("disabled",)),
    "max_tool_calls": Refused(),
    "n": Refused((1,)),
    "messages": Refused(instead="send input"),
    "max_tokens": Refused(instead="send max_output_tokens"),
    "max_completion_tokens": Refused(instead="send max_output_tokens"),
    "response_format": Refused(instead="send text.format"),
    "reasoning_effort": Refused(instead="send reasoning.effort"),
    "logprobs": Refused((False,), f"send include with {LOGPROBS}"),
    "return_token_ids": Refused((False,)),
    "echo": Refused((False,)),
    "previous_response": Refused(instead=_STORED),
    "previous_input_messages": Refused(([],), "send input"),
    "context_management": Refused(([],)),
    "image": Refused(),
}
# What is in ``input`` has other places than the messages made of it.
_SENT = SentNames(
    (
        (re.compile(r"max(?:_completion)?_tokens"), "max_output_tokens"),
        (re.compile(r"(?:messages|prompt)\b.*"), "input"),
        (re.compile(r"reasoning_effort"), "reasoning.effort"),
        (re.compile(r"response_format(?:\.json_schema)?"), "text.format"),
        (re.compile(r"(tools\.\d+)\.function"), r"\1"),
    )
)
_ITEM = re.compile(r"(input\.\d+)\.(?:message|function_call_output|function_call|reasoning)\b")


class TextOptions(StrictBody):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


Items = Annotated[list[Item], Field(max_length=MAX_ITEMS)]


class ResponseBody(StrictBody):
    model: str | None = Field(default=None, max_length=MAX_NAME)  # None: the one that is served
    input: Items
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    text: TextOptions | None = None
    include: list[str] | None = Field(default=None, max_length=MAX_METADATA)
    top_logprobs: Whole | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    reasoning: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("input", mode="before", json_schema_input_type=str | Items)
    @classmethod
    def _input(cls, value: Any) -> Any:
        """Text alone is the user's message."""
        return [{"role": "user", "content": value}] if isinstance(value, str) else value


# What a chat refuses is refused here too, by the names of this table first.
_REFUSED_HERE = unsupported(ChatBody) | _REFUSED
# What is known beside the fields: those of a chat, and what changes no answer.
_KNOWN: Mapping[type, Collection[str]] = {**SILENT, ResponseBody: ChatBody.model_fields.keys()}


def response(body: Mapping[str, Any], served: str) -> GenerationRequest:
    """Raises ApiError 400, or 404 for a model other than ``served``, and RequestError."""
    check_model(body.get("model"), served)
    refuse_fields(body, (), _REFUSED)
    searches = searches_in(body.get("tools"))
    ignored = unread(ResponseBody, body, _REFUSED_HERE, _KNOWN, searches)
    try:
        parsed = validated(ResponseBody, body)
    except ApiError as error:
        raise without_tags(error, _ITEM) from None
    if not parsed.input:
        raise invalid("input", "is empty: send text or at least one item")
    tools = [*functions_of(parsed.tools or ())]
    paths = [
        (re.compile(rf"tools\.{place}\.function"), each.path) for place, each in enumerate(tools)
    ]
    try:
        request = request_bodies.chat(_as_chat(body, parsed, tools), served)
    except ApiError as error:
        raise SentNames((*paths, *_SENT.places)).renamed(error) from None
    except RequestError as error:
        raise error.renamed({error.param: _SENT.name(error.param)}) from None
    names = {"max_tokens": "max_tokens", "messages": "messages", **request.sent_names}
    sent_names = {name: _SENT.name(of_chat) for name, of_chat in names.items()}
    echo = _echo(body, parsed, request)
    return replace(request, sent_names=sent_names, echo=echo, ignored=ignored)


def _as_chat(
    body: Mapping[str, Any], parsed: ResponseBody, tools: Sequence[Placed]
) -> dict[str, Any]:
    response_fields = {*ResponseBody.model_fields, *_REFUSED}
    shared = {name: value for name, value in body.items() if name not in response_fields}
    wants_logprobs = LOGPROBS in (parsed.include or ())
    return {
        **shared,
        "messages": messages_of(parsed.input, parsed.instructions),
        "max_completion_tokens": parsed.max_output_tokens,
        "tools": [_tool(each) for each in tools],
        "tool_choice": _choice(parsed.tool_choice),
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "response_format": _format(parsed.text),
        "reasoning_effort": (parsed.reasoning or {}).get("effort"),
        "logprobs": wants_logprobs or None,
        "top_logprobs": parsed.top_logprobs if wants_logprobs else None,
    }


def _tool(placed: Placed) -> dict[str, Any]:
    """A chat has the fields of a function one level deeper."""
    function = {name: value for name, value in placed.tool.items() if name != "type"}
    if "name" in function:
        function["name"] = placed.name
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if choice in (None, "none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        tools = choice.get("tools")
        named = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": ALLOWED, ALLOWED: {"mode": choice.get("mode"), "tools": named}}
    if not isinstance(choice, dict) or choice.get("type") != "function" or "name" not in choice:
        raise invalid(
            "tool_choice",
            'must be "none", "auto", "required", {"type": "function", "name": ...} or '
            '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
        )
    name, namespace = choice["name"], choice.get(KIND)
    if isinstance(name, str) and isinstance(namespace, str):
        name = joined(namespace, name)
    return {"type": "function", "function": {"name": name}}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    chosen = text.format if text is not None else None
    if chosen is None or chosen.get("type") != "json_schema":
        return chosen
    schema = {name: value for name, value in chosen.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _echo(
    body: Mapping[str, Any], parsed: ResponseBody, request: GenerationRequest
) -> dict[str, Any]:
    """What the answer repeats of the request."""
    return {
        "instructions": parsed.instructions,
        "max_output_tokens": parsed.max_output_tokens,
        "metadata": parsed.metadata or {},
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": parsed.reasoning or {"effort": None, "summary": None},
        "store": False,
        "background": False,
        "temperature": request.params.temperature,
        "text": {"format": (parsed.text and parsed.text.format) or {"type": "text"}},
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [
            tool
            if tool["type"] == KIND or is_search(tool)
            else {"strict": None, "parameters": None, **tool}
            for tool in parsed.tools or ()
        ],
        "top_p": request.params.top_p,
        "top_logprobs": parsed.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.get("user"),
    }
