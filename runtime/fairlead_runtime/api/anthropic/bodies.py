"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and their meaning as a chat.

Owns the fields that only these routes have. Everything else (sampling, tools, structured output) is
checked as a chat's, under the names that the client sent.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import FailFast, Field

from fairlead_runtime.api.anthropic.blocks import SILENT, TAGS, Texts, Turn, continued, messages_of
from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.messages import MAX_MESSAGES
from fairlead_runtime.api.bodies.refused_fields import (
    Refused,
    refuse_fields,
    unread,
    unsupported,
)
from fairlead_runtime.api.bodies.request_bodies import ChatBody, GenerationRequest
from fairlead_runtime.api.bodies.sent_names import SentNames, without_tags
from fairlead_runtime.api.bodies.tool_bodies import MAX_TOOLS
from fairlead_runtime.front.errors import ApiError, invalid
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody, Whole, check_model, validated
from fairlead_runtime.request.sequence import RequestError

MOST_TEMPERATURE = 1  # of a request, in Anthropic's API

# Fields that need another server, change the answer or have another name here.
_REFUSED: dict[str, Refused] = {
    "mcp_servers": Refused(([],), "call the tools of MCP servers from your client"),
    "container": Refused(),
    "prompt": Refused(instead="send messages"),
    "output_format": Refused(instead="send output_config.format"),
    "n": Refused((1,)),
    "stop": Refused(([],), "send stop_sequences"),
    "max_completion_tokens": Refused(instead="send max_tokens"),
    "response_format": Refused(instead="send output_config.format"),
    "reasoning_effort": Refused(instead="send output_config.effort or thinking"),
    "parallel_tool_calls": Refused((True,), "send tool_choice.disable_parallel_tool_use"),
    "functions": Refused(([],), "send tools"),
    "logprobs": Refused((False,)),
    "top_logprobs": Refused((0,)),
    "prompt_logprobs": Refused(),
    "echo": Refused((False,)),
    "thinking_token_budget": Refused((-1,), "send thinking.budget_tokens"),
    "return_token_ids": Refused((False,)),
    "continue_final_message": Refused((False,), "end messages with a turn of the assistant"),
    "add_generation_prompt": Refused((True,)),
}
# Fields about billing, caches and places that this server does not have; they change no answer.
IGNORED = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "service_tier",
        "speed",
        "stream_options",
        "user_profile_id",
        "workspace_id",
    }
)
# Of a tool, likewise.
SILENT_IN_TOOLS = frozenset(
    {
        "allowed_callers",
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
        "strict",
    }
)
# What is in ``messages`` has other places than the messages made of it.
_SENT = SentNames(
    (
        (re.compile(r"(?:messages|prompt|continue_final_message)\b.*"), "messages"),
        (re.compile(r"stop"), "stop_sequences"),
        (re.compile(r"user"), "metadata.user_id"),
        (re.compile(r"thinking_token_budget"), "thinking.budget_tokens"),
        (re.compile(r"reasoning_effort"), "output_config.effort"),
        (re.compile(r"response_format(?:\.json_schema)?"), "output_config.format"),
        (re.compile(r"(tools\.\d+)\.function\.parameters"), r"\1.input_schema"),
        (re.compile(r"(tools\.\d+)\.function"), r"\1"),
    )
)
_TAG = re.compile(rf"(messages\.\d+\.content\.\d+)\.(?:{TAGS})\b")
_OF_CHATS = {"temperature", "top_p", "top_k", "stream"}  # by the same name
_THINKS = ("enable_thinking", "thinking")  # the names that templates read


class Metadata(StrictBody):
    user_id: str | None = Field(default=None, max_length=MAX_NAME)


class MessageTool(StrictBody):
    """A tool of the client's. Anthropic's own have other types and no schema."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=MAX_NAME)
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: str | None = Field(default=None, max_length=MAX_NAME)
    format: OutputFormat | None = None


class CountBody(StrictBody):
    model: str | None = Field(default=None, max_length=MAX_NAME)  # None: the one that is served
    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[MessageTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    max_tokens: Whole = Field(ge=1)
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    stream: bool | None = None
    metadata: Metadata | None = None


BodyT = TypeVar("BodyT", bound=CountBody)

# What a chat refuses is refused here too, by the names of this table first.
_REFUSED_HERE = unsupported(ChatBody) | _REFUSED
# What is known beside the fields: those of a chat, and what changes no answer.
_KNOWN: Mapping[type, Collection[str]] = {
    **SILENT,
    MessageTool: SILENT_IN_TOOLS,
    MessagesBody: {*IGNORED, *ChatBody.model_fields},
}


def check_sent(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for a temperature that Anthropic's API does not have. ``body``: as it was
    sent, without the model's own values, which may be larger.
    """
    sent = body.get("temperature")
    if isinstance(sent, (int, float)) and sent > MOST_TEMPERATURE:
        raise invalid("temperature", f"must be from 0 to {MOST_TEMPERATURE}")


