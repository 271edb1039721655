"""OpenAI's response shapes, as one JSON body and as server-sent events.

An event of plain text, the hot path, is a prebuilt prefix, one encoded string and a suffix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import orjson

from fairlead_runtime.api.answers.logprob_bodies import (
    PIECE_TOKENS,
    TokenBytes,
    chat_content,
    completion_logprobs,
    token_piece,
)
from fairlead_runtime.api.answers.message_parts import delta, message
from fairlead_runtime.api.answers.prompt_echo import PromptEcho
from fairlead_runtime.api.answers.text_offsets import OutputOffsets, prompt_offsets
from fairlead_runtime.api.answers.token_ids import TokenIds
from fairlead_runtime.api.tools.parts import CallBegun, Content, Parser, Part, PlainParser
from fairlead_runtime.api.tools.reasoning import read
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import Output
from fairlead_runtime.request.logprobs import Logprob, PromptLogprobs
from fairlead_runtime.request.sequence import FinishReason

DONE = b"data: [DONE]\n\n"
PIECE = 64 * 1024  # bytes of a whole answer that are written at once
SHORT = 4096  # characters of a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The fields that every event of one answer repeats. ``top`` is None without log-
    probabilities. ``running`` is the answer's usage so far, for answers that show it in every
    event.
    """

    id: str
    created: int
    model: str
    top: int | None
    usage: bool  # stream_options.include_usage
    token_bytes: TokenBytes
    special: frozenset[int] = frozenset()  # tokens that make no text of their own
    hidden: frozenset[int] = frozenset()  # those that an output does not show
    first_text: Callable[[int], str] = str  # of a token that begins a text
    prompts: PromptEcho = field(default_factory=PromptEcho)
    ids: TokenIds = field(default_factory=TokenIds)
    by_id: bool = False  # tokens of log-probabilities are shown by their ids
    begun: str = ""  # text before that of each choice of a chat
    running: "Usage | None" = None
    new_parser: Callable[[], Parser] = PlainParser  # of one choice of a chat
    forced: bool = False  # the request names the tool that must be called
    echo: Mapping[str, Any] = field(default_factory=dict)  # of the request, in a response
    request_id: str = ""  # of the answer's header; ``id`` may be the body's


@dataclass(slots=True)
class Usage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_dict(self, thought: int) -> dict[str, Any]:
        """``thought``: tokens of the completion that are reasoning."""
        return {
            **self.counts(),
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }

    def counts(self, unseen: int = 0) -> dict[str, int]:
        """``unseen``: tokens of the completion that do not count yet."""
        completion = self.completion - unseen
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
        }


@dataclass(slots=True)
class WholeChoice:
    """One whole choice, for an answer that is not streamed. ``beside``: characters of the prompt,
    and its token ids, that the answer shows with it.
    """

    beside: int = 0
    outputs: list[Output] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts())

    @property
    def last(self) -> Output | None:
        return self.outputs[-1] if self.outputs else None

    @property
    def short(self) -> bool:
        """Whether it is encoded, and its text parsed, in less than the way to another thread."""
        slow = self.logprobs or self.prompt_logprobs
        return not slow and self.beside + sum(map(len, self._texts())) <= SHORT

    def _texts(self) -> Iterator[str]:
        return (output.text for output in self.outputs)

    def add(self, output: Output) -> None:
        self.outputs.append(output)
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


class Encoder(Protocol):
    """One route's shapes. ``events`` returns the events of one output, possibly none; ``ending``
    and ``failure`` the last ones of a stream; ``body_pieces`` the body in pieces, since encoding
    many log-probabilities would hold up the event loop.
    """

    def events(self, index: int, output: Output) -> bytes: ...
    def ending(self, usage: Usage) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...
    def body_pieces(self, choices: list[WholeChoice], usage: Usage) -> Iterator[bytes]: ...


