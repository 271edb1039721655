"""The generating routes, from the first byte of the request to the last of the answer.

Owns the order: body, prompts, submission, first output, answer. Cancels the running choices when an
error or the client ends the request early. ``response_bodies`` owns the shapes.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from starlette.types import Message, Receive, Scope, Send

from fairlead_runtime.api.answers.prompt_echo import PromptEcho
from fairlead_runtime.api.answers.response_bodies import (
    PIECE,
    ChatEncoder,
    CompletionEncoder,
    Encoder,
    Frame,
    Usage,
    WholeChoice,
)
from fairlead_runtime.api.answers.token_ids import TokenIds
from fairlead_runtime.api.anthropic.bodies import check_sent, message
from fairlead_runtime.api.anthropic.encoder import MessageEncoder
from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.field_names import header_of
from fairlead_runtime.api.bodies.prompts import (
    Check,
    PreparedRequest,
    Validate,
    check_nothing,
    prepare,
)
from fairlead_runtime.api.responses.bodies import response
from fairlead_runtime.api.responses.encoder import ResponseEncoder
from fairlead_runtime.api.routes.eager import Rest, run_eagerly
from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.api.state.tracing import SCOPE as TRACE
from fairlead_runtime.api.state.tracing import Trace
from fairlead_runtime.api.tools.reasoning import END
from fairlead_runtime.front import errors
from fairlead_runtime.front.access_log import log_late_failure
from fairlead_runtime.front.auth import key_of, tenant_of
from fairlead_runtime.front.deadline import TimedStream
from fairlead_runtime.front.limits import (
    LogprobBytes,
    PromptPool,
    answer_bytes,
    read_body,
    while_connected,
)
from fairlead_runtime.outputs import Output, OutputStream, Submission
from fairlead_runtime.request.sequence import (
    Failure,
    FailureKind,
    FinishReason,
    RequestError,
    SamplingParams,
)
from fairlead_runtime.request.structured import PARAM

END_TOKENS = 32  # of a prompt, in which it may begin to reason
MERGED_AHEAD = 8  # outputs per prompt that may wait to be written

Headers = list[tuple[bytes, bytes]]

_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The differences between the routes. ``prefix``: of an answer's id. ``operation``: in traces,
    as OpenTelemetry's conventions for generative AI name it. ``check``: of a body as it was sent.
    """

    prefix: str
    operation: str
    validate: Validate
    encoder: Callable[[Frame], Encoder]
    check: Check = check_nothing


CHAT = Endpoint("chatcmpl-", "chat", request_bodies.chat, ChatEncoder)
COMPLETIONS = Endpoint("cmpl-", "text_completion", request_bodies.completion, CompletionEncoder)
RESPONSES = Endpoint("resp_", "chat", response, ResponseEncoder)
MESSAGES = Endpoint("msg_", "chat", message, MessageEncoder, check_sent)


