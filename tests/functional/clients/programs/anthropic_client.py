"""Ask the server at argv[1] with Anthropic's client for Python; print what it understood. What no
other client knows (blocks, counts, its own classes of errors) is compared here.
"""

import json
import sys
from typing import Any

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

TOOL = json.loads(sys.argv[2])
SAIL = {"name": TOOL["function"]["name"], "input_schema": TOOL["function"]["parameters"]}
ASKED: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
client = anthropic.Anthropic(
    base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0
)


def fields(**more: Any) -> dict[str, Any]:
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": "tiny", "messages": ASKED, "max_tokens": 12, **greedy, **more}


whole = client.messages.create(**fields())
Message.model_validate(whole.model_dump(), strict=True)
assert [block.type for block in whole.content] == ["text"]
assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
asked = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
counted = client.messages.count_tokens(model="tiny", messages=ASKED)
assert counted.input_tokens == asked

raw = list(client.messages.create(stream=True, **fields()))
for event in raw:
    EVENT.validate_python(event.model_dump(), strict=True)
assert (raw[0].type, raw[-2].type, raw[-1].type) == (
    "message_start",
    "message_delta",
    "message_stop",
)
with client.messages.stream(**fields()) as stream:
    texts = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(texts) == final.content[0].text
assert final.usage.output_tokens == 12
assert final.stop_reason == whole.stop_reason

# A round with a tool: its call, streamed and whole, then its result.
with_tool: dict[str, Any] = {
    "tools": [SAIL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 400,
}
called = client.messages.create(**fields(**with_tool))
(call,) = called.content
assert called.stop_reason == "tool_use"
with client.messages.stream(**fields(**with_tool)) as stream:
    (streamed_call,) = stream.get_final_message().content
assert (streamed_call.name, streamed_call.input) == (call.name, call.input)
result = {"type": "tool_result", "tool_use_id": call.id, "content": "It sails."}
turns = [*ASKED, called.to_param(), {"role": "user", "content": [result]}]
told = client.messages.create(**fields(messages=turns, tools=[SAIL], system="Be brief."))
assert told.content

form = {"type": "json_schema", "schema": SAIL["input_schema"]}
parsed = client.messages.create(**fields(output_config={"format": form}, max_tokens=400))
assert isinstance(json.loads(parsed.content[0].text)["far"], bool)


def refusal(**more: Any) -> Any:
    """The error of the client's that a request is refused with; None for an answer."""
    try:
        client.messages.create(**fields(**more))
    except anthropic.APIStatusError as error:
        return error
    return None


other = refusal(model="of-nobody")
long = refusal(messages=[{"role": "user", "content": "sea " * 9000}])
slip = refusal(extra_body={"n": 99})
for refused, kind in ((other, "not_found_error"), (long, "invalid_request_error")):
    assert (refused.type, refused.body["type"]) == (kind, "error")
    assert refused.request_id == refused.body["request_id"]
assert isinstance(other, anthropic.NotFoundError)
assert isinstance(long, anthropic.BadRequestError)
assert "prompt is too long" in long.api_message
found = {
    "whole": whole.content[0].text,
    "streamed": "".join(texts),
    "usage": asked + whole.usage.output_tokens,
    "streamed_usage": asked + final.usage.output_tokens,
    "call": call.name,
    "arguments": json.dumps(call.input),
    "text": None,
    "error": slip.api_message,
}
print(json.dumps(found))
