"""The head and the end of an answer, without sockets: headers of a stream, reasons of every end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import pytest

from fairlead_runtime.api.answers.response_bodies import (
    SHORT,
    ChatEncoder,
    CompletionEncoder,
    Frame,
    Usage,
    WholeChoice,
)
from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.prompts import PreparedRequest
from fairlead_runtime.api.responses.encoder import ResponseEncoder
from fairlead_runtime.api.routes.completions import (
    _beside,
    _Generation,
    _JsonAnswer,
    _StreamedAnswer,
)
from fairlead_runtime.api.routes.eager import run_eagerly
from fairlead_runtime.api.tools.hermes import HermesParser
from fairlead_runtime.api.tools.parts import Part, PlainParser
from fairlead_runtime.api.tools.reasoning import ReasoningParser
from fairlead_runtime.front.auth import AuthMiddleware
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.key_file import MAX_KEY, KeyRing
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.outputs import Output, Take
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import Failure, FailureKind, FinishReason, RequestError
from support.api_harness import MODEL, asgi, chat, completion

FRAME = Frame(id="x", created=1, model="tiny", top=None, usage=False, token_bytes={})


class Scripted:
    """A stream of given outputs."""

    request_id = "r"
    cached_tokens = 2

    def __init__(self, *outputs: Output) -> None:
        self._outputs = outputs

    async def __aiter__(self) -> AsyncIterator[Output]:
        for output in self._outputs:
            yield output

    async def forward(self, take: Take) -> None:
        async for output in self:
            if (rest := take(output)) is not None:
                await rest


NAMES = {"structured_outputs": "guided_json"}


def answered(kind: str, encoder: Any, *outputs: Output, beside: int = 0) -> tuple[list[Any], bytes]:
    """The messages that an answer sends, and its last bytes."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> bytes:
        pool = PromptPool()
        generation = _Generation([Scripted(*outputs)], 1, Usage(prompt=3), NAMES, beside=[beside])  # type: ignore[list-item]  # what forward() reads
        answer = (
            _StreamedAnswer(generation, encoder(replace(FRAME, usage=True)), pool)
            if kind == "stream"
            else _JsonAnswer(generation, encoder(FRAME), pool)
        )
        try:
            return await answer.write(send)
        finally:
            pool.close()

    last = asyncio.run(go())
    return sent, last


def output(text: str, finish: FinishReason | None = None, stop: int | str | None = None) -> Output:
    return Output(0, (7,), text, finish_reason=finish, stop_reason=stop)


ENDED = (output("a"), output("b", FinishReason.STOP, "END"))


@pytest.mark.parametrize("encoder", [ChatEncoder, CompletionEncoder])
@pytest.mark.parametrize("kind", ["stream", "json"])
def test_an_answer_says_why_and_at_what_it_stopped(kind: str, encoder: Any) -> None:
    sent, last = answered(kind, encoder, *ENDED)
    if kind == "json":
        (choice,) = orjson.loads(last)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        return
    body = b"".join(message.get("body", b"") for message in sent)
    chunks = [orjson.loads(line[6:]) for line in body.decode().split("\n\n") if line]
    reasons = [(c["choices"][0]["finish_reason"], c["choices"][0]["stop_reason"]) for c in chunks]
    assert reasons[-1] == ("stop", "END")
    assert set(reasons[:-1]) == {(None, None)}


def test_no_proxy_may_keep_or_collect_the_events_of_a_stream() -> None:
    sent, last = answered("stream", ChatEncoder, *ENDED)
    headers = dict(sent[0]["headers"])
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert last.endswith(b"data: [DONE]\n\n")
    assert b'"prompt_tokens":3' in last


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [(FinishReason.ABORT, 503, "aborted"), (FinishReason.ERROR, 500, None)],
)
def test_a_request_that_the_server_ended_is_no_success(
    finish: FinishReason, status: int, code: str | None
) -> None:
    for kind in ("stream", "json"):
        with pytest.raises(ApiError) as refusal:
            answered(kind, ChatEncoder, output("", finish))
        assert refusal.value.status == status
        if code is not None:
            assert refusal.value.code == code


