"""Ask the server at argv[1] with LangChain's ChatOpenAI; print what it understood."""

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI

TOOL = json.loads(sys.argv[2])
ASKED = "Tell me about the sea."


def model(**fields: Any) -> ChatOpenAI:
    settings = {"max_tokens": 12, "temperature": 0, "max_retries": 0, **fields}
    return ChatOpenAI(model="tiny", base_url=sys.argv[1], api_key="none", **settings)


whole = model().invoke(ASKED)
chunks = list(model(stream_usage=True).stream(ASKED))
called = model(max_tokens=400).bind_tools([TOOL], tool_choice="required").invoke(ASKED)
llm = OpenAI(model="tiny", base_url=sys.argv[1], api_key="none", temperature=0, max_tokens=12)
try:
    model(n=999).invoke(ASKED)
    error = "none"
except openai.BadRequestError as refused:
    error = str(refused)
found = {
    "whole": whole.content,
    "streamed": "".join(chunk.content for chunk in chunks),
    "usage": whole.usage_metadata["total_tokens"],
    "streamed_usage": sum(c.usage_metadata["total_tokens"] for c in chunks if c.usage_metadata),
    "call": called.tool_calls[0]["name"],
    "arguments": json.dumps(called.tool_calls[0]["args"]),
    "text": llm.invoke("Once upon a time"),
    "error": error,
}
print(json.dumps(found))