def message(body: Mapping[str, Any], served: str) -> GenerationRequest:
    """A body of ``/v1/messages``. Raises ApiError 400, or 404 for a model other than ``served``,
    and RequestError.
    """
    parsed = _parsed(MessagesBody, body, served)
    metadata = parsed.metadata
    own = {
        "max_tokens": parsed.max_tokens,
        "stop": parsed.stop_sequences,
        "user": metadata.user_id if metadata is not None else None,
    }
    request = _request(body, parsed, own, served)
    thinking = parsed.thinking
    echo = {
        "max_tokens": parsed.max_tokens,
        "thinking": thinking is None or thinking.display != "omitted",
    }
    return replace(request, clips_tokens=True, running_usage=True, echo=echo)


def counted(body: Mapping[str, Any], served: str) -> GenerationRequest:
    """A body of ``/v1/messages/count_tokens``, which may be one of ``/v1/messages``. Raises as
    ``message`` does.
    """
    return _request(body, _parsed(CountBody, body, served), {}, served)


def _parsed(kind: type[BodyT], body: Mapping[str, Any], served: str) -> BodyT:
    check_model(body.get("model"), served)
    refuse_fields(body, (), _REFUSED)
    try:
        return validated(kind, body)
    except ApiError as error:
        raise without_tags(error, _TAG) from None


def _request(
    body: Mapping[str, Any], parsed: CountBody, own: Mapping[str, Any], served: str
) -> GenerationRequest:
    """``own``: the chat's fields that ``/v1/messages`` has under other names."""
    names = {*MessagesBody.model_fields, *_REFUSED, *IGNORED} - _OF_CHATS
    shared = {name: value for name, value in body.items() if name not in names}
    ignored = unread(MessagesBody, body, _REFUSED_HERE, _KNOWN)
    chat = {**shared, **_as_chat(body, parsed), **own}
    try:
        request = request_bodies.chat(chat, served)
    except ApiError as error:
        raise _SENT.renamed(error) from None
    except RequestError as error:
        raise error.renamed({error.param: _SENT.name(error.param)}) from None
    chat_names = {name: name for name in ("messages", "stop", "continue_final_message")}
    if not body.get("chat_template_kwargs"):
        chat_names["chat_template_kwargs"] = "thinking"
    chat_names |= {"reasoning_effort": "reasoning_effort", **request.sent_names}
    sent_names = {name: _SENT.name(of_chat) for name, of_chat in chat_names.items()}
    return replace(request, sent_names=sent_names, ignored=ignored)


def _as_chat(body: Mapping[str, Any], parsed: CountBody) -> dict[str, Any]:
    messages = messages_of(parsed.messages, parsed.system)
    last = messages[-1]
    goes_on = continued(messages)
    if last["role"] == "assistant" and not goes_on and len(messages) > 1:
        messages.pop()  # it says nothing
    choice = parsed.tool_choice
    output = parsed.output_config
    thinking = parsed.thinking
    return {
        "messages": messages,
        "continue_final_message": goes_on or None,
        "tools": [_tool(place, tool) for place, tool in enumerate(parsed.tools or ())],
        "tool_choice": _choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "response_format": _format(output),
        "reasoning_effort": output.effort if output is not None else None,
        "chat_template_kwargs": _thinks(thinking, body.get("chat_template_kwargs")),
        "thinking_token_budget": _budget(thinking),
        "include_reasoning": thinking is None or thinking.type != "disabled",
    }


def _tool(place: int, tool: MessageTool) -> dict[str, Any]:
    if tool.type not in {None, "custom"}:
        raise invalid(
            f"tools.{place}.type",
            'must be "custom" or left out: no tool is built in or runs on this server',
            "unsupported_parameter",
        )
    if tool.input_schema is None:
        raise invalid(
            f"tools.{place}.input_schema",
            "is missing: send a JSON schema",
            "missing_required_parameter",
        )
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "is missing: name the tool", "missing_required_parameter")
    return {"type": "function", "function": {"name": choice.name}}


def _format(output: OutputConfig | None) -> dict[str, Any] | None:
    if output is None or output.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": output.format.definition}}


def _budget(thinking: Thinking | None) -> int | None:
    if thinking is None or thinking.type == "disabled":
        return None
    return thinking.budget_tokens


def _thinks(thinking: Thinking | None, kwargs: Any) -> Any:
    """What the template reads of ``thinking``: nothing where it is left out. The body's own
    ``kwargs``, of any type here, count first.
    """
    if thinking is None or not (kwargs is None or isinstance(kwargs, dict)):
        return kwargs
    return dict.fromkeys(_THINKS, thinking.type != "disabled") | (kwargs or {})