class EndpointHandler:
    """One endpoint as an ASGI application. ``pool`` is shared between the routes."""

    def __init__(self, state: ServerState, endpoint: Endpoint, pool: PromptPool) -> None:
        self._state = state
        self._endpoint = endpoint
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = asyncio.get_running_loop().time()
        with self._state.request() as backend:
            prepared = await self._prepared(scope, receive, backend)
            await while_connected(receive, self._answer(scope, backend, prepared, send, arrived))

    async def _prepared(self, scope: Scope, receive: Receive, backend: Backend) -> PreparedRequest:
        """Read and prepare the body. It is not held any longer: an answer takes minutes."""
        with self._pool.bodies.hold() as take:
            preparing = self._pool.run(
                tenant_of(scope),
                prepare,
                await read_body(scope, receive, take, backend.max_body),
                self._endpoint.validate,
                self._state.name,
                backend.encoder,
                backend.service.max_model_len,
                backend.rules,
                self._endpoint.check,
            )
            return await while_connected(receive, preparing)

    async def _answer(
        self,
        scope: Scope,
        backend: Backend,
        prepared: PreparedRequest,
        send: Send,
        arrived: float,
    ) -> None:
        request = prepared.request
        backend.replies.check(request.tools.use)
        usage = Usage(prompt=sum(map(len, prepared.prompts)))
        request_id = scope[errors.REQUEST_ID]
        encoder = self._endpoint.encoder(self._frame(request_id, backend, prepared, usage))
        trace: Trace | None = scope.get(TRACE)
        async with AsyncExitStack() as running:
            take = running.enter_context(self._pool.answers.hold())
            buffered = self._endpoint is RESPONSES or not request.stream
            take(_answer_bytes(prepared, backend.service.max_model_len, buffered=buffered))
            streams = [
                await running.enter_async_context(
                    _timed(
                        await _submit(backend, submission, request.sent_names),
                        arrived,
                        request.timeout,
                    )
                )
                for submission in self._submissions(scope, backend, prepared)
            ]
            if trace is not None:
                trace.operation, trace.params = self._endpoint.operation, request.params
                trace.prompt_tokens = usage.prompt
                trace.streams = [(stream.request_id, stream.times) for stream in streams]
            generation = _Generation(
                streams,
                request.params.n,
                usage,
                request.sent_names,
                prompt_only=request.prompt_only,
                request_id=request_id,
                beside=_beside(prepared),
            )
            kind, headers = (_StreamedAnswer, _SSE) if request.stream else (_JsonAnswer, _JSON)
            headers = [*headers, *header_of(request.ignored)]
            answer = kind(generation, encoder, self._pool, headers)
            last = await answer.write(send)
            if trace is not None and answer.failure is not None:
                trace.failure = answer.failure.code
        # Sent last: the client may disconnect as soon as it has it.
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _frame(
        self, request_id: str, backend: Backend, prepared: PreparedRequest, usage: Usage
    ) -> Frame:
        request, vocabulary = prepared.request, backend.vocabulary
        of_client = request.request_id.removeprefix(self._endpoint.prefix)
        return Frame(
            id=self._endpoint.prefix + (of_client or request_id),
            created=int(time.time()),
            model=prepared.model,
            top=request.params.logprobs,
            usage=request.include_usage,
            token_bytes=vocabulary.token_bytes,
            special=vocabulary.special,
            hidden=vocabulary.special if request.params.skip_special_tokens else frozenset(),
            first_text=vocabulary.first_text,
            prompts=PromptEcho(
                n=request.params.n,
                ids=prepared.prompts,
                echo=prepared.echo,
                token_text=vocabulary.token_text,
                top=request.prompt_logprobs,
            ),
            ids=TokenIds(
                enabled=request.show_token_ids, n=request.params.n, prompts=prepared.prompts
            ),
            by_id=request.tokens_by_id,
            begun=request.begun,
            running=usage if request.running_usage else None,
            new_parser=functools.partial(
                backend.replies.parser,
                request.tools.use,
                prompt_end=prepared.prompt_end,
                show_reasoning=request.show_reasoning,
            ),
            forced=request.tools.use.forced is not None,
            echo=request.echo,
            request_id=request_id,
        )

    def _submissions(
        self, scope: Scope, backend: Backend, prepared: PreparedRequest
    ) -> list[Submission]:
        request, prompts, key = prepared.request, prepared.prompts, key_of(scope)
        request_id, several = scope[errors.REQUEST_ID], len(prompts) > 1
        tools = bool(request.tools.for_template)
        chat = self._endpoint is not COMPLETIONS
        visible = backend.replies.shown_ids(tools=tools) if chat else frozenset()
        params, guided = request.params, request.params.guided
        if guided is not None and chat and backend.replies.begins_inside(prepared.prompt_end):
            params = replace(params, structured_outputs=guided.after_reasoning(END))
        budget = request.thinking_budget
        if self._endpoint is MESSAGES and not backend.replies.reasoning:
            budget = None  # coding tools send one to every model
        bounded = [
            _bounded(backend, params, budget, prepared.prompt_end or prompt) for prompt in prompts
        ]
        salt, tenant = (request.cache_salt or "").encode(), request.user
        priority = request.priority or 0
        if key is not None:
            salt, tenant = key.salt(salt), key.tenant
            priority = key.limits.priority(request.priority)
        return [
            Submission(
                prompt=prompt,
                params=bounded[number],
                id=f"{request_id}-{number}" if several else request_id,
                tenant=tenant,
                salt=salt,
                priority=priority,
                visible_tokens=visible,
                whole=not request.stream,
            )
            for number, prompt in enumerate(prompts)
        ]


