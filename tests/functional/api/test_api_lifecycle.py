"""The server from open ports to its end: loading, readiness, drain, signals, a dead engine."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import openai
import pytest

from fairlead_runtime.api.ports import server as server_module
from fairlead_runtime.api.ports.admin import EXPOSITION
from fairlead_runtime.api.ports.app import admin_app, public_app
from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.front import port as port_module
from fairlead_runtime.front.doors import listen
from fairlead_runtime.front.drain import Drain
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.outputs import Draining, DrainResult, EngineDead, Health
from fairlead_runtime.settings.engine_config import ConfigError
from support.api_harness import (
    FakeService,
    Server,
    asgi,
    backend_of,
    chat,
    completion,
    events,
    fake_server,
    http,
    is_error,
    run,
    running_server,
    send_sigterm,
    until,
)


def test_while_the_model_loads_probes_and_configuration_answer_and_nothing_else() -> None:
    async def scenario() -> None:
        loaded = asyncio.Event()

        async def load() -> Backend:
            await loaded.wait()
            return backend_of(FakeService())

        async with (
            running_server(load, wait=False, model_config=b'{"a": 1}') as server,
            server.client() as client,
            server.admin() as admin,
        ):
            for each in (client, admin):
                assert (await each.get("/healthz")).status_code == 200
                waiting = await each.get("/readyz")
                assert waiting.status_code == 503
                assert is_error(waiting.json())
            assert (await admin.get("/model/config.json")).json() == {"a": 1}
            refused = await client.post("/v1/completions", json=completion())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_ready"
            for path in ("/metrics", "/debug/memory", "/debug/requests", "/debug/cache"):
                assert (await admin.get(path)).status_code == 503
            assert (await client.get("/v1/models")).status_code == 503
            server.state.startup.reach("kernels", 3, 30)
            start = (await admin.get("/debug/startup")).json()
            assert (start["ready"], start["phase"]) == (False, "kernels")
            assert (start["done"], start["total"]) == (3, 30)
            loaded.set()
            await until(lambda: server.state.backend is not None)
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.post("/v1/completions", json=completion())).status_code == 200

    run(scenario())


def test_the_admin_port_answers_every_route() -> None:
    async def scenario() -> None:
        async with fake_server(model_config=b"{}") as (server, service), server.admin() as admin:
            metrics = await admin.get("/metrics")
            assert metrics.headers["content-type"] == EXPOSITION
            assert (await admin.post("/canary")).json() == {"token": 7}
            assert (await admin.get("/debug/memory")).json()["planned"] == {"weights": 1}
            assert (await admin.get("/debug/requests")).json() == {"requests": []}
            cache = (await admin.get("/debug/cache")).json()
            block = {"first": 0, "count": 6, "state": "free", "references": 0, "requests": []}
            assert (cache["blocks"], cache["units"], cache["next"]) == ([block], 6, None)
            assert cache["sizing"] == (await admin.get("/debug/memory")).json()
            for start in ("6", "-1", "x", "", "9" * 20, "²"):
                answer = await admin.get("/debug/cache", params={"start": start})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "start"
            assert (await admin.get("/drain")).status_code == 405
            assert (await admin.post("/v1/completions", json=completion())).status_code == 404
            for _ in range(2):
                assert (await admin.post("/drain")).json() == {"draining": True}
            assert service.draining
            assert (await admin.get("/readyz")).status_code == 503
            assert (await admin.get("/healthz")).status_code == 200
            assert (await admin.post("/canary")).status_code == 200

    run(scenario())


def test_a_drain_over_http_can_be_undone_and_begun_again() -> None:
    async def scenario() -> None:
        async with (
            fake_server() as (server, service),
            server.admin() as admin,
            server.client() as client,
        ):
            for _ in range(2):
                await admin.post("/drain")
                await until(lambda: service.refusing)
                refused = await client.post("/v1/completions", json=completion())
                assert refused.status_code == 503
                for _ in range(2):
                    assert (await admin.delete("/drain")).json() == {"draining": False}
                assert (await client.get("/readyz")).status_code == 200
                answer = await client.post("/v1/completions", json=completion())
                assert answer.status_code == 200
            assert not server.task.done()

    run(scenario())


def test_a_drain_over_http_ends_the_streams_that_outlive_it_and_not_the_process() -> None:
    async def scenario() -> None:
        service = _Stubborn(hang=True, error=Draining("cut"))
        async with fake_server(service, drain_timeout=0) as (server, _):
            body = json.dumps(completion(stream=True)).encode()
            _reader, writer = await server.raw()
            writer.write(http("POST", "/v1/completions", body))
            await service.hanging.wait()
            async with server.admin() as admin:
                await admin.post("/drain")
                await until(lambda: not service.hang)
                assert (await admin.get("/healthz")).status_code == 200
            writer.close()
            await until(lambda: not service.live)
            assert not server.task.done()
            send_sigterm()
            await server.task

    run(scenario())


def test_a_server_that_drains_serves_new_requests_for_its_grace_and_closes_their_connections() -> (
    None
):
    async def scenario() -> None:
        async with fake_server(drain_grace=3600) as (server, service):
            send_sigterm()
            await until(lambda: server.state.draining)
            async with server.client() as client, server.admin() as admin:
                for each in (client, admin):
                    assert (await each.get("/readyz")).status_code == 503
                    assert (await each.get("/healthz")).status_code == 200
                for stream in (False, True):
                    answer = await client.post("/v1/completions", json=completion(stream=stream))
                    assert answer.status_code == 200
                    assert answer.headers["connection"] == "close"
                assert not service.refusing
                undo = await admin.delete("/drain")
                assert undo.status_code == 409
                assert is_error(undo.json())
            assert not server.task.done()
            send_sigterm()  # a second signal ends the grace, too
            await server.task

    run(scenario())


@pytest.mark.parametrize(
    ("health", "healthz", "readyz"),
    [
        (Health(alive=True, ready=True), 200, 200),
        (Health(alive=True, ready=False, reason="no step for 7 s"), 200, 503),
        (Health(alive=False, ready=False, reason="dead"), 503, 503),
    ],
)
def test_the_probes_report_the_engines_health(health: Health, healthz: int, readyz: int) -> None:
    async def scenario() -> None:
        state, pool = ServerState(name="tiny"), PromptPool()
        state.attach(backend_of(FakeService(state=health)))
        drain = Drain(state, grace=0.0, timeout=0.0)
        for app in (public_app(state, pool), admin_app(state, drain)):
            assert (await asgi(app, "GET", "/healthz"))[0] == healthz
            for path in ("/readyz", "/health", "/ping"):
                status, body = await asgi(app, "GET", path)
                assert status == readyz
                assert status == 200 or health.reason in json.loads(body)["error"]["message"]
        pool.close()

    run(scenario())


def test_a_signal_lets_streams_finish_and_refuses_new_requests() -> None:
    async def scenario() -> None:
        service = FakeService(max_model_len=100_000)
        async with fake_server(service) as (server, _):
            client = server.openai

            async def stream() -> str:
                body = chat(max_tokens=1500, stream=True)
                answer = await client.chat.completions.create(**body)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            streams = [asyncio.create_task(stream()) for _ in range(5)]
            await until(lambda: len(service.live) == 5)
            send_sigterm()
            await until(lambda: server.state.refusing)
            async with server.client() as late:
                assert (await late.get("/readyz")).status_code == 503
                assert (await late.get("/healthz")).status_code == 200
                refused = await late.post("/v1/completions", json=completion())
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "draining"
            assert [len(text) for text in await asyncio.gather(*streams)] == [1500] * 5
            await server.task
            with pytest.raises(ConnectionError):
                await server.raw()

    run(scenario())


class _Stubborn(FakeService):
    """Its streams never end by themselves; a drain that runs out ends them with an error, as the
    service does.
    """

    async def drain(self, max_wait: float, waited: float = 0.0) -> DrainResult:
        self.begin_drain()
        if max_wait > 0:
            await asyncio.Event().wait()
        self.hang = False
        return DrainResult(0, len(self.live))


def test_the_end_of_the_grace_closes_idle_connections_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client with a pool opens another one, to a pod that serves, before its next request."""
    monkeypatch.setattr(port_module, "CLOSING_SECONDS", 0)  # the stream never ends

    async def scenario() -> None:
        service = _Stubborn(hang=True)
        async with fake_server(service, drain_timeout=3600) as (server, _):
            idle, idle_writer = await server.raw()
            idle_writer.write(http("GET", "/healthz"))
            await idle.readuntil(b"\r\n\r\n")
            fresh, fresh_writer = await server.raw()
            streaming, writer = await server.raw()
            body = json.dumps(completion(stream=True)).encode()
            writer.write(http("POST", "/v1/completions", body))
            await service.hanging.wait()
            send_sigterm()
            await idle.read()  # to its end
            assert server.state.refusing
            assert not server.task.done()
            fresh_writer.write(http("POST", "/v1/completions", body))
            assert (await fresh.read()).startswith(b"HTTP/1.1 503"), "it is told what to do"
            assert not streaming.at_eof()
            send_sigterm()  # ends the wait for the stream
            await server.task
            for each in (idle_writer, fresh_writer, writer):
                each.close()

    run(scenario())


