"""Routes beside the generating ones, what a port says about routes that it lacks, and HTTP's own
rules for methods and targets.
"""

import asyncio
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlead_runtime.api.ports import elsewhere
from fairlead_runtime.api.ports.app import admin_app, public_app
from fairlead_runtime.api.routes.tokenize import tokenizer_info
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.drain import Drain
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.limits import PromptPool
from support import tiny
from support.api_harness import MODEL, chat, completion, fake_server, is_error, run, until

KEY = "a-key-of-decent-length-0123456789"
PROBES = ("/healthz", "/readyz", "/health", "/ping")


def test_the_tokenizer_is_described_as_in_vllm_and_names_no_file() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            info = (await client.get("/tokenizer_info")).json()
            tokenizer = tiny.tokenizer()
            assert info["tokenizer_class"] == type(tokenizer).__name__
            assert info["chat_template"] == tokenizer.chat_template
            assert info["eos_token"] == tokenizer.eos_token
            assert not [name for name in info if name.endswith("_file") or "path" in name]

    run(scenario())


def test_settings_of_a_tokenizer_that_json_lacks_are_plain_values() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.init_kwargs |= {
        "vocab_file": "/home/someone/vocab.json",
        "name_or_path": "/home/someone",
        "model_max_length": 10**30,
        "added_tokens_decoder": {0: tokenizer.added_tokens_decoder[0]},
        "extra": ({1, 2}, b"x"),
    }
    info = tokenizer_info(tokenizer)
    assert info["model_max_length"] == 1e30
    assert info["added_tokens_decoder"] == {"0": tokenizer.added_tokens_decoder[0].content}
    assert "someone" not in json.dumps(info)


