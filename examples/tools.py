"""A tool that the model calls: it asks for the weather of a city, this program answers, and the
model says it in words.
"""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER = {"Paris": "rain, 12 °C", "Rome": "sun, 24 °C"}
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Rome?"}
]
# "required": a small model may not call a tool by itself. The arguments always follow the schema.
asked = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0
)
[call, *_] = asked.choices[0].message.tool_calls or []
arguments = json.loads(call.function.arguments)
print(f"the model calls {call.function.name}({arguments})")
messages += [
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
        ],
    },
    {"role": "tool", "tool_call_id": call.id, "content": WEATHER[arguments["city"]]},
]
told = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=64
)
print(told.choices[0].message.content)
