"""Connections, byte by byte: limits, deadlines, clients that disconnect, and a server
that goes on.
"""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest
from openai._constants import DEFAULT_CONNECTION_LIMITS

from fairlead_runtime.front import connection, limits
from fairlead_runtime.front.connection import GuardedProtocol
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.traffic import Bound, public_connections
from support.api_harness import (
    FakeService,
    Server,
    chat,
    completion,
    fake_server,
    http,
    is_error,
    run,
    until,
)
from support.full import LONG_FORM

# For how many seconds openai-python and nginx (as a proxy, by default) keep idle connections.
POOLS = (DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0.0, 60.0)


async def _exchange(
    server: Server, data: bytes, *, then_eof: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read until the server closes: status, header, body. Status 0: closed without an
    answer.
    """
    reader, writer = await server.raw()
    writer.write(data)
    if then_eof:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    return _parse(answer)


def _parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return 0, {}, b""
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields, body


async def _alive(server: Server) -> None:
    async with server.client() as client:
        assert (
            await client.post("/v1/completions", json=completion(max_tokens=1))
        ).status_code == 200


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"\x00\x01\x02\r\n\r\n", {400}),
        (b"GET\r\n\r\n", {400}),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\n\r\n", {400}),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", {400}),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n", {400}),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
            {400},
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
            {400, 501},
        ),
        (
            http(
                "POST",
                "/v1/completions",
                Content_Type="application/json",
                Transfer_Encoding="chunked",
            )
            + b"zz\r\n",
            {400},
        ),
        (http("POST", "/v1/completions", b"{}", Transfer_Encoding="chunked"), {400}),  # two lengths
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),  # TLS to a plain port
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
        (http("GET", "/" + "x" * 40_000), {431}),
        (http("GET", "/healthz", A="x" * 40_000), {431}),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * 200 + b"\r\n", {431}),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 1_000_000, {431}),
    ],
)
def test_malformed_requests_get_an_error_and_the_connection_ends(
    data: bytes, statuses: set[int]
) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            status, fields, body = await _exchange(server, data, then_eof=data.startswith(b"\x16"))
            assert status in statuses, (status, body)
            assert is_error(json.loads(body))
            assert fields["connection"] == "close"
            await _alive(server)

    run(scenario())


def test_a_body_of_too_many_chunks_is_cut_off() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            head = http(
                "POST",
                "/v1/completions",
                Content_Type="application/json",
                Transfer_Encoding="chunked",
            )
            status, _, body = await _exchange(server, head + b"1\r\n \r\n" * 20_000)
            assert status == 413
            assert is_error(json.loads(body))
            await _alive(server)

    run(scenario())


def test_an_answer_to_an_unread_body_arrives_whole() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            head = http(
                "POST",
                "/v1/completions",
                Content_Type="application/json",
                Content_Length="50000000",
            )
            status, _, body = await _exchange(server, head + b" " * 1_000_000)
            assert status == 413
            assert is_error(json.loads(body))
            status, _, body = await _exchange(
                server,
                http("POST", "/nowhere", Connection="close", Content_Length="5000000")
                + b" " * 500_000,
            )
            assert status == 404
            assert is_error(json.loads(body))

    run(scenario())


def test_open_connections_and_the_bytes_of_a_half_sent_body_are_counted() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            assert server.state.front().connections == {"public": 0, "admin": 0}
            _, idle = await server.raw()
            _, sending = await server.raw()
            sending.write(http("POST", "/v1/completions", b"x" * 100)[:-60])
            await until(lambda: server.state.front().body_bytes == 40)
            assert server.state.front().connections == {"public": 2, "admin": 0}
            for writer in (idle, sending):
                writer.close()
            await until(lambda: server.state.front().connections["public"] == 0)
            await until(lambda: server.state.front().body_bytes == 0)

    run(scenario())


def _record_connections(monkeypatch: pytest.MonkeyPatch) -> list[GuardedProtocol]:
    """The server's side of every connection, in order of arrival. Their header deadlines end only
    by ``_end_header_deadline``, so that no test depends on the machine's speed.
    """
    monkeypatch.setattr(connection, "HEADER_SECONDS", 3600.0)
    connections: list[GuardedProtocol] = []
    original = GuardedProtocol.connection_made

    def connection_made(self: GuardedProtocol, transport: asyncio.Transport) -> None:
        connections.append(self)
        original(self, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", connection_made)
    return connections


async def _end_header_deadline(connection: GuardedProtocol) -> None:
    """End the deadline once a part of the header has arrived."""
    await until(lambda: bool(connection.conn.trailing_data[0]))
    assert connection._header_timer is not None
    connection._header_timer.cancel()
    connection._header_timed_out()


def test_half_a_header_is_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = _record_connections(monkeypatch)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            reader, writer = await server.raw()
            writer.write(b"GET /healthz HTTP/1.1\r\nHo")
            await until(lambda: len(connections) == 1)
            await _end_header_deadline(connections[0])
            status, _, body = _parse(await reader.read())
            assert status == 408
            assert is_error(json.loads(body))
            writer.close()
            # The second request of a connection has its own deadline.
            reader, writer = await server.raw()
            writer.write(http("GET", "/healthz"))
            await reader.readuntil(b"}")
            assert connections[1]._header_timer is None
            writer.write(b"GET /heal")
            await _end_header_deadline(connections[1])
            assert _parse(await reader.read())[0] == 408
            writer.close()

    run(scenario())


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            status, _, _ = await _exchange(server, b"")
            assert status == 0

    run(scenario())


def test_half_a_body_is_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RATE_SECONDS", 0.2)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            whole = http("POST", "/v1/completions", json.dumps(completion()).encode())
            status, _, body = await _exchange(server, whole[:-5])
            assert status == 408
            assert is_error(json.loads(body))

    run(scenario())


def test_many_slow_headers_do_not_disturb_others(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = _record_connections(monkeypatch)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            clients = [await server.raw() for _ in range(1000 if LONG_FORM else 200)]
            for _, writer in clients:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost")
            await until(lambda: len(connections) == len(clients))
            slow = list(connections)
            await _alive(server)
            assert not any(each.transport.is_closing() for each in slow)
            for each in slow:
                await _end_header_deadline(each)
            for reader, writer in clients:
                assert _parse(await reader.read())[0] == 408
                writer.close()

    run(scenario())


def test_connections_beyond_the_limit_are_told_to_retry() -> None:
    async def scenario() -> None:
        async with fake_server(connections=Bound(3, "few")) as (server, _):
            held = [await server.raw() for _ in range(3)]
            status, fields, body = await _exchange(server, b"")
            assert status == 503
            assert is_error(json.loads(body))
            assert fields["retry-after"] == "1"
            for reader, writer in held:
                writer.write(http("GET", "/healthz", Connection="close"))
                assert _parse(await reader.read())[0] == 200
                writer.close()
            await _alive(server)

    run(scenario())


def test_a_pod_of_4096_requests_takes_more_than_2048_connections() -> None:
    config = EngineConfig(max_requests=4096, max_queue=1)

    async def scenario() -> None:
        async with fake_server(connections=public_connections(config)) as (server, _):
            clients = [await server.raw() for _ in range(2100)]
            await _alive(server)
            load = server.state.load
            assert load is not None
            await until(lambda: load.connections["public"] == len(clients))
            for _, writer in clients:
                writer.close()

    run(scenario())


async def _answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request and its whole answer, on a connection that is kept."""
    writer.write(http("GET", "/healthz"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(int(_parse(head)[1]["content-length"]))


def test_at_the_limit_the_connection_that_is_idle_for_longest_makes_room() -> None:
    async def scenario() -> None:
        async with fake_server(connections=Bound(3, "few")) as (server, _):
            (oldest, _), (older, _), fresh = clients = [await server.raw() for _ in range(3)]
            for each in clients[:2]:
                await _answered(*each)
            await _alive(server)
            assert await oldest.read() == b"", "closed"
            await _answered(*fresh)  # it waits for its first request: that is not idle
            await _answered(*clients[1])
            assert not older.at_eof()
            for _, writer in clients:
                writer.close()

    run(scenario())


def test_an_idle_connection_is_kept_longer_than_clients_and_proxies_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a client sends its next request on a connection that is about to be closed."""
    connections = _record_connections(monkeypatch)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            client = await server.raw()
            began = asyncio.get_running_loop().time()
            await _answered(*client)
            (kept,) = connections
            assert kept.idle_until is not None
            assert kept.idle_until - began > max(POOLS)
            client[1].write(b"GET")
            await until(lambda: kept.idle_until is None)
            client[1].close()

    run(scenario())


def test_sockets_send_events_at_once_and_find_dead_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    made = GuardedProtocol.connection_made
    asked = ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")

    def connection_made(self: GuardedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        options = (sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in asked)
        seen.append((sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *options))

    monkeypatch.setattr(GuardedProtocol, "connection_made", connection_made)

    async def scenario() -> None:
        async with fake_server() as (server, _):
            await _alive(server)

    run(scenario())
    ((keep_alive, at_once, idle, interval, probes, unacknowledged),) = seen
    assert (keep_alive, at_once) == (1, 1)
    # Seconds after which a peer that vanished is found: one that is silent, one that is sent to.
    assert idle + interval * probes <= 90
    assert 0 < unacknowledged / 1000 <= 90


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
def test_a_client_that_disconnects_cancels_its_request(
    stream: bool, reset: bool, prompt: Any
) -> None:
    async def scenario() -> None:
        async with fake_server(FakeService(hang=True)) as (server, service):
            body = json.dumps(completion(prompt, stream=stream)).encode()
            reader, writer = await server.raw()
            writer.write(http("POST", "/v1/completions", body))
            await service.hanging.wait()
            assert service.live
            if stream:
                await reader.readuntil(b"data: ")
            if reset:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            while service.live:
                service.closed.clear()
                await service.closed.wait()

    run(scenario())


def test_a_client_that_left_before_its_answer_is_no_failure_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with fake_server(FakeService(hang=True)) as (server, service):
            for path, body in (
                ("/v1/completions", completion("one")),
                ("/v1/chat/completions", chat()),
            ):
                service.hanging.clear()
                _, writer = await server.raw()
                writer.write(http("POST", path, json.dumps(body).encode()))
                await service.hanging.wait()
                writer.close()
            await until(lambda: len(_statuses(caplog)) == 2)

    with caplog.at_level("INFO", "fairlead.api"):
        run(scenario())
    assert _statuses(caplog) == [499, 499]


def _statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [vars(each)["status"] for each in caplog.records if each.getMessage() == "request"]


def test_clients_that_disconnect_do_not_disturb_the_others() -> None:
    async def scenario() -> None:
        service = FakeService()
        async with fake_server(service) as (server, _):

            async def leave() -> None:
                body = json.dumps(chat(max_tokens=400, stream=True)).encode()
                reader, writer = await server.raw()
                writer.write(http("POST", "/v1/chat/completions", body))
                await reader.readuntil(b"data: ")
                writer.close()

            async def stay() -> int:
                body = chat(max_tokens=400, stream=True)
                answer = await server.openai.chat.completions.create(**body)
                return len(
                    "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
                )

            results = await asyncio.gather(
                *(leave() for _ in range(50)), *(stay() for _ in range(10))
            )
            assert results[50:] == [400] * 10
            while service.live:
                service.closed.clear()
                await service.closed.wait()

    run(scenario())


def test_a_client_that_stops_reading_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_SECONDS", 0.3)

    async def scenario() -> None:
        service = FakeService(max_model_len=200_000)
        async with fake_server(service) as (server, _):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            body = json.dumps(completion(max_tokens=150_000, stream=True)).encode()
            await asyncio.get_running_loop().sock_sendall(
                sock, http("POST", "/v1/completions", body)
            )
            await service.closed.wait()
            assert not service.live
            sock.close()

    run(scenario())


def test_clients_that_stop_reading_are_disconnected_and_hold_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_SECONDS", 0.3)
    held: list[int] = []
    pause = GuardedProtocol.pause_writing

    def paused(self: GuardedProtocol) -> None:
        held.append(self._raw.get_write_buffer_size())
        pause(self)

    monkeypatch.setattr(GuardedProtocol, "pause_writing", paused)
    ended: list[Exception | None] = []
    lost = GuardedProtocol.connection_lost

    def connection_lost(self: GuardedProtocol, exc: Exception | None) -> None:
        ended.append(exc)
        lost(self, exc)

    monkeypatch.setattr(GuardedProtocol, "connection_lost", connection_lost)
    # With the kernel's large buffers 200 fill so slowly that TCP_USER_TIMEOUT ends them before.
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    monkeypatch.setattr(connection, "_OPTIONS", (*connection._OPTIONS, small))
    count = 200 if LONG_FORM else 10

    async def scenario() -> None:
        service, loop = FakeService(max_model_len=200_000), asyncio.get_running_loop()
        async with fake_server(service) as (server, _):
            body = json.dumps(completion(max_tokens=150_000, stream=True)).encode()
            sockets = [socket.socket() for _ in range(count)]
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", server.port))
                await loop.sock_sendall(sock, http("POST", "/v1/completions", body))
            await until(lambda: len(service.seen) == count and not service.live)
            assert len(held) >= count
            assert max(held) <= 256 * 1024
            assert ended == [None] * count, "by the server's deadline, not by the kernel's"
            for sock in sockets:
                sock.close()

    run(scenario())


def test_requests_may_be_pipelined_and_connections_kept() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            body = json.dumps(completion(max_tokens=2)).encode()
            one = http("POST", "/v1/completions", body)
            last = http("GET", "/healthz", Connection="close")
            reader, writer = await server.raw()
            writer.write(one + one + last)
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 200") == 3
            writer.close()

    run(scenario())
