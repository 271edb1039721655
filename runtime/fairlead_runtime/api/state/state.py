"""The state both ports share: the model's name, its configuration, and the engine once loaded.

Owns the change from loading to serving to draining.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from fairlead_runtime.api.state.http_load import HttpLoad
from fairlead_runtime.api.state.tracing import Tracing
from fairlead_runtime.api.tools.formats import PLAIN, ReplyFormat
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.tls import Certificates
from fairlead_runtime.outputs import DrainResult, EngineClient, Health
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.metrics import FrontReport
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from fairlead_runtime.serving.request_templates import RequestTemplates
from fairlead_runtime.serving.startup import Startup
from fairlead_runtime.sizing.traffic import BODY, PortBounds

MAX_TENANTS = 100  # with metrics of their own


class BodyRules(NamedTuple):
    """What the server decides about every body. ``sampling``: the values of sampling fields that a
    body leaves out. ``templates``: it may bring a chat template, which ``renderer`` renders.
    ``aliases``: names of the model beside its first one.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})
    templates: bool = False
    renderer: RequestTemplates | None = None
    aliases: tuple[str, ...] = ()


NO_RULES = BodyRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A loaded model and the engine that serves it.

    ``metrics`` returns the Prometheus exposition (text format 0.0.4). ``memory`` has every sizing
    term, planned and measured, as plain JSON values. ``died`` is set when the engine has given up.
    ``replies``: how its tool calls and its reasoning look. ``encoder`` has its tokenizer.
    ``max_body``: bytes of a body, at most.
    """

    service: EngineClient
    encoder: PromptEncoder
    vocabulary: Vocabulary
    metrics: Callable[[], Awaitable[bytes]]
    memory: Mapping[str, Any]
    died: asyncio.Event
    replies: ReplyFormat = PLAIN
    rules: BodyRules = NO_RULES
    max_body: int = BODY


@dataclass(slots=True, kw_only=True)
class ServerState:
    """``attach`` ends loading, ``begin_drain`` readiness, ``refuse_new`` the serving of new
    requests; ``resume`` undoes the last two. ``drain`` decides when.
    """

    name: str  # clients send it as "model"
    startup: Startup = field(default_factory=Startup)
    source: str = ""  # where the model came from, shown by /v1/models
    keys: KeyRing | None = None  # API keys of the public port; None: it needs no key
    certificates: Certificates | None = None  # TLS of the public port; None: it has none
    tracing: Tracing | None = None  # where the environment asks for traces
    load: HttpLoad | None = None  # of the HTTP process, once the ports are open
    port_bounds: PortBounds | None = None  # once the ports are open
    cors_origin: str = ""  # whose pages may read answers of the public port; empty: no other's
    public_metrics: bool = False  # the public port has /metrics, too
    page: bool = False  # the public port has the page to chat
    created: int = field(default_factory=lambda: int(time.time()))
    model_config: bytes | None = None  # config.json, available before the weights are loaded
    backend: Backend | None = None
    draining: bool = False  # not ready
    refusing: bool = False  # the grace of the drain is over
    _requests: int = 0  # that were accepted and have no whole answer yet
    _all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    def attach(self, backend: Backend) -> None:
        self.backend = backend
        if self.draining:
            backend.service.begin_drain()
        if self.refusing:
            backend.service.refuse_new()

    def begin_drain(self) -> None:
        """End readiness; new requests are still served."""
        self.draining = True
        if self.backend is not None:
            self.backend.service.begin_drain()

    def refuse_new(self) -> None:
        """Refuse new requests. Those that were accepted go on, also while their body is read and
        their prompt is prepared: the service does not know them yet.
        """
        self.refusing = True

    def resume(self) -> None:
        """Be ready and serve new requests again."""
        self.draining = self.refusing = False
        if self.backend is not None:
            self.backend.service.resume()

    @contextmanager
    def request(self) -> Iterator[Backend]:
        """The backend, for a new request, which ``answered`` waits for until the block ends.

        Raises ApiError 503 while loading or refusing.
        """
        backend = self.serving()
        self._requests += 1
        self._all_answered.clear()
        try:
            yield backend
        finally:
            self._requests -= 1
            if not self._requests:
                self._all_answered.set()

    async def answered(self) -> None:
        """Wait until every accepted request has its whole answer."""
        if self._requests:
            await self._all_answered.wait()

    async def end_streams(self, timeout: float, waited: float) -> DrainResult:  # noqa: ASYNC109 - 0 is allowed, and its end is no error
        """Let the engine finish its requests for ``timeout`` seconds, and abort the others."""
        if self.backend is None:
            return DrainResult(0, 0)
        return await self.backend.service.drain(timeout, waited)

    def serving(self) -> Backend:
        """The backend, for a new request. Raises ApiError 503 while loading or refusing."""
        if self.refusing:
            raise ApiError(
                503,
                "the server is shutting down; retry on another replica",
                code="draining",
                headers={"retry-after": "1", "connection": "close"},
            )
        return self.loaded()

    def loaded(self) -> Backend:
        """The backend, draining or not. Raises ApiError 503 while the model loads."""
        if self.backend is None:
            raise ApiError(
                503, "the model is still loading", code="not_ready", headers={"retry-after": "5"}
            )
        return self.backend

    def health(self) -> Health:
        """Alive and not ready while loading or draining, else the engine's own health."""
        if self.backend is None:
            return Health(alive=True, ready=False, reason="the model is still loading")
        health = self.backend.service.health()
        if self.draining and health.ready:
            return Health(
                health.alive, ready=False, reason="draining", last_step_age=health.last_step_age
            )
        return health

    def front(self, resident_bytes: int = 0) -> FrontReport:
        """What the HTTP process counts itself. ``resident_bytes``: the RAM that it uses."""
        keys, certificates, load = self.keys, self.certificates, self.load
        if keys is not None:
            keys.refresh()
        if certificates is not None:
            certificates.refresh()
        report = FrontReport(
            api_keys=0 if keys is None else len(keys),
            api_key_file_broken=keys is not None and keys.broken,
            certificate_broken=certificates is not None and certificates.broken,
            unauthorized=0 if keys is None else keys.unauthorized,
            key_limited=0 if keys is None else keys.limited,
            tenants=() if keys is None else keys.names[:MAX_TENANTS],
            resident_bytes=resident_bytes,
        )
        if load is None:
            return report
        return replace(
            report,
            connections=load.connections,
            body_bytes=load.body_bytes,
            logprob_bytes=load.logprob_bytes,
            loop_lag=load.loop_lag.copy(),
        )
