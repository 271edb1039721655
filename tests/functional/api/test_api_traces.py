"""Traces: the spans of each request at a collector, and nothing of them where none is asked for."""

import http.server
import json
import logging
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairlead_runtime.api.state import tracing
from fairlead_runtime.api.state.tracing import Tracing
from fairlead_runtime.outputs import QueueFull, ServiceError
from support.api_harness import FakeService, chat, completion, fake_server, run, until
from support.api_harness import http as raw
from support.serve_process import serve

SECRET = "my-own-words"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": f"vendor={SECRET}"}


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies of OTLP over HTTP."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    handler = type("Handler", (Collector,), {"bodies": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def test_a_collector_gets_queue_prefill_and_decode_of_each_request_and_no_text() -> None:
    with collector() as (endpoint, bodies):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "chat-pods"}
        flags = ["--served-name=tiny", "--num-blocks=256", "--block-size=8"]
        with serve("demo:", *flags, environ=environ) as server:
            server.until_logged("serving")
            with server.client() as client:
                asked = chat(SECRET, max_tokens=9, ignore_eos=True, user=SECRET)
                answer = client.post("/v1/chat/completions", json=asked, headers=CALLER)
                whole = answer.json()
                prompts = [f"{SECRET} one", "two"]
                body = completion(prompts, n=2, max_tokens=3, ignore_eos=True, stream=True)
                assert client.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
                refused = client.post("/v1/completions", json=completion("x", n=999, user=SECRET))
                assert refused.status_code == 400
            server.terminate()
            assert server.end() == 0
        assert not [line for line in server.lines if SECRET in line]
    assert not [sent for sent in bodies if SECRET.encode() in sent]
    spans, below, roots = [], defaultdict(list), []
    for sent in bodies:
        for resource in ExportTraceServiceRequest.FromString(sent).resource_spans:
            named = values(resource.resource.attributes)
            assert (named["service.name"], "service.version" in named) == ("chat-pods", True)
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    for span in spans:
        if span.kind == 2:  # server
            roots.append(span)
        else:
            below[span.parent_span_id].append(span)
    chatted, completed, bad = roots
    assert (chatted.trace_id.hex(), chatted.parent_span_id.hex()) == (TRACE, PARENT)
    assert completed.parent_span_id == b""
    seen = values(chatted.attributes)
    assert seen["http.route"] == "/v1/chat/completions"
    assert (seen["http.response.status_code"], seen["gen_ai.request.model"]) == (200, "tiny")
    assert seen["gen_ai.usage.input_tokens"] == whole["usage"]["prompt_tokens"]
    assert seen["gen_ai.usage.output_tokens"] == whole["usage"]["completion_tokens"] == 9
    assert (seen["gen_ai.request.max_tokens"], seen["gen_ai.operation.name"]) == (9, "chat")
    assert seen["fairlead.request.id"] == answer.headers["x-request-id"]
    queue, prefill, decode = below[chatted.span_id]
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    times = [chatted.start_time_unix_nano]
    for span in (queue, prefill, decode):
        times += [span.start_time_unix_nano, span.end_time_unix_nano]
    times.append(chatted.end_time_unix_nano)
    assert times == sorted(times)
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    prompt = values(prefill.attributes)
    assert prompt["fairlead.request.id"] == answer.headers["x-request-id"]
    assert prompt["fairlead.prompt.tokens"] == whole["usage"]["prompt_tokens"]
    assert values(decode.attributes)["fairlead.output.tokens"] == 9
    assert len(below[completed.span_id]) == 2 * 3, "each prompt has its own"
    tokens = [
        values(span.attributes)["fairlead.output.tokens"]
        for span in below[completed.span_id]
        if span.name == "decode"
    ]
    assert tokens == [2 * 3, 2 * 3], "both choices"
    assert below[bad.span_id] == []
    seen = values(bad.attributes)
    assert (seen["http.response.status_code"], seen["error.type"]) == (400, "invalid_value")