def test_the_document_of_the_port_is_served_as_it_is_written() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            answer = await client.get("/openapi.json")
            written = (files("fairlead_runtime.api.ports") / "openapi.json").read_bytes()
            assert answer.headers["content-type"] == "application/json"
            assert answer.content == written

    run(scenario())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (chat(max_tokens=3), "chat.completion"),
        (completion(max_tokens=3), "text_completion"),
        ({"model": MODEL, "input": "hello", "max_output_tokens": 3}, "response"),
        # The field that is not null decides; a chat comes first.
        ({**completion(max_tokens=3), "messages": None, "input": None}, "text_completion"),
    ],
)
def test_an_invocation_is_what_its_body_asks_for(body: dict[str, Any], kind: str) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, fake), server.client() as client:
            answer = await client.post("/invocations", json=body)
            assert (answer.status_code, answer.json()["object"]) == (200, kind)
            streamed = await client.post("/invocations", json={**body, "stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert len(fake.seen) == 2

    run(scenario())


@pytest.mark.parametrize(
    "more", [{"system": "x"}, {"anthropic_version": "bedrock-2023-05-31"}, {"system": [], "n": 1}]
)
def test_an_invocation_of_anthropics_api_is_a_message(more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            answer = await client.post("/invocations", json=chat(max_tokens=3) | more)
            assert (answer.status_code, answer.json()["type"]) == (200, "message"), answer.text
            chatted = await client.post(
                "/invocations", json=chat(max_tokens=3) | dict.fromkeys(more)
            )
            assert chatted.json()["object"] == "chat.completion"

    run(scenario())


@pytest.mark.parametrize(
    ("content", "param"),
    [(b'{"max_tokens": 1}', "messages"), (b"[]", None), (b'{"messages": 1}', "messages")],
)
def test_an_invocation_without_a_prompt_is_refused(content: bytes, param: str | None) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            kind = {"content-type": "application/json"}
            answer = await client.post("/invocations", content=content, headers=kind)
            assert is_error(answer.json())
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert (await client.post("/invocations", content=content)).status_code == 415

    run(scenario())


def test_an_invocation_gives_its_bytes_back_and_counts_as_one_request() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for _ in range(3):
                await client.post("/invocations", json=completion(max_tokens=1))
            load = server.state.load
            assert load is not None
            assert load.body_bytes == 0
            await until(lambda: not server.state._requests)

    run(scenario())


def test_ping_may_be_posted() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            assert (await client.post("/ping")).status_code == 200
            server.state.begin_drain()
            assert (await client.post("/ping")).status_code == 503

    run(scenario())


def test_metrics_are_public_only_where_that_is_asked_for_and_then_behind_the_keys(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            answer = await client.get("/metrics")
            assert answer.status_code == 404
            assert "--public-metrics" in answer.json()["error"]["message"]
        settings: dict[str, Any] = {"public_metrics": True, "keys": KeyRing(str(keys))}
        async with fake_server(**settings) as (server, _), server.client() as client:
            assert (await client.get("/metrics")).status_code == 401
            answer = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
            assert answer.content.startswith(b"# HELP")
            async with server.admin() as admin:
                whole = (await admin.get("/metrics")).content
            assert b"fairlead_tenant_waiting{" in whole
            assert b"tenant" not in answer.content
            lines = whole.splitlines(keepends=True)
            assert b"".join(line for line in lines if b"tenant" not in line) == answer.content

    run(scenario())


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/metrics", "use /metrics of the admin port, or serve with --public-metrics"),
        ("/reset_prefix_cache", "use /reset_prefix_cache of the admin port"),
        ("/flush_cache", "use /reset_prefix_cache of the admin port"),
        ("/load", "use /metrics of the admin port, or serve with --public-metrics"),
        ("/docs", "use /openapi.json of the public port"),
        ("/generate", "use /v1/completions of the public port"),
        ("/chat/completions", "use /v1/chat/completions of the public port"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions of the public port"),
        ("/openai/v1/responses/", "use /v1/responses of the public port"),
        ("/messages", "use /v1/messages of the public port"),
        ("/v1/completions/", "use /v1/completions of the public port"),
        ("/v1/embeddings", "embeddings, scores and rankings are not served for now"),
        ("/rerank", "embeddings, scores and rankings are not served for now"),
        ("/v1/audio/speech", "reads and writes text only"),
        ("/v1/responses/resp_1", "nothing is stored"),
        ("/v1", "base URL"),
        ("/", "GET /v1/models"),
    ],
)
def test_a_route_of_another_server_says_where_it_is_here(path: str, hint: str) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for method in ("GET", "POST"):
                answer = await client.request(method, path)
                assert is_error(answer.json())
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (404, "not_found")
                assert hint in error["message"]

    run(scenario())


def test_each_port_names_the_other_one() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            for path in ("/v1/chat/completions", "/v1/v1/chat/completions"):
                message = (await admin.post(path)).json()["error"]["message"]
                assert message.endswith("use /v1/chat/completions of the public port")
            unknown = (await admin.get("/a-path-that-nobody-has")).json()["error"]["message"]
            assert unknown == "this port has no such route"

    run(scenario())


def test_the_hints_know_the_routes_of_both_ports() -> None:
    state, pool = ServerState(name="tiny"), PromptPool()
    pool.close()
    apps: list[Any] = [public_app(state, pool), admin_app(state, Drain(state, grace=0, timeout=0))]
    paths = []
    for outer in apps:
        app = outer
        while hasattr(app, "_app"):
            app = app._app
        paths.append({route.path for route in app.router.routes if "{" not in route.path})
    assert paths[0] - set(PROBES) == elsewhere.PUBLIC_PATHS
    assert paths[1] - {"/", *PROBES} == elsewhere.ADMIN_PATHS


def test_a_wrong_method_is_told_every_right_one() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            async with server.client() as client:
                answer = await client.get("/v1/chat/completions")
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
                assert "use POST" in answer.json()["error"]["message"]
                assert (await client.put("/ping")).headers["allow"] == "GET, HEAD, POST"
            async with server.admin() as admin:
                assert (await admin.get("/drain")).headers["allow"] == "DELETE, POST"

    run(scenario())


def test_head_is_answered_as_get_is_without_the_body() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client, server.admin() as admin:
            asked = [(client, path) for path in (*PROBES, "/v1/models", "/version")]
            asked += [(admin, path) for path in (*PROBES, "/metrics", "/debug/memory", "/")]
            for port, path in asked:
                got, head = await port.get(path), await port.head(path)
                assert (head.status_code, head.content) == (200, b""), path
                assert head.headers["content-length"] == got.headers["content-length"]
                assert head.headers["content-type"] == got.headers["content-type"]
            assert (await client.head("/nowhere")).status_code == 404
            assert (await client.head("/v1/completions")).status_code == 405
            server.state.begin_drain()
            assert (await client.head("/readyz")).status_code == 503

    run(scenario())


def test_head_needs_a_key_where_get_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)

    async def scenario() -> None:
        async with fake_server(keys=KeyRing(str(keys))) as (server, _), server.client() as client:
            assert (await client.head("/v1/models")).status_code == 401
            assert (await client.head("/health")).status_code == 200

    run(scenario())


async def _answer_to(port: int, target: str, method: str = "GET") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://example.test:8000/v1/models", 200),
        ("HTTPS://example.test/v1/models?x=1", 200),
        ("http://[::1]:8000/v1/models", 200),
        ("http://example.test", 404),
        ("http://example.test?x=/v1/models", 404),
        ("http://example.test/nowhere", 404),
        ("http:///v1/models", 404),
        ("ftp://example.test/v1/models", 404),
    ],
)
def test_a_target_in_absolute_form_is_its_path(target: str, status: int) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            answer = await _answer_to(server.port, target)
            assert answer.startswith(b"HTTP/1.1 %d " % status)

    run(scenario())


