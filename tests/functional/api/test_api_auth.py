"""API keys: every route of the public port except the probes needs one, for every form of path,
host and method.
"""

import hashlib
from pathlib import Path

import pytest

from fairlead_runtime.api.ports.app import public_app
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.processes import logs
from fairlead_runtime.settings.engine_config import ConfigError
from support.api_harness import (
    FakeService,
    asgi,
    backend_of,
    completion,
    fake_server,
    is_error,
    run,
    until,
)

KEY, OTHER = "k" * 40, "another-key-of-decent-length-0123456789"
PATHS = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/", "/docs", "/nowhere"]
PATH_FORMS = [
    "{}",
    "{}/",
    "/{}",
    "{}?a=/healthz",
    "{}#/healthz",
    "{};/healthz",
    "/healthz/..{}",
    "/healthz/../{}",
    "/healthz{}",
    "{}/healthz",
    "{}/../healthz",
    "{}%2fhealthz",
    "/%2e%2e{}",
    "{}%00",
    "{}%20",
    "/HEALTHZ{}",
    "http://x/healthz{}",
    "/./{}",
]
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH"]
HEADERS: list[dict[str, str]] = [
    {},
    {"host": "localhost"},
    {"x_forwarded_for": "127.0.0.1"},
    {"x_original_url": "/healthz"},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer  "},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY} {KEY}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": "Bearer " + hashlib.sha256(KEY.encode()).hexdigest()},
    {"api_key": KEY},
    {"x_api_key": ""},
    {"x_api_key": f"Bearer {KEY}"},
    {"x_api_key": f"{KEY}x"},
    {"x_api_key": KEY[:-1], "authorization": f"Bearer {KEY[1:]}"},
    {"x_api_keys": KEY},
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n\n  {OTHER}  \n")
    return path


def test_every_path_except_the_probes_needs_a_key(keys: Path) -> None:
    async def scenario() -> None:
        state, pool, service = ServerState(name="tiny"), PromptPool(), FakeService()
        state.attach(backend_of(service))
        app = public_app(state, pool, KeyRing(str(keys)))
        bodies = set()
        tried = 0
        for path in PATHS:
            for form in PATH_FORMS:
                for method in METHODS:
                    status, body = await asgi(app, method, form.format(path))
                    assert status == 401, (method, form.format(path))
                    bodies.add(body)
                    tried += 1
        for path in PATHS:
            for headers in HEADERS:
                status, body = await asgi(app, "POST", path, b"{}", **headers)
                assert status == 401, (path, headers)
                bodies.add(body)
        for probe in ("/healthz", "/readyz", "/health", "/ping"):
            assert (await asgi(app, "GET", probe))[0] == 200
        pool.close()
        assert tried == 864
        assert len(bodies) == 1
        assert not service.seen

    run(scenario())


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_of_the_file_opens_every_route(keys: Path, scheme: str) -> None:
    async def scenario() -> None:
        async with (
            fake_server(keys=KeyRing(str(keys))) as (server, service),
            server.client() as client,
        ):
            for key in (KEY, OTHER):
                headers = {"authorization": f"{scheme} {key}"}
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
                answer = await client.post(
                    "/v1/completions", json=completion(user="me"), headers=headers
                )
                assert answer.status_code == 200
            refused = await client.get("/v1/models")
            assert refused.status_code == 401
            assert is_error(refused.json())
            assert refused.headers["www-authenticate"] == "Bearer"
            twice = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
            assert (await client.get("/v1/models", headers=twice)).status_code == 401
            # The tenant is the key, not what the body says, and it does not give the key away.
            first, second = service.seen
            assert first.tenant != second.tenant
            assert "me" not in {first.tenant, second.tenant}
            assert not {first.tenant, second.tenant} & {KEY, OTHER}

    run(scenario())


