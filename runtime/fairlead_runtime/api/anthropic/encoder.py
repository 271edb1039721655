"""Anthropic's message object, and its events in Anthropic's order.

Both come from the same blocks, so that a stream adds up to the message that a whole answer would
be.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import orjson

from fairlead_runtime.api.answers.response_bodies import Frame, Usage, WholeChoice
from fairlead_runtime.api.tools.parts import CallArguments, CallBegun, Content, Part, Reasoning
from fairlead_runtime.front.errors import ApiError, anthropic_content
from fairlead_runtime.outputs import Output
from fairlead_runtime.request.sequence import FinishReason

Fields = dict[str, Any]
# Of each type of block: the type of its deltas, and the field of them that has the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageEncoder:
    """``events`` gives each output's events, ``ending`` the last ones."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parser = frame.new_parser()
        self._events: list[bytes] = []
        self._begun = False
        self._whole = False  # the answer is one body: there are no events
        self._blocks: list[Fields] = []  # whole, but for the text of an open one
        self._open = False
        self._text: list[str] = []  # of the open block
        self._last: Output | None = None
        self._tokens = 0

    def events(self, index: int, output: Output) -> bytes:  # noqa: ARG002 - a message has one choice
        """The events of one output."""
        self._read(output)
        events, self._events = b"".join(self._events), []
        return events

    def ending(self, usage: Usage) -> bytes:
        self._emit("message_delta", delta=self._ended(), usage=_counts(usage))
        self._emit("message_stop")
        return b"".join(self._events)

    def failure(self, error: ApiError) -> bytes:
        """An answer that failed after its first byte."""
        return _event("error", anthropic_content(error, self._frame.request_id))

    def body_pieces(self, choices: list[WholeChoice], usage: Usage) -> Iterator[bytes]:
        (choice,) = choices
        self._whole = True
        for output in choice.outputs:
            self._read(output)
            yield b""
        yield orjson.dumps(self._message(usage) | self._ended())

    # -- from text to blocks

    def _read(self, output: Output) -> None:
        if not self._begun:
            self._begun = True
            usage = self._frame.running or Usage()
            self._emit("message_start", message=self._message(usage, output_tokens=0))
        self._tokens += len(output.token_ids)
        parts = self._parser.feed(output.text)
        if output.finish_reason is not None:
            self._last = output
            parts += self._parser.finish()
        for part in parts:
            self._add(part)
        if output.finish_reason is not None:
            # What was cut before it could show anything has no block.
            if not self._blocks and output.finish_reason is not FinishReason.LENGTH:
                self._begin({"type": "text", "text": ""})
            self._close()

    def _add(self, part: Part) -> None:
        match part:
            case Content(text):
                self._continue("text", text)
            case Reasoning(text):
                self._continue("thinking", text)
            case CallBegun(_, call_id, name):
                self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                self._delta(text)

    def _continue(self, kind: str, text: str) -> None:
        """Add text to the open block where it is of this kind, else to a new one."""
        if not self._open or self._blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            self._begin({"type": kind, kind: "", **more})
        self._delta(text)

    def _begin(self, block: Fields) -> None:
        self._close()
        self._blocks.append(block)
        self._open, self._text = True, []
        place = len(self._blocks) - 1
        self._emit("content_block_start", index=place, content_block=block)
        if not place:
            self._emit("ping")

    def _delta(self, text: str) -> None:
        self._text.append(text)
        kind = self._blocks[-1]["type"]
        if text and (kind != "thinking" or self._frame.echo["thinking"]):
            name, field = _DELTAS[kind]
            self._emit_delta({"type": name, field: text})

    def _close(self) -> None:
        """Close the open block, with all its text."""
        if not self._open:
            return
        block, text = self._blocks[-1], "".join(self._text)
        match block["type"]:
            case "text":
                block = {**block, "text": text}
            case "thinking":
                shown = text if self._frame.echo["thinking"] else ""
                # Clients send it back, and some send no thoughts that have none.
                signature = hashlib.sha256(text.encode()).hexdigest()
                block = {**block, "thinking": shown, "signature": signature}
                self._emit_delta({"type": "signature_delta", "signature": signature})
            case _:
                block = {**block, "input": _input(text)}
        self._blocks[-1] = block
        self._emit("content_block_stop", index=len(self._blocks) - 1)
        self._open = False

    # -- shapes

    def _message(self, usage: Usage, **counts: int) -> Fields:
        return {
            "id": self._frame.id,
            "type": "message",
            "role": "assistant",
            "model": self._frame.model,
            "content": list(self._blocks),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counts(usage) | counts,
        }

    def _ended(self) -> Fields:
        """Why the answer ended. One that was cut before ``max_tokens`` had no more room."""
        last = self._last
        sequence = last.stop_reason if last and isinstance(last.stop_reason, str) else None
        reason = "end_turn"
        if last is not None and last.finish_reason is FinishReason.LENGTH:
            room = self._tokens < self._frame.echo["max_tokens"]
            reason = "model_context_window_exceeded" if room else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _emit_delta(self, delta: Fields) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _emit(self, kind: str, **fields: Any) -> None:
        if not self._whole:
            self._events.append(_event(kind, {"type": kind, **fields}))


def _event(kind: str, fields: Fields) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(fields))


def _counts(usage: Usage) -> Fields:
    """Anthropic's ``input_tokens`` are those that no cache had. What ours keeps costs nothing
    more, so no token counts as written there.
    """
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _input(arguments: str) -> Any:
    """A call's arguments as an object, digit by digit as the model wrote them. What is none, as in
    a call that was cut, is there as text, under the name that Anthropic's pages have for it.
    """
    if not arguments.strip():
        return {}
    try:
        whole = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        whole = False
    return orjson.Fragment(arguments) if whole else {"INVALID_JSON": arguments}