def _bounded(
    backend: Backend, params: SamplingParams, budget: int | None, prompt: str | Sequence[int]
) -> SamplingParams:
    """``params`` with a bound on the reasoning after ``prompt``, the ids or the end of its text.
    Raises ApiError.
    """
    if budget is None:
        return params
    end = prompt if isinstance(prompt, str) else backend.vocabulary.decode([*prompt[-END_TOKENS:]])
    return replace(params, reasoning=backend.replies.bounded(end, budget))


def _answer_bytes(prepared: PreparedRequest, max_model_len: int, *, buffered: bool) -> int:
    """What an answer's log-probabilities take: those of the prompts always, of the output where the
    answer is ``buffered``, as the last event of a response is too; text alone is small. Raises
    ApiError.
    """
    params, prompts = prepared.request.params, prepared.prompts
    chunks: list[LogprobBytes] = []
    if buffered and params.logprobs is not None:
        longest = max(0, max_model_len - min(map(len, prompts)))
        tokens, choices = min(params.max_tokens or longest, longest), len(prompts) * params.n
        words = f"{choices} choices * {tokens} max_tokens"
        chunks.append(LogprobBytes("logprobs", words, choices * tokens, params.logprobs))
    if params.prompt_logprobs is not None:
        tokens = sum(map(len, prompts))
        words = f"{tokens} prompt tokens"
        chunks.append(LogprobBytes("prompt_logprobs", words, tokens, params.prompt_logprobs))
    try:
        return answer_bytes(chunks)
    except errors.ApiError as error:
        raise error.renamed(prepared.request.sent_names) from None


async def _submit(
    backend: Backend, submission: Submission, sent_names: Mapping[str, str]
) -> OutputStream:
    """Raises ApiError, with the body's own field names, for a request the engine can never run."""
    try:
        return await backend.service.submit(submission)
    except RequestError as error:
        error = error.renamed(sent_names)
        needed = len(submission.prompt) + (submission.params.max_tokens or 1)
        code = (
            "context_length_exceeded" if needed > backend.service.max_model_len else "invalid_value"
        )
        raise errors.ApiError(400, str(error), param=error.param, code=code) from None


def _beside(prepared: PreparedRequest) -> list[int]:
    """Of each prompt what its choices show of it: characters, and token ids."""
    echo = prepared.echo or [""] * len(prepared.prompts)
    ids = prepared.request.show_token_ids
    return [
        len(text) + ids * len(prompt) for text, prompt in zip(echo, prepared.prompts, strict=True)
    ]


def _timed(stream: OutputStream, arrived: float, timeout: float | None) -> OutputStream:
    return stream if timeout is None else TimedStream(stream, arrived + timeout)


