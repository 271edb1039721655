"""OpenAI's response object, and its events in OpenAI's order.

Both come from the same items, so that a stream ends with the object that a whole answer would be.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from fairlead_runtime.api.answers.logprob_bodies import chat_content
from fairlead_runtime.api.answers.response_bodies import Frame, Usage, WholeChoice
from fairlead_runtime.api.responses.namespaces import KIND, names_of
from fairlead_runtime.api.tools.parts import CallArguments, CallBegun, Content, Part, Reasoning
from fairlead_runtime.api.tools.reasoning import read
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import Output
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason

Fields = dict[str, Any]
Entries = list[orjson.Fragment]  # log-probabilities, one for each token


class ResponseEncoder:
    """``events`` gives each output's events, ``ending`` the last one."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parser = frame.new_parser()
        self._namespaces = names_of(frame.echo.get("tools", ()))
        self._events: list[bytes] = []
        self._number = 0  # of the next event
        self._whole = False  # the answer is one body: there are no events
        self._items: list[Fields] = []
        self._text: list[str] = []  # of the last item, while it is open
        self._open = False
        self._logprobs: Entries = []  # of the open item's text
        self._pending: Entries = []  # of tokens whose text is held back
        self._reasoning_tokens = 0
        self._cut = False  # by its length

    def events(self, index: int, output: Output) -> bytes:  # noqa: ARG002 - a response has one choice
        """The events of one output."""
        self._read_output(output)
        events, self._events = b"".join(self._events), []
        return events

    def ending(self, usage: Usage) -> bytes:
        kind = "incomplete" if self._cut else "completed"
        self._emit(f"response.{kind}", response=self._response(kind, usage))
        return b"".join(self._events)

    def failure(self, error: ApiError) -> bytes:
        """An answer that failed after its first byte."""
        failed = {"code": "server_error", "message": error.message}
        response = {**self._response("failed", None), "error": failed}
        self._emit("response.failed", response=response)
        return b"".join(self._events)

    def body_pieces(self, choices: list[WholeChoice], usage: Usage) -> Iterator[bytes]:
        (choice,) = choices
        self._whole = True
        for output in choice.outputs:
            self._read_output(output)
            yield b""
        yield orjson.dumps(self._response("incomplete" if self._cut else "completed", usage))

    # -- from text to items

    def _read_output(self, output: Output) -> None:
        """Token by token where it has several: each has its log-probabilities."""
        at = 0
        for place, length in enumerate(output.lengths):
            self._read(_piece(output, slice(place, place + 1), output.text[at : at + length]))
            at += length
        rest = _piece(output, slice(len(output.lengths), None), output.text[at:])
        self._read(rest._replace(finish_reason=output.finish_reason))

    def _read(self, output: Output) -> None:
        if not self._number:
            for kind in ("created", "in_progress"):
                self._emit(f"response.{kind}", response=self._response("in_progress", None))
        parts, thought = read(self._parser, output)
        self._reasoning_tokens += thought
        self._pending += self._entries(output.token_ids, output.logprobs)
        finish = output.finish_reason
        for part in parts:
            self._add(part)
        if finish is not None:
            self._cut = finish is FinishReason.LENGTH
            if not self._items:
                self._add(Content(""))
            self._close("incomplete" if self._cut else "completed")

    def _add(self, part: Part) -> None:
        match part:
            case Content(text):
                self._begin("message")
                self._delta("output_text", text, logprobs=self._pending)
                self._logprobs += self._pending
            case Reasoning(text):
                self._begin("reasoning")
                self._delta("reasoning_text", text)
            case CallBegun(_, call_id, name):
                own, namespace = self._namespaces.get(name, (name, None))
                grouped = {} if namespace is None else {KIND: namespace}
                self._begin("function_call", call_id=call_id, name=own, **grouped)
            case CallArguments(_, text):
                self._text.append(text)
                self._emit("response.function_call_arguments.delta", **self._place(), delta=text)
        self._pending = []

    def _begin(self, kind: str, **fields: str) -> None:
        """Open an item, unless one of text goes on."""
        if self._open and self._items[-1]["type"] == kind and kind != "function_call":
            return
        if self._open:
            self._close("completed")
        self._items.append(_item(kind, fields))
        self._open, self._text, self._logprobs = True, [], []
        item = self._items[-1]
        place = len(self._items) - 1
        self._emit("response.output_item.added", output_index=place, item=item)
        if kind != "function_call":
            self._emit("response.content_part.added", **self._in_part(), part=self._part())

    def _close(self, status: str) -> None:
        """Close the open item, with all its text."""
        if not self._open:
            return
        item, text = self._items[-1], "".join(self._text)
        if item["type"] == "function_call":
            item = {**item, "arguments": text, "status": status}
            done = {"name": item["name"], "arguments": text}
            self._emit("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = self._part()
            kind = part["type"]
            logprobs = {"logprobs": self._logprobs} if kind == "output_text" else {}
            self._emit(f"response.{kind}.done", **self._in_part(), text=text, **logprobs)
            self._emit("response.content_part.done", **self._in_part(), part=part)
            item = {**item, "content": [part], "status": status}
        self._items[-1] = item
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = False

    # -- shapes

    def _delta(self, kind: str, text: str, **fields: Any) -> None:
        self._text.append(text)
        if text:
            self._emit(f"response.{kind}.delta", **self._in_part(), delta=text, **fields)

    def _place(self) -> Fields:
        item = self._items[-1]
        return {"item_id": item["id"], "output_index": len(self._items) - 1}

    def _in_part(self) -> Fields:
        return {**self._place(), "content_index": 0}

    def _part(self) -> Fields:
        """The open item's part so far."""
        text = "".join(self._text)
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _response(self, status: str, usage: Usage | None) -> Fields:
        return {
            "id": self._frame.id,
            "object": "response",
            "created_at": self._frame.created,
            "model": self._frame.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": list(self._items),
            "usage": self._usage(usage) if usage is not None else None,
            **self._frame.echo,
        }

    def _usage(self, usage: Usage) -> Fields:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _entries(
        self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None
    ) -> Entries:
        """Encoded at once: they are held until the end, and take five times as much as objects."""
        top = self._frame.top
        if top is None or not logprobs:
            return []
        frame = self._frame
        content = chat_content(tokens, logprobs, top, frame.token_bytes, by_id=frame.by_id)
        return [orjson.Fragment(orjson.dumps(entry)) for entry in content]

    def _emit(self, kind: str, **fields: Any) -> None:
        number, self._number = self._number, self._number + 1
        if self._whole:
            return
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        self._events.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), data))


def _piece(output: Output, tokens: slice, text: str) -> Output:
    """Of an output these tokens, which have this text."""
    return Output(
        output.index, output.token_ids[tokens], text, output.logprobs and output.logprobs[tokens]
    )


def _item(kind: str, fields: Mapping[str, str]) -> Fields:
    """A new item. A call's ``call_id`` is what its result refers to."""
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    item: Fields = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "message":
        return {**item, "role": "assistant", "content": []}
    if kind == "reasoning":
        return {**item, "summary": [], "content": []}
    return {**item, **fields, "arguments": ""}
