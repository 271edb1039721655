"""Ask the server at argv[1] with openai-python; print what it understood. What the other clients do
not know (responses, parsed answers, log-probabilities, streamed tools) is compared here.
"""

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

TOOL = json.loads(sys.argv[2])
ASKED = [{"role": "user", "content": "Tell me about the sea."}]
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


class Boat(BaseModel):
    sails: bool


def ask(**fields: Any) -> Any:
    settings = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**settings | fields)


whole = ask(logprobs=True, top_logprobs=2)
message = whole.choices[0].message.content
tokens = whole.choices[0].logprobs.content
assert "".join(token.token for token in tokens) == message
assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens), "greedy"

chunks = list(ask(stream=True, stream_options={"include_usage": True}))
asked_tool: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 400,
}
call = ask(**asked_tool).choices[0].message.tool_calls[0].function
parts = [c.choices[0].delta.tool_calls for c in ask(stream=True, **asked_tool) if c.choices]
pieces = [part[0].function for part in parts if part]
assert "".join(piece.name or "" for piece in pieces) == call.name
assert "".join(piece.arguments or "" for piece in pieces) == call.arguments

parsed = client.chat.completions.parse(
    model="tiny", messages=ASKED, temperature=0, max_tokens=400, response_format=Boat
)
boat = parsed.choices[0].message.parsed
assert isinstance(boat, Boat)
assert json.loads(parsed.choices[0].message.content) == boat.model_dump()

answer: dict[str, Any] = {"model": "tiny", "input": ASKED, "temperature": 0}
response = client.responses.create(max_output_tokens=12, **answer)
assert response.output_text == message
assert client.responses.parse(max_output_tokens=400, text_format=Boat, **answer).output_parsed
with client.responses.stream(max_output_tokens=12, **answer) as events:
    seen = list(events)
assert [event.sequence_number for event in seen] == list(range(len(seen)))
assert seen[-1].type == "response.incomplete", "cut by length"
assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == message

text = client.completions.create(
    model="tiny", prompt="Once upon a time", temperature=0, max_tokens=12
)
try:
    ask(n=999)
    error = "none"
except openai.BadRequestError as refused:
    error = f"{refused.param}: {refused}"
found = {
    "whole": message,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "usage": whole.usage.total_tokens,
    "streamed_usage": chunks[-1].usage.total_tokens,
    "call": call.name,
    "arguments": call.arguments,
    "text": text.choices[0].text,
    "error": error,
}
print(json.dumps(found))