class _Generation(NamedTuple):
    """The running streams of one request, one per prompt, and their token usage so far."""

    streams: Sequence[OutputStream]
    n: int
    usage: Usage
    sent_names: Mapping[str, str]
    prompt_only: bool = False  # the generated token is no part of the answer
    request_id: str = ""
    beside: Sequence[int] = (0,)  # by stream, as WholeChoice has it

    async def forward(self, take: Callable[[int, Output], Rest | None]) -> None:
        """Let ``take`` have every output with its choice's index among the choices of all prompts;
        await what it returns before the next. Raises the error that ends the request.
        """
        if len(self.streams) == 1:  # the usual case needs neither tasks nor a queue
            await self.streams[0].forward(lambda output: take(output.index, self._shown(output)))
        else:
            async with aclosing(_interleaved(self.streams)) as outputs:
                async for place, output in outputs:
                    rest = take(place * self.n + output.index, self._shown(output))
                    if rest is not None:
                        await rest
        self.count_cached()

    def count_cached(self) -> None:
        """Known from a stream's first output on."""
        self.usage.cached = sum(stream.cached_tokens for stream in self.streams)

    def _shown(self, output: Output) -> Output:
        """The output as the answer shows it, counted. Raises what its end stands for."""
        if output.finish_reason is FinishReason.ERROR:
            match output.failure:
                case Failure(message, FailureKind.CONSTRAINTS):
                    raise errors.ApiError(400, message, code="no_token_allowed")
                case Failure(message, FailureKind.GRAMMAR):
                    raise RequestError(PARAM, message).renamed(self.sent_names)
            raise errors.internal_error()
        if output.finish_reason is FinishReason.ABORT:
            raise errors.ApiError(503, "the server cancelled the request; retry", code="aborted")
        visible = _without_tokens(output) if self.prompt_only else output
        self.usage.completion += len(visible.token_ids)
        return visible


def _without_tokens(output: Output) -> Output:
    return Output(
        output.index,
        (),
        "",
        None if output.logprobs is None else (),
        FinishReason.LENGTH,
        prompt_logprobs=output.prompt_logprobs,
    )


class _JsonAnswer:
    """The answer as one JSON body."""

    failure = None  # is raised

    def __init__(
        self,
        generation: _Generation,
        encoder: Encoder,
        pool: PromptPool,
        headers: Headers = _JSON,
    ) -> None:
        self._generation = generation
        self._encoder = encoder
        self._pool = pool
        self._headers = headers

    async def write(self, send: Send) -> bytes:
        """Send the head; return the last bytes of the body."""
        generation = self._generation
        choices = [WholeChoice(each) for each in generation.beside for _ in range(generation.n)]
        await generation.forward(lambda index, output: choices[index].add(output))
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        chunks = self._encoder.body_pieces(choices, generation.usage)
        if all(choice.short for choice in choices):
            return b"".join(chunks)
        piece = await self._pool.encode(_next_piece, chunks)
        while following := await self._pool.encode(_next_piece, chunks):
            await send(_part(piece))
            piece = following
        return piece


def _next_piece(chunks: Iterator[bytes]) -> bytes:
    """Join pieces to at least PIECE bytes; less at the end."""
    piece = bytearray()
    for chunk in chunks:
        piece += chunk
        if len(piece) >= PIECE:
            break
    return bytes(piece)


class _StreamedAnswer:
    """The answer as server-sent events, from the first output on."""

    def __init__(
        self,
        generation: _Generation,
        encoder: Encoder,
        pool: PromptPool,
        headers: Headers = _SSE,
    ) -> None:
        self._generation = generation
        self._encoder = encoder
        self._pool = pool
        self._headers = headers
        self._started = False
        self.failure: errors.ApiError | None = None  # after the first byte

    async def write(self, send: Send) -> bytes:
        """Send all events but the last and return that. Raises only before the first byte."""

        def take(index: int, output: Output) -> Rest | None:
            if not self._started or output.logprobs or output.prompt_logprobs:
                return self._send(send, index, output)
            events = self._encoder.events(index, output)
            return run_eagerly(send(_part(events))) if events else None

        try:
            await self._generation.forward(take)
        except Exception as error:
            if not self._started:
                raise
            log_late_failure(error, self._generation.request_id)
            self.failure = errors.from_exception(error)
            return self._encoder.failure(self.failure)
        return self._encoder.ending(self._generation.usage)

    async def _send(self, send: Send, index: int, output: Output) -> None:
        """Send the head before the first output. Log-probabilities are encoded in the thread; text
        alone takes less than the way there.
        """
        if not self._started:
            self._started = True
            self._generation.count_cached()
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if output.logprobs or output.prompt_logprobs:
            events = await self._pool.encode(self._encoder.events, index, output)
        else:
            events = self._encoder.events(index, output)
        if events:
            await send(_part(events))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _interleaved(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, Output], None]:
    """(position of the stream, output) in order of arrival. Raises what any stream raises."""
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
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        await queue.put(error)