def test_a_second_signal_ends_the_wait_for_running_streams() -> None:
    async def scenario() -> None:
        service = _Stubborn(hang=True)
        async with fake_server(service, drain_timeout=3600) as (server, _):
            reader, writer = await server.raw()
            body = json.dumps(completion(stream=True)).encode()
            writer.write(http("POST", "/v1/completions", body))
            await service.hanging.wait()
            send_sigterm()
            await until(lambda: service.draining)
            send_sigterm()
            await until(lambda: not service.hang)
            writer.close()
            await server.task
            assert not service.live
            await reader.read()

    run(scenario())


def test_a_signal_while_the_model_loads_ends_at_once() -> None:
    async def scenario() -> None:
        async def load() -> Backend:
            await asyncio.Event().wait()
            raise AssertionError

        async with running_server(load, wait=False) as server:
            async with server.client() as client:
                assert (await client.get("/healthz")).status_code == 200
            send_sigterm()
            await server.task

    run(scenario())


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    async def scenario() -> None:
        async def load() -> Backend:
            raise ConfigError("dtype", "no")

        async with running_server(load, wait=False) as server:
            with pytest.raises(ConfigError, match="--dtype"):
                await server.task

    run(scenario())


def test_a_dead_engine_ends_the_server() -> None:
    async def scenario() -> None:
        service = FakeService()
        async with fake_server(service) as (server, _):
            service.state = Health(alive=False, ready=False, reason="three faults in a row")
            assert server.state.backend is not None
            server.state.backend.died.set()
            with pytest.raises(EngineDead, match="three faults"):
                await server.task

    run(scenario())