@pytest.mark.parametrize("kind", ["stream", "json"])
def test_an_answer_names_the_failure_that_is_the_clients(kind: str) -> None:
    def refusal(failure_kind: FailureKind) -> Exception:
        failed = Output(
            0, (), "", finish_reason=FinishReason.ERROR, failure=Failure("why", failure_kind)
        )
        with pytest.raises((ApiError, RequestError)) as error:
            answered(kind, ChatEncoder, failed)
        return error.value

    internal, constraints = refusal(FailureKind.INTERNAL), refusal(FailureKind.CONSTRAINTS)
    assert isinstance(internal, ApiError)
    assert (internal.status, "why" in internal.message) == (500, False)
    assert isinstance(constraints, ApiError)
    assert (constraints.status, constraints.message, constraints.code) == (
        400,
        "why",
        "no_token_allowed",
    )
    grammar = refusal(FailureKind.GRAMMAR)
    assert isinstance(grammar, RequestError)
    assert (grammar.param, str(grammar)) == ("guided_json", "guided_json: why")


def test_after_the_first_byte_the_end_is_an_error_event() -> None:
    sent, last = answered("stream", ChatEncoder, output("a"), output("", FinishReason.ABORT))
    assert sent[0]["status"] == 200
    assert b'"code":"aborted"' in last
    assert last.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("given", "used"), [(None, 0), (-1, 0), (0, 0), (1, 1), (40, 40)])
def test_no_top_k_and_minus_one_switch_the_filter_off(given: int | None, used: int) -> None:
    fields = {} if given is None else {"top_k": given}
    request = request_bodies.chat(chat(**fields), "tiny")
    assert request.params.top_k == used


# -- keys


@pytest.mark.parametrize(
    ("length", "status"), [(1, 200), (MAX_KEY, 200), (MAX_KEY + 1, 401), (2 * MAX_KEY, 401)]
)
def test_a_key_is_compared_whole(length: int, status: int, tmp_path: Any) -> None:
    """The file holds the key's first MAX_KEY bytes: a longer one that begins with it is wrong."""
    key = "k" * length
    path = tmp_path / "keys"
    path.write_text(key[:MAX_KEY] + "\n")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = AuthMiddleware(app, KeyRing(str(path)))
    got, _ = asyncio.run(asgi(guarded, "GET", "/v1/models", authorization=f"Bearer {key}"))
    assert got == status


@pytest.mark.parametrize("kind", ["stream", "json"])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_log_probabilities_are_encoded_outside_the_event_loop(
    kind: str, *, with_logprobs: bool
) -> None:
    threads: set[str] = set()

    class Spied(CompletionEncoder):
        def events(self, index: int, output: Output) -> bytes:
            threads.add(threading.current_thread().name)
            return super().events(index, output)

        def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
            threads.add(threading.current_thread().name)
            return super()._choice(index, choice)

    logprobs = ({5: Logprob(-1.0, 1, "a")},) if with_logprobs else None
    output = Output(0, (5,), "a", logprobs, FinishReason.LENGTH)
    answered(kind, lambda frame: Spied(replace(frame, top=0 if with_logprobs else None)), output)
    here = threading.current_thread().name
    assert threads == ({"encode_0"} if with_logprobs else {here})


@pytest.mark.parametrize(("characters", "thread"), [(SHORT, "MainThread"), (SHORT + 1, "encode_0")])
def test_a_long_whole_answer_is_parsed_and_encoded_outside_the_event_loop(
    characters: int, thread: str
) -> None:
    threads: set[str] = set()

    class Spied(PlainParser):
        def feed(self, text: str) -> list[Part]:
            threads.add(threading.current_thread().name)
            return super().feed(text)

    encoder = partial(_with_parser, Spied)
    _, last = answered("json", encoder, output("a" * characters, FinishReason.STOP))
    assert threads == {thread}
    assert orjson.loads(last)["choices"][0]["message"]["content"] == "a" * characters


@pytest.mark.parametrize(("beside", "thread"), [(SHORT - 1, "MainThread"), (SHORT, "encode_0")])
def test_prompts_that_an_answer_repeats_are_encoded_outside_the_event_loop(
    beside: int, thread: str
) -> None:
    threads: set[str] = set()

    class Spied(PlainParser):
        def feed(self, text: str) -> list[Part]:
            threads.add(threading.current_thread().name)
            return super().feed(text)

    answered("json", partial(_with_parser, Spied), output("a", FinishReason.STOP), beside=beside)
    assert threads == {thread}


def test_what_is_beside_a_choice_is_its_prompts_text_and_ids() -> None:
    plain = request_bodies.completion(completion(), MODEL)
    shown = request_bodies.completion(completion(return_token_ids=True), MODEL)
    ids = ((20, 21, 22), (20,))
    assert _beside(PreparedRequest(plain, ids, "")) == [0, 0]
    assert _beside(PreparedRequest(plain, ids, "", ("ab", "cdefg"))) == [2, 5]
    assert _beside(PreparedRequest(shown, ids, "")) == [3, 1]