def test_a_target_in_absolute_form_needs_a_key_as_its_path_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)

    async def scenario() -> None:
        async with fake_server(keys=KeyRing(str(keys))) as (server, _):
            for target, status in (
                ("http://x/v1/models", 401),
                ("http://x/healthz/v1/models", 401),
                ("http://healthz/v1/models", 401),
                ("http://x/healthz", 200),
            ):
                answer = await _answer_to(server.port, target)
                assert answer.startswith(b"HTTP/1.1 %d " % status), target

    run(scenario())


# What browsers send with a page's POST: from itself, from elsewhere, from a form.
LOCAL = "localhost:9000"
OWN: list[dict[str, str]] = [
    {},
    {"host": "any-name.example.com"},
    {"host": LOCAL, "origin": f"http://{LOCAL}", "sec-fetch-site": "same-origin"},
    {"host": "127.0.0.1:9000", "origin": "http://127.0.0.1:9000"},
    {"host": "[::1]:9000", "origin": "http://[::1]:9000", "sec-fetch-site": "same-origin"},
    {"host": "10.1.2.3:9000", "origin": "HTTP://10.1.2.3:9000"},
    {"host": "chat.models.svc:9000", "origin": "http://chat.models.svc:9000"},
    {"host": "chat.models.svc.cluster.local", "origin": "http://chat.models.svc.cluster.local"},
    {"host": "pod:9000", "origin": "http://pod:9000"},
    {"host": LOCAL, "sec-fetch-site": "none"},
    {"content-type": "application/json"},
]
FOREIGN: list[dict[str, str]] = [
    {"host": LOCAL, "origin": "https://example.com"},
    {"host": LOCAL, "origin": "http://localhost:8000"},
    {"host": LOCAL, "origin": "http://localhost"},
    {"host": LOCAL, "origin": "null"},
    {"host": LOCAL, "origin": ""},
    {"host": LOCAL, "origin": "http://[::1"},
    {"host": LOCAL, "origin": f"http://{LOCAL}@example.com"},
    {"host": LOCAL, "sec-fetch-site": "cross-site"},
    {"host": LOCAL, "sec-fetch-site": "same-site"},
    {"host": LOCAL, "origin": f"http://{LOCAL}", "sec-fetch-site": "cross-site"},
    # A page whose name was made to point here.
    {"host": "evil.example.com:9000", "origin": "http://evil.example.com:9000"},
    {"host": "evil.example.com:9000", "sec-fetch-site": "same-origin"},
    {"host": "localhost.example.com", "origin": "http://localhost.example.com"},
    {"host": "127.0.0.1.example.com", "origin": "http://127.0.0.1.example.com"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "Multipart/form-data; boundary=x"},
    {"content-type": "text/plain;charset=UTF-8"},
]
CHANGES = [
    ("POST", "/drain"),
    ("DELETE", "/drain"),
    ("POST", "/canary"),
    ("POST", "/reset_prefix_cache"),
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_changes_nothing_on_the_admin_port(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            for method, path in CHANGES:
                answer = await admin.request(method, path, headers=headers)
                assert is_error(answer.json())
                assert answer.status_code == 403
                assert answer.json()["error"]["type"] == "permission_error"
                assert "access-control-allow-origin" not in answer.headers
            assert not server.state.draining
            # What changes nothing is read all the same.
            assert (await admin.get("/healthz", headers=headers)).status_code == 200

    run(scenario())


@pytest.mark.parametrize("headers", OWN)
def test_programs_and_the_ports_own_page_may_change_it(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            statuses = [
                (await admin.request(method, path, headers=headers)).status_code
                for method, path in CHANGES
            ]
            assert statuses == [200] * len(CHANGES)

    run(scenario())


def test_a_second_origin_does_not_hide_the_first() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            headers = [("host", LOCAL), ("origin", f"http://{LOCAL}"), ("origin", "http://a.com")]
            answer = await admin.request("POST", "/drain", headers=httpx.Headers(headers))
            assert answer.status_code == 403

    run(scenario())


def test_a_reset_says_how_many_blocks_it_evicted() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            answer = await admin.post("/reset_prefix_cache")
            assert answer.json() == {"evicted": 4, "held": 2}

    run(scenario())
