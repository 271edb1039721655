"""The two generating routes, from a request's first byte to its answer's last.

Owns the order: body, prompts, submission, first output, answer; and that whatever ends it early,
the client included, cancels what runs. Makes no shape (``stream``) and no token (the service).
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from fairlead_runtime.api import errors, request_bodies
from fairlead_runtime.api.access_log import failed_late
from fairlead_runtime.api.auth import TENANT, Salter
from fairlead_runtime.api.limits import Pool, read_body, while_connected
from fairlead_runtime.api.prompts import Prepared, Validate, prepare
from fairlead_runtime.api.response_bodies import (
    DONE,
    ChatEncoder,
    CompletionEncoder,
    Encoder,
    Frame,
    Gathered,
    Usage,
    error_events,
)
from fairlead_runtime.api.state import Backend, Face
from fairlead_runtime.outputs import Output, OutputStream, Submission
from fairlead_runtime.request import FinishReason, RequestError

MERGED_AHEAD = 8  # outputs of several prompts that may wait to be written, per prompt

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class Route:
    """What differs between the two routes."""

    prefix: str
    validate: Validate
    encoder: type[ChatEncoder] | type[CompletionEncoder]


CHAT = Route("chatcmpl", request_bodies.chat, ChatEncoder)
COMPLETIONS = Route("cmpl", request_bodies.completion, CompletionEncoder)


class Generate:
    """One route as an ASGI application. ``pool`` and ``salter`` are shared between the routes."""

    def __init__(self, face: Face, route: Route, pool: Pool, salter: Salter) -> None:
        self._face = face
        self._route = route
        self._pool = pool
        self._salter = salter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        backend = self._face.serving()
        body = await read_body(scope, receive)
        await while_connected(receive, self._answer(scope, backend, body, send))

    async def _answer(self, scope: Scope, backend: Backend, body: bytes, send: Send) -> None:
        prepared = await self._pool.run(
            prepare,
            body,
            self._route.validate,
            self._face.name,
            backend.tokenizer,
            backend.service.max_model_len,
        )
        asked = prepared.asked
        encoder = self._route.encoder(self._frame(backend, asked))
        async with AsyncExitStack() as running:
            streams = [
                await running.enter_async_context(
                    await _submit(backend, submission, chat=asked.chat)
                )
                for submission in self._submissions(scope, prepared)
            ]
            work = _Work(streams, asked.params.n, Usage(prompt=sum(map(len, prepared.prompts))))
            answer = (
                _Events(work, encoder, asked.include_usage)
                if asked.stream
                else _Whole(work, encoder)
            )
            last = await answer.write(send)
        # Sent when nothing is left to do: the client may go as soon as it has it.
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _frame(self, backend: Backend, asked: request_bodies.Asked) -> Frame:
        return Frame(
            id=f"{self._route.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=asked.model,
            top=asked.params.logprobs,
            usage=asked.include_usage,
            spelled=backend.vocabulary.spelled,
        )

    def _submissions(self, scope: Scope, prepared: Prepared) -> list[Submission]:
        asked, keyed = prepared.asked, scope.get(TENANT)
        return [
            Submission(
                prompt=prompt,
                params=asked.params,
                id=uuid.uuid4().hex,
                tenant=asked.user if keyed is None else keyed,
                salt=self._salter.salt(keyed, asked.cache_salt),
                priority=asked.priority,
                stop=asked.stop,
            )
            for prompt in prepared.prompts
        ]


async def _submit(backend: Backend, submission: Submission, *, chat: bool) -> OutputStream:
    """Raises ApiError for what the engine will never run, in the words of the body's own fields."""
    try:
        return await backend.service.submit(submission)
    except RequestError as error:
        param = "messages" if chat and error.param == "prompt" else error.param
        needed = len(submission.prompt) + (submission.params.max_tokens or 1)
        code = (
            "context_length_exceeded" if needed > backend.service.max_model_len else "invalid_value"
        )
        raise errors.ApiError(400, str(error), param=param, code=code) from None


class _Work(NamedTuple):
    """The running streams of one request, one per prompt, and what they have used so far."""

    streams: Sequence[OutputStream]
    n: int
    usage: Usage

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Every output with its choice's index among all prompts' choices. Raises what ends the
        request.
        """
        async with aclosing(_interleaved(self.streams)) as outputs:
            async for place, output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise errors.internal()
                if output.finish_reason is FinishReason.ABORT:
                    raise errors.ApiError(
                        503, "the request was cancelled on the server", code="aborted"
                    )
                self.usage.completion += len(output.token_ids)
                yield place * self.n + output.index, output
        self.usage.cached = sum(stream.cached_tokens for stream in self.streams)


class _Whole:
    """The answer as one JSON body."""

    def __init__(self, work: _Work, encoder: Encoder) -> None:
        self._work = work
        self._encoder = encoder

    async def write(self, send: Send) -> bytes:
        """Send the head; the last bytes of the body are the result."""
        choices = [Gathered() for _ in range(self._work.n * len(self._work.streams))]
        async with aclosing(self._work.outputs()) as outputs:
            async for index, output in outputs:
                choices[index].add(output)
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        return self._encoder.whole(choices, self._work.usage)


class _Events:
    """The answer as server-sent events, from the first output on."""

    def __init__(self, work: _Work, encoder: Encoder, include_usage: bool) -> None:
        self._work = work
        self._encoder = encoder
        self._include_usage = include_usage
        self._started = False

    async def write(self, send: Send) -> bytes:
        """Send all events but the last, which is the result. Raises only before the first byte."""
        try:
            async with aclosing(self._work.outputs()) as outputs:
                async for index, output in outputs:
                    if not self._started:
                        self._started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                    if events := self._encoder.events(index, output):
                        await send(
                            {"type": "http.response.body", "body": events, "more_body": True}
                        )
        except Exception as error:
            if not self._started:
                raise
            failed_late(error)
            return error_events(errors.of(error))
        return (self._encoder.usage(self._work.usage) if self._include_usage else b"") + DONE


async def _interleaved(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, Output], None]:
    """(place of the stream, output) as they come. Raises what any stream raises."""
    if len(streams) == 1:  # nearly always: no task and no queue between the engine and the client
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue(
        MERGED_AHEAD * len(streams)
    )
    pumps = [
        asyncio.ensure_future(_pump(place, stream, queue)) for place, stream in enumerate(streams)
    ]
    try:
        for _ in streams:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    place: int, stream: OutputStream, queue: asyncio.Queue[tuple[int, Output] | Exception | None]
) -> None:
    try:
        async for output in stream:
            await queue.put((place, output))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
        await queue.put(error)