def in_memory() -> tuple[Tracing, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    return Tracing("tiny", {}, SimpleSpanProcessor(kept)), kept


async def root(kept: InMemorySpanExporter) -> ReadableSpan:
    """The span of the only request, which ends last, and after the last byte of its answer."""

    def ended() -> list[ReadableSpan]:
        return [span for span in kept.get_finished_spans() if "/v1/" in span.name]

    await until(lambda: bool(ended()))
    (span,) = ended()
    return span


@pytest.mark.parametrize(
    ("service", "stream", "status", "code", "failed"),
    [
        (FakeService(refuse=QueueFull("full", 3.0)), False, 429, "queue_full", False),
        (FakeService(error=ServiceError("lost")), False, 503, "unavailable", True),
        (FakeService(error=ServiceError("lost")), True, 200, "unavailable", True),
    ],
)
def test_a_span_says_how_a_request_failed(
    service: FakeService, stream: bool, status: int, code: str, failed: bool
) -> None:
    async def scenario() -> None:
        asked, kept = in_memory()
        async with fake_server(service, tracing=asked) as (server, _), server.client() as client:
            answer = await client.post("/v1/completions", json=completion(stream=stream))
            assert answer.status_code == status
            span = await root(kept)
            assert span.attributes is not None
            assert span.attributes["http.response.status_code"] == status
            assert span.attributes["error.type"] == code
            assert (span.status.status_code.name == "ERROR") is failed

    run(scenario())


def test_a_client_that_goes_away_leaves_a_span() -> None:
    async def scenario() -> None:
        asked, kept = in_memory()
        service = FakeService(hang=True)
        async with fake_server(service, tracing=asked) as (server, _):
            _, writer = await server.raw()
            body = json.dumps(completion(max_tokens=2)).encode()
            writer.write(raw("POST", "/v1/completions", body))
            await service.hanging.wait()
            writer.close()
            attributes = (await root(kept)).attributes
            assert attributes is not None
            assert attributes["error.type"] == "client_disconnected"

    run(scenario())


@pytest.mark.parametrize(
    "given", ["", "garbage", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01"]
)
def test_a_traceparent_that_is_none_begins_a_new_trace(given: str) -> None:
    async def scenario() -> None:
        asked, kept = in_memory()
        async with fake_server(tracing=asked) as (server, _), server.client() as client:
            headers = {"traceparent": given}
            answer = await client.post("/v1/completions", json=completion(), headers=headers)
            assert answer.status_code == 200
            assert (await root(kept)).parent is None

    run(scenario())


def test_opentelemetrys_sdk_is_not_imported_unless_it_is_asked_for() -> None:
    program = (
        "import sys; import fairlead_runtime.processes.http_process as s; from os import environ;"
        "assert s.Tracing.of('m', environ) is None;"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter');"
        "print([m for m in sys.modules if m.startswith(parts)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "more", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {}]
)
def test_the_usual_variables_switch_traces_off(more: dict[str, str]) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1" if more else "", **more}
    assert Tracing.of("m", environ) is None


def test_without_the_library_the_server_starts_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        assert Tracing.of("m", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}) is None
    assert "pip install 'fairlead[tracing]'" in caplog.text


def test_another_protocol_is_named_as_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}
    with caplog.at_level(logging.WARNING):
        Tracing("m", environ, SimpleSpanProcessor(InMemorySpanExporter()))
        assert not caplog.text
        environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"
        Tracing("m", environ, SimpleSpanProcessor(InMemorySpanExporter()))
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is not supported" in caplog.text


def test_a_collector_that_hangs_does_not_hold_the_end_of_the_process() -> None:
    hanging = threading.Event()

    class Hanging(SpanProcessor):
        def shutdown(self) -> None:
            hanging.wait()

    assert tracing.CLOSE_SECONDS < 5
    Tracing("m", {}, Hanging()).close(max_wait=0.01)
    hanging.set()


def test_a_request_without_a_step_has_no_span_of_one() -> None:
    async def scenario() -> None:
        asked, kept = in_memory()
        async with fake_server(tracing=asked) as (server, _), server.client() as client:
            await client.post("/v1/completions", json=completion())
            await root(kept)
        assert sorted(span.name for span in kept.get_finished_spans()) == [
            "POST /v1/completions",
            "queue",
        ]

    run(scenario())