class _ChoicesEncoder(ABC):
    """What chat and completions share: ``kind`` is the object's, of a whole answer."""

    def __init__(self, frame: Frame, kind: str, events: "_EventShape") -> None:
        self._frame = frame
        self._kind = kind
        self._events = events
        self._thought = 0  # tokens of all choices that are reasoning

    def ending(self, usage: Usage) -> bytes:
        return self._events.ending(usage, self._thought)

    def failure(self, error: ApiError) -> bytes:
        return error_events(error)

    def body_pieces(self, choices: list[WholeChoice], usage: Usage) -> Iterator[bytes]:
        for index, choice in enumerate(choices):
            self._frame.prompts.take(index, choice.prompt_logprobs)
            self._frame.ids.add(index, choice.token_ids)
        parts = (
            (
                self._choice(index, choice),
                chain(self._logprob_pieces(index, choice), self._last_members(index)),
            )
            for index, choice in enumerate(choices)
        )
        yield from _answer_json(self._frame, self._kind, parts)
        yield b',"usage":' + orjson.dumps(usage.as_dict(self._thought))
        yield from self._beside_choices()
        yield b',"service_tier":null,"system_fingerprint":null,"kv_transfer_params":null}'

    def _beside_choices(self) -> Iterable[bytes]:
        """A member of the whole answer that no choice has, after a comma and in pieces."""
        return ()

    def _last_members(self, index: int) -> Iterable[bytes]:
        """The last members of a choice, after its log-probabilities."""
        yield self._frame.ids.generated(index) or b',"token_ids":null'

    @abstractmethod
    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]: ...

    @abstractmethod
    def _logprob_pieces(self, index: int, choice: WholeChoice) -> Iterator[bytes]:
        """The choice's log-probabilities as JSON."""


class ChatEncoder(_ChoicesEncoder):
    def __init__(self, frame: Frame) -> None:
        events = _EventShape(frame, "chat.completion.chunk", b'{"content":', b"}")
        super().__init__(frame, "chat.completion", events)
        self._parsers: dict[int, Parser] = {}  # of the choices that have begun
        self._calling: set[int] = set()

    def events(self, index: int, output: Output) -> bytes:
        events, ids = [], self._frame.ids
        ids.add(index, output.token_ids)
        if index not in self._parsers:
            self._parsers[index] = self._frame.new_parser()
            role = b'{"role":"assistant","content":""}'
            new = len(output.token_ids)  # that no event before the first one of text has
            events.append(self._events.raw(index, role, beside=ids.prompt(index), unseen=new))
            if self._frame.begun:
                events.append(self._events.text(index, self._frame.begun, unseen=new))
        parts, thought = read(self._parsers[index], output)
        self._thought += thought
        entries = self._logprobs(output)
        if entries and not parts:
            parts = [Content("")]
        logprobs = orjson.dumps({"content": entries}) if entries else b"null"
        for part in parts:
            if isinstance(part, Content):
                events.append(
                    self._events.text(index, part.text, logprobs, ids=ids.generated(index))
                )
            else:
                if isinstance(part, CallBegun):
                    self._calling.add(index)
                events.append(
                    self._events.raw(
                        index, orjson.dumps(delta(part)), logprobs, ids=ids.generated(index)
                    )
                )
            logprobs = b"null"  # an output's are in one event
        if output.finish_reason is not None:
            reasons = self._reasons(output, calls=index in self._calling)
            ending = orjson.dumps(reasons)[1:-1]
            last = self._events.raw(index, b"{}", finish=ending, ids=ids.generated(index))
            events.append(last)
        return b"".join(events)

    def _beside_choices(self) -> Iterable[bytes]:
        yield self._frame.ids.prompt(0) or b',"prompt_token_ids":null'
        yield from self._frame.prompts.json_member(0)

    def _logprob_pieces(self, index: int, choice: WholeChoice) -> Iterator[bytes]:  # noqa: ARG002 - a chat shows no prompt
        top = self._frame.top
        if top is None:
            yield b"null"
            return
        yield b'{"content":['
        for at, ids, entries in _slices(choice.token_ids, choice.logprobs):
            frame = self._frame
            content = chat_content(ids, entries, top, frame.token_bytes, by_id=frame.by_id)
            yield b"," * bool(at) + orjson.dumps(content)[1:-1]
        yield b"]}"

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        parser = self._frame.new_parser()
        parts: list[Part] = []
        for output in choice.outputs:
            new, thought = read(parser, output)
            parts += new
            self._thought += thought
        answer = message(parts, self._frame.begun)
        reasons = {}
        if choice.last is not None:
            reasons = self._reasons(choice.last, calls="tool_calls" in answer)
        return {"index": index, "message": answer, **reasons}

    def _reasons(self, output: Output, *, calls: bool) -> dict[str, Any]:
        """Finish reasons as OpenAI has them: an answer that ended with calls ended for them, unless
        the request named the tool.
        """
        reasons = _reasons(output)
        if calls and not self._frame.forced and output.finish_reason is FinishReason.STOP:
            reasons["finish_reason"] = "tool_calls"
        return reasons

    def _logprobs(self, output: Output) -> list[dict[str, Any]]:
        top = self._frame.top
        if top is None or output.logprobs is None:
            return []
        frame, ids = self._frame, output.token_ids
        return chat_content(ids, output.logprobs, top, frame.token_bytes, by_id=frame.by_id)


