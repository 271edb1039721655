"""Traces of the generating requests, sent by OTLP where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.

A request is one span, and its queue, prefill and decode are spans below it. They are made when it
has ended, from times that were measured anyway. Owns the environment variables and the attributes:
numbers, ids and the server's own names, nothing that a user wrote. Without that variable
OpenTelemetry's SDK is not imported.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_runtime.front.errors import REQUEST_ID, from_exception
from fairlead_runtime.front.limits import ClientDisconnected
from fairlead_runtime.outputs import StreamTimes
from fairlead_runtime.request.sequence import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = "http/protobuf"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SCOPE = "fairlead.trace"  # the scope's entry for the request's Trace; absent without tracing
CLOSE_SECONDS = 2.0  # for the last spans at the end of the process
DISCONNECTED = 499  # the status in logs and spans when the client has gone

_log = logging.getLogger("fairlead.api")


@dataclass(slots=True)
class Trace:
    """What is known of one request. Times by the machine's monotonic clock, in seconds."""

    began: float
    operation: str = ""
    params: SamplingParams | None = None
    prompt_tokens: int = 0
    streams: list[tuple[str, StreamTimes]] = field(default_factory=list)  # by prompt, with its id
    failure: str = ""  # the code of an error after the first byte


class Tracing:
    """``model`` is the served name. ``processor`` gets the spans when they have ended."""

    def __init__(
        self, model: str, environ: Mapping[str, str], processor: "SpanProcessor | None" = None
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        release = version("fairlead")
        named = {"service.name": "fairlead", "service.version": release}
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._provider.get_tracer("fairlead", release)
        self._model = model
        protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), PROTOCOL)
        if protocol != PROTOCOL:
            _log.warning("traces are sent as %s: %s is not supported", PROTOCOL, PROTOCOLS[1])

    @classmethod
    def of(cls, model: str, environ: Mapping[str, str]) -> Self | None:
        """None unless the environment asks for traces and OpenTelemetry is installed."""
        if not any(environ.get(name) for name in ENDPOINTS):
            return None
        if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        if environ.get("OTEL_TRACES_EXPORTER") == "none":
            return None
        try:
            return cls(model, environ)
        except ImportError:
            fix = "pip install 'fairlead[tracing]'"
            _log.warning("%s is set, but no traces are sent: %s", ENDPOINTS[1], fix)
            return None

    def close(self, max_wait: float = CLOSE_SECONDS) -> None:
        """Send the last spans, or drop them when that takes longer than ``max_wait`` seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(max_wait)

    def record(self, scope: Scope, trace: Trace, status: int, error: str) -> None:
        """The spans of a request that has ended now. ``error`` is a code of ours, or empty."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        ended = time.monotonic()
        clock = time.time_ns() - int(ended * 1e9)  # from the monotonic clock to the time of day

        def at(seconds: float) -> int:
            return clock + int(seconds * 1e9)

        route = scope["path"]  # a route without parameters
        facts: dict[str, Any] = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": status,
            "fairlead.request.id": scope[REQUEST_ID],
            **self._attributes(trace),
            **({"error.type": error} if error else {}),
        }
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=_caller(scope),
            kind=SpanKind.SERVER,
            start_time=at(trace.began),
            attributes=facts,
        )
        if error and (status >= 500 or trace.failure):
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for number, (request_id, times) in enumerate(trace.streams):
            attributes: dict[str, Any] = {
                "fairlead.request.id": request_id,
                "fairlead.prompt.index": number,
            }
            for name, began, until, more in _phases(times, ended):
                phase = self._tracer.start_span(
                    name, context=below, start_time=at(began), attributes=attributes | more
                )
                phase.end(at(until))
        span.end(at(ended))

    def _attributes(self, trace: Trace) -> dict[str, Any]:
        """OpenTelemetry's semantic conventions for generative AI."""
        attributes: dict[str, Any] = {"gen_ai.request.model": self._model}
        params = trace.params
        if params is not None:
            attributes |= {
                "gen_ai.operation.name": trace.operation,
                "gen_ai.request.choice.count": params.n,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": trace.prompt_tokens,
                "gen_ai.usage.output_tokens": sum(times.tokens for _, times in trace.streams),
            }
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return attributes


def _phases(times: StreamTimes, now: float) -> list[tuple[str, float, float, dict[str, int]]]:
    """Name, start, end and attributes of each phase that has begun."""
    started, first = times.started, times.first_token
    phases: list[tuple[str, float, float, dict[str, int]]] = [
        ("queue", times.submitted, now if started is None else started, {})
    ]
    if started is not None:
        tokens = {
            "fairlead.prompt.tokens": times.prompt_tokens,
            "fairlead.prompt.cached_tokens": times.cached_tokens,
        }
        phases.append(("prefill", started, now if first is None else first, tokens))
    if first is not None:
        until = first if times.last_token is None else times.last_token
        phases.append(("decode", first, until, {"fairlead.output.tokens": times.tokens}))
    return phases


def _caller(scope: Scope) -> "Context":
    """The caller's span. Its ``tracestate`` is left out: it may hold any text."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parents = [value for name, value in scope["headers"] if name == b"traceparent"]
    carrier = {"traceparent": parents[0].decode("latin-1")} if len(parents) == 1 else {}
    return TraceContextTextMapPropagator().extract(carrier)


class Traced:
    """An application of a generating route, with a trace of each request."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = scope[SCOPE] = Trace(time.monotonic())
        status, code = 0, ""

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except ClientDisconnected:
            status, code = status or DISCONNECTED, "client_disconnected"
            raise
        except Exception as error:
            refusal = from_exception(error)
            status, code = refusal.status, refusal.code or str(refusal.status)
            raise
        finally:
            self._tracing.record(scope, trace, status, code or trace.failure)
