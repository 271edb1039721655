"""A server on real sockets in the test's own event loop, and a fake service for it."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from fairlead_runtime.api.ports.server import serve
from fairlead_runtime.api.state.state import NO_RULES, Backend, BodyRules, ServerState
from fairlead_runtime.api.tools.formats import reply_format
from fairlead_runtime.front.doors import Listeners, listen
from fairlead_runtime.outputs import (
    BlockRun,
    BlockState,
    CacheReset,
    CacheView,
    Draining,
    DrainResult,
    Health,
    Output,
    RequestView,
    StreamTimes,
    Submission,
    Take,
)
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason, RequestError
from fairlead_runtime.serving.detokenize import vocabulary_of
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from fairlead_runtime.serving.request_templates import RequestTemplates
from support import tiny

WITHIN = 300.0  # seconds; a limit for hung servers, long enough for a busy machine
MODEL = "tiny"
MAX_MODEL_LEN = 512
FIRST_TOKEN = 10  # the lower ids are special tokens of the tokenizer
TEXT = "naïve 日本 🙂 text, "  # characters of one to four bytes


class FakeStream:
    """Streams a fixed text to every choice, one token per turn of the event loop."""

    def __init__(self, service: "FakeService", submission: Submission) -> None:
        self.request_id = submission.id
        self.cached_tokens = 3
        self.times = StreamTimes()
        self._service = service
        self._submission = submission
        self._outputs = self._script()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        await asyncio.sleep(0)
        for output in self._outputs:
            return output
        if self._service.hang:
            self._service.hanging.set()
            await asyncio.Event().wait()
        if self._service.error is not None:
            raise self._service.error
        raise StopAsyncIteration

    async def forward(self, take: Take) -> None:
        async for output in self:
            if (rest := take(output)) is not None:
                await rest

    async def aclose(self) -> None:
        self._service.live.pop(self.request_id, None)
        self._service.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _script(self) -> "itertools.chain[Output]":
        return itertools.chain.from_iterable(
            self._choice_output(step, index)
            for step in range(self._steps)
            for index in range(self._submission.params.n)
        )

    @property
    def _steps(self) -> int:
        return len(self._service.says) or self._submission.params.max_tokens or 4

    def _choice_output(self, step: int, index: int) -> list[Output]:
        params, service = self._submission.params, self._service
        last = step + 1 == self._steps and not service.hang and service.error is None
        text = service.says or TEXT
        token = FIRST_TOKEN + step
        logprobs = None
        if params.logprobs is not None:
            best = {
                token + 1 + k: Logprob(-0.5 - k, k + 1, f"t{k}") for k in range(params.logprobs)
            }
            logprobs = ({token: Logprob(-20.0, 21, TEXT[step % len(TEXT)]), **best},)
        reason = service.finish if last else None
        return [Output(index, (token,), text[step % len(text)], logprobs, reason)]


@dataclass
class FakeService:
    """A service whose fields set its behaviour."""

    max_model_len: int = MAX_MODEL_LEN
    hang: bool = False  # never end a stream
    error: Exception | None = None  # raised at the end of every stream
    finish: FinishReason = FinishReason.LENGTH
    says: str = ""  # this once, in place of as many characters of TEXT as max_tokens asks for
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    rules: BodyRules = NO_RULES
    refuse: Exception | None = None  # raised by submit
    refuse_after: int = 0  # requests to accept before that
    state: Health = field(default_factory=lambda: Health(alive=True, ready=True))
    live: dict[str, Submission] = field(default_factory=dict)
    seen: list[Submission] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    refusing: bool = False

    async def submit(self, submission: Submission) -> FakeStream:
        if self.refusing:
            raise Draining("draining", retry_after=1.0)
        if self.refuse is not None and len(self.seen) >= self.refuse_after:
            raise self.refuse
        needed = len(submission.prompt) + (submission.params.max_tokens or 1)
        if not submission.prompt:
            raise RequestError("prompt", "is empty")
        if needed > self.max_model_len:
            raise RequestError(
                "max_tokens", f"{len(submission.prompt)} + {needed} exceeds {self.max_model_len}"
            )
        self.seen.append(submission)
        self.live[submission.id] = submission
        return FakeStream(self, submission)

    async def cancel(self, request_id: str) -> bool:
        return self.live.pop(request_id, None) is not None

    def begin_drain(self) -> None:
        self.draining = True

    def refuse_new(self) -> None:
        self.refusing = True

    def resume(self) -> None:
        self.draining = self.refusing = False

    async def drain(self, max_wait: float, waited: float = 0.0) -> DrainResult:
        self.begin_drain()
        self.refuse_new()
        running = len(self.live)
        async with asyncio.timeout(max_wait):
            while self.live:
                self.closed.clear()
                await self.closed.wait()
        return DrainResult(running, 0)

    async def canary(self, max_wait: float = 10.0) -> int:
        return 7

    def health(self) -> Health:
        return self.state

    async def requests(self) -> list[RequestView]:
        return []

    async def reset_prefix_cache(self) -> CacheReset:
        return CacheReset(evicted=4, held=2)

    async def cache(self, start: int) -> CacheView:
        runs = (BlockRun(0, 6, BlockState.FREE, 0, ()),)
        return CacheView(16, 1, 6, 6, 0, 0, 0, start, 6, (), runs)


async def _no_metrics() -> bytes:
    return (
        b"# HELP x y\n# TYPE fairlead_tenant_waiting gauge\n"
        b'fairlead_tenant_waiting{tenant="a"} 1.0\n# HELP z y\n'
    )


def backend_of(service: Any) -> Backend:
    tokenizer = tiny.tokenizer()
    return Backend(
        service=service,
        encoder=PromptEncoder(tokenizer),
        # The tokens of the fake service are not ids of the tokenizer.
        vocabulary=replace(vocabulary_of(tokenizer), token_bytes={}),
        metrics=_no_metrics,
        memory={"planned": {"weights": 1}, "measured": {"weights": 1}},
        died=asyncio.Event(),
        replies=reply_format(
            tokenizer,
            tool_call_parser=service.tool_call_parser,
            reasoning_parser=service.reasoning_parser,
        ),
        rules=service.rules._replace(
            renderer=RequestTemplates(tokenizer) if service.rules.templates else None
        ),
    )


@dataclass
class Server:
    """A running server as its clients see it."""

    state: ServerState
    port: int
    admin_port: int
    task: "asyncio.Task[DrainResult]"
    key: str = "no-key"
    # Closed with the server: a client that is collected later closes itself in another test's loop.
    openai_clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def openai(self) -> AsyncOpenAI:
        client = AsyncOpenAI(
            base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=WITHIN
        )
        self.openai_clients.append(client)
        return client

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=WITHIN)

    def admin(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.admin_url, timeout=WITHIN)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def running_server(
    load: Callable[[], Awaitable[Backend]],
    *,
    wait: bool = True,
    drain_grace: float = 0.0,
    drain_timeout: float = WITHIN,
    **settings: Any,
) -> AsyncIterator[Server]:
    """A server with ``load``'s backend; ``settings``: ServerState's fields, ``connections``."""
    limits = {name: settings.pop(name) for name in ("connections",) if name in settings}
    state = ServerState(name=MODEL, **settings)
    listeners: Listeners = listen("127.0.0.1", 0, 0)
    port, admin_port = (each.getsockname()[1] for each in listeners)
    task = asyncio.create_task(
        serve(
            state,
            listeners,
            load,
            drain_grace=drain_grace,
            drain_timeout=drain_timeout,
            **limits,
        )
    )
    server = Server(state, port, admin_port, task)
    try:
        if wait:
            await until(lambda: state.backend is not None or task.done())
        yield server
    finally:
        for client in server.openai_clients:
            await client.close()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def fake_server(
    service: FakeService | None = None, **settings: Any
) -> AsyncIterator[tuple[Server, FakeService]]:
    fake = service or FakeService()

    async def load() -> Backend:
        return backend_of(fake)

    async with running_server(load, **settings) as server:
        yield server, fake


async def asgi(
    app: ASGIApp, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes]:
    """Send one request to an application without a socket; returns status and body."""
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    all_headers = {"content_type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("x", 80),
        "client": ("y", 1),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in all_headers.items()
        ],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until ``condition`` holds; only the test's own time limit ends the wait
    otherwise.
    """
    while not condition():  # noqa: ASYNC110 - the conditions are the server's own state, which has no events
        await asyncio.sleep(0)


def send_sigterm() -> None:
    """Send SIGTERM to this process, where the server runs. Without the server's handler it would
    end the whole test run, so fail the test instead.
    """
    assert callable(signal.getsignal(signal.SIGTERM)), "the server has no handler for SIGTERM"
    os.kill(os.getpid(), signal.SIGTERM)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def chat(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def events(text: str) -> list[Any]:
    """The events of a stream: JSON values and the string "[DONE]"."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def is_error(body: Mapping[str, Any]) -> bool:
    """Whether the body is OpenAI's error object and nothing else."""
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


def http(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as bytes; underscores in header names become hyphens."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