def test_a_request_that_comes_between_the_engines_end_and_the_servers_gets_a_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "DEAD_SECONDS", 3600)

    async def scenario() -> None:
        service = FakeService(refuse=EngineDead("killed"))
        async with fake_server(service) as (server, _):
            request = http("POST", "/v1/completions", json.dumps(completion()).encode())
            reader, writer = await server.raw()
            writer.write(request[:-1])
            await until(lambda: server.state.front().body_bytes > 0)
            service.state = Health(alive=False, ready=False, reason="killed")
            assert server.state.backend is not None
            server.state.backend.died.set()
            await _until_refused(server)
            writer.write(request[-1:])
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503"), answer
            writer.close()
            with pytest.raises(EngineDead):
                await server.task

    run(scenario())


async def _until_refused(server: Server) -> None:
    """Returns when the port takes no connection any more."""
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await server.raw()
            writer.close()
            await asyncio.sleep(0)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port: cannot listen"):
            listen("127.0.0.1", port, 0)
        with pytest.raises(ConfigError, match="--admin-port: cannot listen"):
            listen("127.0.0.1", 0, port)


def test_a_drain_ends_streams_with_an_event_when_time_is_up() -> None:
    async def scenario() -> None:
        service = FakeService(error=EngineDead("the drain took too long"))
        async with fake_server(service) as (server, _), server.client() as client:
            answer = await client.post(
                "/v1/completions", json=completion(max_tokens=2, stream=True)
            )
            found: list[Any] = events(answer.text)
            assert found[-2]["error"]["type"] == "service_unavailable_error"
            assert found[-1] == "[DONE]"
            stream = await server.openai.completions.create(**completion(max_tokens=2, stream=True))
            with pytest.raises(openai.APIError):
                _ = [chunk async for chunk in stream]

    run(scenario())