def _with_parser(parser: Any, frame: Frame) -> ChatEncoder:
    return ChatEncoder(replace(frame, new_parser=parser))


def test_a_coroutine_that_waits_goes_on_where_it_is_awaited() -> None:
    steps: list[str] = []

    async def work(event: asyncio.Event) -> None:
        steps.append("begun")
        try:
            await event.wait()
            await asyncio.sleep(0)
            steps.append("ended")
        except asyncio.CancelledError:
            raise AssertionError("is closed, not cancelled") from None
        finally:
            steps.append("left")

    async def at_once() -> None:
        steps.append("at once")

    async def fails() -> None:
        raise ValueError("refused")

    async def go() -> None:
        event = asyncio.Event()
        assert run_eagerly(at_once()) is None
        with pytest.raises(ValueError, match="refused"):
            run_eagerly(fails())
        rest = run_eagerly(work(event))
        assert rest is not None
        assert steps == ["at once", "begun"]
        event.set()
        await rest
        assert steps[2:] == ["ended", "left"]
        rest = run_eagerly(work(asyncio.Event()))
        assert rest is not None
        waiting = asyncio.create_task(rest)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert steps[4:] == ["begun", "left"]

    asyncio.run(go())


def test_each_token_of_a_merged_output_is_of_reasoning_or_not() -> None:
    texts = ["<think>", "a", " b", "</think>", "c", "d"]
    merged = Output(
        0, (1, 2, 3, 4, 5, 6), "".join(texts), finish_reason=FinishReason.STOP, lengths=LENGTHS
    )
    single = [Output(0, (1,), text) for text in texts]
    single[-1] = single[-1]._replace(finish_reason=FinishReason.STOP)

    assert thoughts([merged], single) == {3}


def test_a_held_back_call_is_no_reasoning_and_a_hidden_thought_is_some() -> None:
    texts = ["<think>", "a", "</think>", "<tool_call>", '{"name":', ' "f"}', "</tool_call>"]
    single = [Output(0, (1,), text) for text in texts]
    end = Output(0, (), "", finish_reason=FinishReason.STOP)  # no token comes with it
    lengths = tuple(map(len, texts))
    merged = Output(0, (1,) * 7, "".join(texts), finish_reason=FinishReason.STOP, lengths=lengths)
    for show in (True, False):
        assert thoughts([merged], [*single, end], show=show) == {2}
    late = merged._replace(text="<think>a</think>b", token_ids=(1, 2, 3), lengths=(7, 1, 8))
    assert thoughts([late]) == {2}, "what the end adds belongs to no token"
    empty = [output("<think>"), output("\n\n"), output("</think>"), output("b", FinishReason.STOP)]
    assert thoughts(empty) == {0}


def test_reasoning_of_all_choices_is_counted_and_none_without_a_parser() -> None:
    outputs = [output("<think>"), output("a"), output("b</think>c", FinishReason.STOP)]
    for parser, expected in ((partial(thinker, show=True), 4), (PlainParser, 0)):
        whole = WholeChoice(outputs=outputs)
        pieces = ChatEncoder(replace(FRAME, new_parser=parser)).body_pieces([whole] * 2, Usage())
        assert thought_of(b"".join(pieces)) == expected
        encoder = ChatEncoder(replace(FRAME, usage=True, new_parser=parser))
        for each in outputs:
            for index in (0, 1):
                encoder.events(index, each)
        assert thought_of(encoder.ending(Usage())) == expected


def thinker(*, show: bool) -> ReasoningParser:
    names = frozenset({"f"})
    return ReasoningParser(HermesParser(names, lambda: "id"), inside=False, show=show)


def thoughts(*answers: list[Output], show: bool = True) -> set[int]:
    """The tokens of reasoning in the usage of every route that has them, whole and streamed."""

    def encoder(frame: Frame, kind: type[ChatEncoder] | type[ResponseEncoder]) -> Any:
        return kind(replace(frame, new_parser=partial(thinker, show=show)))

    return {
        thought_of(answered(how, partial(encoder, kind=kind), *outputs)[1])
        for outputs in answers
        for kind in (ChatEncoder, ResponseEncoder)
        for how in ("json", "stream")
    }


def thought_of(last: bytes) -> int:
    """Of the last bytes of an answer."""
    body = orjson.loads(last.split(b"data: ")[1].split(b"\n")[0] if b"data: " in last else last)
    usage = body.get("response", body)["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    count: int = details["reasoning_tokens"]
    return count


LENGTHS = (7, 1, 2, 8, 1, 1)
