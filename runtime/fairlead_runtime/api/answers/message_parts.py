"""OpenAI's shapes of an answer's parts: text, reasoning and calls, whole and as deltas.

Reasoning has two names: ``reasoning``, as vLLM has it now, and ``reasoning_content``, which clients
of other servers read.
"""

from collections.abc import Iterable
from typing import Any

from fairlead_runtime.api.tools.parts import CallArguments, CallBegun, Content, Part, Reasoning


def delta(part: Part) -> dict[str, Any]:
    """A call's id and name come first, then its arguments in pieces."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


# What peers always have in a message, for clients that read it without asking whether it is there.
_ABSENT = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
)


def message(parts: Iterable[Part], begun: str = "") -> dict[str, Any]:
    """The whole message; ``content`` is null where there is only something else. ``begun``: text
    before that of the parts.
    """
    texts = [begun]
    thoughts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case CallBegun(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    content = "".join(texts)
    answer: dict[str, Any] = {"role": "assistant", "content": content, **_ABSENT}
    if not content and (calls or thoughts):
        answer["content"] = None
    if thoughts:
        answer["reasoning"] = answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = list(calls.values())
    return answer