class CompletionEncoder(_ChoicesEncoder):
    def __init__(self, frame: Frame) -> None:
        events = _EventShape(frame, "text_completion", b"", b"")
        super().__init__(frame, "text_completion", events)
        self._offsets: dict[int, OutputOffsets] = {}  # by choice
        self._begun: set[int] = set()

    def events(self, index: int, output: Output) -> bytes:
        return self._echo(index, output) + self._generated(index, output)

    def _echo(self, index: int, output: Output) -> bytes:
        """The event of the prompt, before the first of a choice whose answer shows it."""
        prompts = self._frame.prompts
        if index in self._begun or not prompts.echo:
            return b""
        self._begun.add(index)
        prompts.take(index, output.prompt_logprobs)
        text, (ids, entries, first) = prompts.text(index), prompts.tokens(index)
        shown = self._frame.ids.prompt(index)
        new = len(output.token_ids)
        if self._frame.top is None or not ids:
            return self._events.text(index, text, ids=shown, unseen=new)
        offsets = self._prompt_offsets(text, ids, entries, first)
        shape = self._shape(ids, entries, offsets, first)
        return self._events.text(index, text, orjson.dumps(shape), ids=shown, unseen=new)

    def _generated(self, index: int, output: Output) -> bytes:
        shape, ids = self._logprobs(index, output), self._frame.ids
        ids.add(index, output.token_ids)
        if not output.text and shape is None and output.finish_reason is None:
            return b""
        logprobs = b"null" if shape is None else orjson.dumps(shape)
        shown = ids.generated(index) + ids.prompt(index)
        return self._events.text(index, output.text, logprobs, _finish(output), ids=shown)

    def _last_members(self, index: int) -> Iterable[bytes]:
        yield from super()._last_members(index)
        yield self._frame.ids.prompt(index) or b',"prompt_token_ids":null'
        yield from self._frame.prompts.json_member(index)

    def _logprob_pieces(self, index: int, choice: WholeChoice) -> Iterator[bytes]:
        if self._frame.top is None:
            yield b"null"
            return
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = {name: bytearray() for name in names}
        prompt_ids, prompt_entries, first = self._frame.prompts.tokens(index)
        all_ids = [*prompt_ids, *choice.token_ids]
        all_entries = [*prompt_entries, *choice.logprobs]
        text = self._frame.prompts.text(index)
        offsets = chain(
            self._prompt_offsets(text, prompt_ids, prompt_entries, first),
            self._output_offsets(index, choice.token_ids, choice.logprobs),
        )
        for at, ids, entries in _slices(all_ids, all_entries):
            shape = self._shape(ids, entries, islice(offsets, len(ids)), first)
            for name in names:
                lists[name] += b"," * bool(at) + orjson.dumps(shape[name])[1:-1]
            yield b""
        for name, values in lists.items():
            yield (b"{" if name == names[0] else b",") + orjson.dumps(name) + b":["
            while values:
                yield bytes(values[:PIECE])
                del values[:PIECE]
            yield b"]"
        yield b"}"

    def _prompt_offsets(
        self, text: str, ids: Sequence[int], entries: PromptLogprobs, first: str
    ) -> Iterator[int]:
        token_bytes = self._frame.token_bytes

        def piece(place: int) -> bytes:
            return token_piece(ids[place], entries[place], token_bytes, first)

        return prompt_offsets(text, ids, self._frame.special, piece)

    def _output_offsets(
        self, index: int, ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]
    ) -> Iterator[int]:
        """Where the next tokens of a choice begin, after the prompt that it shows."""
        frame = self._frame
        if index not in self._offsets:
            begins = frame.prompts.begins_text(index, frame.special)
            self._offsets[index] = OutputOffsets(
                len(frame.prompts.text(index)), frame.hidden, frame.first_text if begins else None
            )
        for token, entry in zip(ids, entries, strict=True):
            yield self._offsets[index].place(token, token_piece(token, entry, frame.token_bytes))

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        prompts = self._frame.prompts
        return {
            "index": index,
            "text": prompts.text(index) + choice.text,
            **_finished(choice),
        }

    def _shape(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        offsets: Iterable[int],
        first: str = "",
    ) -> dict[str, Any]:
        frame = self._frame
        return completion_logprobs(
            token_ids,
            entries,
            frame.top or 0,
            frame.token_bytes,
            offsets,
            first,
            by_id=frame.by_id,
        )

    def _logprobs(self, index: int, output: Output) -> dict[str, Any] | None:
        if self._frame.top is None or not output.logprobs:
            return None
        offsets = self._output_offsets(index, output.token_ids, output.logprobs)
        return self._shape(output.token_ids, output.logprobs, offsets)


