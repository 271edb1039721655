"""Ask the server at argv[1] with LiteLLM; print what it understood."""

import json
import sys
from typing import Any

import litellm

TOOL = json.loads(sys.argv[2])


def ask(**fields: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    return litellm.completion(
        model="openai/tiny",
        api_base=sys.argv[1],
        api_key="none",
        messages=messages,
        temperature=0,
        max_tokens=fields.pop("max_tokens", 12),
        **fields,
    )


whole = ask()
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
called = ask(tools=[TOOL], tool_choice="required", max_tokens=400).choices[0]
text = litellm.text_completion(
    model="text-completion-openai/tiny",
    api_base=sys.argv[1],
    api_key="none",
    prompt="Once upon a time",
    temperature=0,
    max_tokens=12,
)
try:
    ask(n=999)
    error = "none"
except litellm.BadRequestError as refused:
    error = str(refused)
found = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "usage": whole.usage.total_tokens,
    "streamed_usage": chunks[-1].usage.total_tokens,
    "call": called.message.tool_calls[0].function.name,
    "arguments": called.message.tool_calls[0].function.arguments,
    "text": text.choices[0].text,
    "error": error,
}
print(json.dumps(found))