def test_a_key_in_its_own_header_is_the_same_tenant_and_an_error_has_the_shape_of_its_path(
    keys: Path,
) -> None:
    async def scenario() -> None:
        async with (
            fake_server(keys=KeyRing(str(keys))) as (server, service),
            server.client() as client,
        ):
            bodies = {
                "/v1/completions": completion(),
                "/v1/messages": {
                    "max_tokens": 3,
                    "messages": [{"role": "user", "content": "hello"}],
                    "metadata": {"user_id": "somebody-else"},
                },
            }
            sent: list[dict[str, str]] = [
                {"x-api-key": KEY},
                {"authorization": f"Bearer {KEY}"},
                {"x-api-key": OTHER, "authorization": f"Bearer {KEY}"},
                {"x-api-key": KEY, "authorization": "Bearer stale"},
                {"x-api-key": KEY, "authorization": "Basic eDp5"},
            ]
            for path, body in bodies.items():
                for headers in sent:
                    answer = await client.post(path, json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
            assert len({each.tenant for each in service.seen}) == 1
            assert len({each.salt for each in service.seen}) == 1
            twice = [("x-api-key", KEY), ("x-api-key", KEY)]
            for path, body in bodies.items():
                refused = await client.post(path, json=body, headers=twice)
                assert refused.status_code == 401
                if path != "/v1/messages":
                    assert is_error(refused.json())
                    continue
                error = refused.json()
                assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
                assert error["request_id"] == refused.headers["request-id"]

    run(scenario())


def test_the_admin_port_needs_no_key(keys: Path) -> None:
    async def scenario() -> None:
        async with fake_server(keys=KeyRing(str(keys))) as (server, _), server.admin() as admin:
            assert (await admin.get("/metrics")).status_code == 200

    run(scenario())


def test_a_changed_file_is_read_again(keys: Path) -> None:
    ring = KeyRing(str(keys))
    assert ring.find(KEY.encode()) is not None
    renewed = keys.with_name("renewed")
    renewed.write_text("fresh-key\n")
    renewed.replace(keys)
    assert ring.find(KEY.encode()) is None
    assert ring.find(b"fresh-key") is not None
    keys.unlink()
    assert ring.find(b"fresh-key") is not None, "a secret is replaced in two steps"
    keys.write_text("")
    assert ring.find(b"fresh-key") is None, "an emptied file revokes"
    assert ring.find(b"") is None


@pytest.mark.parametrize("content", [None, b"", b"\n  \n", b"\xff\xfe"])
def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        KeyRing(str(path))


def test_every_key_is_compared_whatever_was_sent(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = KeyRing(str(keys))
    compared: list[bytes] = []

    def compare(presented: bytes, known: bytes) -> bool:
        compared.append(known)
        return presented == known

    monkeypatch.setattr("fairlead_runtime.front.key_file.hmac.compare_digest", compare)
    for presented in (KEY, OTHER, "wrong", ""):
        compared.clear()
        ring.find(presented.encode())
        assert len(compared) == 2


def test_prefix_caches_are_separate_per_key_and_priorities_stay_in_the_range_of_the_key(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=alice priority=5..9\n{OTHER}\n")

    async def scenario() -> None:
        ring = KeyRing(str(path))
        async with fake_server(keys=ring) as (server, service), server.client() as client:
            for key in (KEY, OTHER):
                headers = {"authorization": f"Bearer {key}"}
                for body in (completion(), completion(priority=7, cache_salt="s")):
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200
                outrank = completion(priority=-1)
                answer = await client.post("/v1/completions", json=outrank, headers=headers)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "priority"
            assert [each.priority for each in service.seen] == [5, 7, 0, 7]
            assert len({each.salt for each in service.seen}) == 4
            first = ring.find(KEY.encode())
            assert first is not None
            assert [each.salt for each in service.seen[:2]] == [first.salt(b""), first.salt(b"s")]
        async with fake_server() as (server, service), server.client() as client:
            for body in (completion(), completion(priority=-(2**31), cache_salt="s")):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            open_to_all = [(each.priority, each.salt) for each in service.seen]
            assert open_to_all == [(0, b""), (-(2**31), b"s")]

    run(scenario())


def test_a_key_beyond_its_limits_gets_429_and_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=alice concurrent_requests=1\n{OTHER} requests_per_minute=2\n")

    async def scenario() -> None:
        ring = KeyRing(str(path), now=lambda: 100.0)
        async with (
            fake_server(FakeService(hang=True), keys=ring) as (server, service),
            server.client() as client,
        ):
            alice, bob = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER))
            body = completion(stream=True, max_tokens=1)
            async with client.stream("POST", "/v1/completions", json=body, headers=alice) as first:
                await service.hanging.wait()
                second = await client.get("/v1/models", headers=alice)
                assert second.status_code == 429
                assert is_error(second.json())
                assert second.json()["error"]["code"] == "rate_limit_exceeded"
                assert second.headers["retry-after"] == "1"
                assert KEY not in second.text
                assert first.status_code == 200
                for status in (200, 200, 429, 429):
                    answer = await client.get("/v1/models", headers=bob)
                    assert answer.status_code == status
                assert answer.headers["retry-after"] == "60"
                assert (await client.get("/readyz")).status_code == 200
            service.hang = False
            await until(lambda: not service.live)
            assert (await client.get("/v1/models", headers=alice)).status_code == 200
            assert service.seen[0].tenant == "alice"
            front = server.state.front()
            assert (front.api_keys, front.key_limited, front.unauthorized) == (2, 3, 0)

    run(scenario())


@pytest.mark.parametrize("named", ["https://app.example", "*"])
def test_pages_of_the_named_origin_alone_may_read_answers(named: str, keys: Path) -> None:
    async def scenario() -> None:
        ring = KeyRing(str(keys))
        async with (
            fake_server(keys=ring, cors_origin=named) as (server, service),
            server.client() as client,
        ):
            mine, other = "https://app.example", "https://other.example"
            preflight = {"access-control-request-method": "POST"}
            preflight["access-control-request-headers"] = "authorization,content-type"
            url = "/v1/completions"
            asked = await client.options(url, headers={**preflight, "origin": mine})
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == named
            assert "authorization" in asked.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in asked.headers
            foreign = await client.options(url, headers={**preflight, "origin": other})
            assert foreign.headers.get("access-control-allow-origin") == (
                "*" if named == "*" else None
            )
            # The origin is no key.
            for method in ("POST", "OPTIONS"):
                refused = await client.request(method, url, headers={"origin": mine})
                assert refused.status_code == 401
                assert refused.headers["access-control-allow-origin"] == named
            headers = {"origin": mine, "authorization": f"Bearer {KEY}"}
            answer = await client.post(url, json=completion(), headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == named
            assert len(service.seen) == 1

    run(scenario())


def test_without_an_origin_no_page_of_another_may_read_answers() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
            for method in ("GET", "OPTIONS"):
                answer = await client.request(method, "/v1/models", headers=headers)
                assert not [name for name in answer.headers if name.startswith("access-control")]

    run(scenario())


def test_no_key_and_no_prompt_is_ever_logged(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fake_server(keys=KeyRing(str(keys))) as (server, _), server.client() as client:
            for key in (KEY, "wrong-" + KEY):
                headers = {"authorization": f"Bearer {key}", "x-secret": "horse"}
                for body in (
                    completion("my secret horse"),
                    completion("horse", n="horse"),
                    {"horse": 1},
                ):
                    await client.post("/v1/completions", json=body, headers=headers)
                await client.get("/horse", headers=headers)

    with caplog.at_level("DEBUG"):
        run(scenario())
    records = [
        record for record in caplog.records if record.name.startswith(("fairlead", "uvicorn"))
    ]
    lines = "\n".join(logs.JsonFormatter().format(record) for record in records)
    assert {getattr(record, "status", None) for record in records} >= {200, 400, 401, 404}
    assert KEY not in lines
    assert "horse" not in lines