class _EventShape:
    """The constant bytes of an event.

    ``opening`` and ``closing`` enclose the text: chat has it in a delta, completions beside the
    index.
    """

    def __init__(self, frame: Frame, kind: str, opening: bytes, closing: bytes) -> None:
        head = orjson.dumps(
            {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model}
        )
        self._head = b"data: " + head[:-1]
        self._field = b"delta" if opening else b"text"
        self._opening, self._closing = opening, closing
        self._running = frame.running
        self._usage = frame.usage
        self._tail = b',"usage":null}\n\n' if frame.usage else b"}\n\n"
        self._plain = (
            closing + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + self._tail
        )
        self._prefixes: dict[int, bytes] = {}

    def text(
        self,
        index: int,
        text: str,
        logprobs: bytes = b"null",
        finish: bytes = b"",
        *,
        ids: bytes = b"",
        unseen: int = 0,
    ) -> bytes:
        value = self._opening + orjson.dumps(text)
        if logprobs == b"null" and not finish and not ids and self._running is None:
            return self._prefix(index) + value + self._plain
        return self.raw(index, value + self._closing, logprobs, finish, ids=ids, unseen=unseen)

    def raw(
        self,
        index: int,
        value: bytes,
        logprobs: bytes = b"null",
        finish: bytes = b"",
        *,
        ids: bytes = b"",
        beside: bytes = b"",
        unseen: int = 0,
    ) -> bytes:
        """``ids``: further members of the choice; ``beside``: of the event. ``unseen``: tokens of
        the usage so far that come with a later event.
        """
        ending = finish or b'"finish_reason":null,"stop_reason":null'
        tail = self._tail
        if self._running is not None:
            tail = b',"usage":' + orjson.dumps(self._running.counts(unseen)) + b"}\n\n"
        after = b',"logprobs":' + logprobs + b"," + ending + ids + b"}]" + beside + tail
        return self._prefix(index) + value + after

    def ending(self, usage: Usage, thought: int) -> bytes:
        if not self._usage:
            return DONE
        counts = orjson.dumps(usage.as_dict(thought))
        return self._head + b',"choices":[],"usage":' + counts + b"}\n\n" + DONE

    def _prefix(self, index: int) -> bytes:
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._head + b',"choices":[{"index":%d,"%s":' % (index, self._field)
            self._prefixes[index] = prefix
        return prefix


def error_events(error: ApiError) -> bytes:
    """An answer that failed after its first byte: an error event, then the end of the stream."""
    return b"data: " + error.body + b"\n\n" + DONE


def _finish(output: Output) -> bytes:
    return b"" if output.finish_reason is None else orjson.dumps(_reasons(output))[1:-1]


def _reasons(output: Output) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _finished(choice: WholeChoice) -> dict[str, Any]:
    return {} if choice.last is None else _reasons(choice.last)


EntryT = TypeVar("EntryT")


def _slices(
    token_ids: list[int], entries: list[EntryT]
) -> Iterator[tuple[int, list[int], list[EntryT]]]:
    for at in range(0, len(token_ids), PIECE_TOKENS):
        end = at + PIECE_TOKENS
        yield at, token_ids[at:end], entries[at:end]


def _answer_json(
    frame: Frame,
    kind: str,
    choices: Iterable[tuple[dict[str, Any], Iterator[bytes]]],
) -> Iterator[bytes]:
    """An answer's JSON up to its choices. ``choices``: the members of each, and its
    log-probabilities in pieces of JSON, which further members may follow.
    """
    head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model}
    yield orjson.dumps(head)[:-1] + b',"choices":['
    for place, (members, logprobs) in enumerate(choices):
        yield b"," * bool(place) + orjson.dumps(members)[:-1] + b',"logprobs":'
        yield from logprobs
        yield b"}"
    yield b"]"
