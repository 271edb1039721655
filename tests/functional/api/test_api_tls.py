"""TLS of the public port: answers, a renewed certificate, limits on handshakes."""

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fairlead_runtime.front import tls
from fairlead_runtime.front.tls import Certificates
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing import traffic
from fairlead_runtime.sizing.traffic import BODY
from support.api_harness import FakeService, Server, completion, events, fake_server, http, run
from support.certificates import Pair, make_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def first(folder: Path) -> Pair:
    return make_pair(folder, "first")


@pytest.fixture(scope="module")
def second(folder: Path) -> Pair:
    return make_pair(folder, "second")


@pytest.fixture
def used(first: Pair, tmp_path: Path) -> Pair:
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    install(first, pair)
    return pair


def install(pair: Pair, place: Pair) -> None:
    shutil.copyfile(pair.certificate, place.certificate)
    shutil.copyfile(pair.key, place.key)


def trusting(*pairs: Pair) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for pair in pairs:
        context.load_verify_locations(pair.certificate)
    return context


def certificate(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


@asynccontextmanager
async def tls_server(used: Pair, service: FakeService | None = None) -> AsyncIterator[Server]:
    certificates = Certificates(str(used.certificate), str(used.key))
    async with fake_server(service, certificates=certificates) as (server, _):
        yield server


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(server: Server, context: ssl.SSLContext) -> tuple[Connection, bytes]:
    """A connection and the certificate it was given; clients of an address send no server name."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    given: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return (reader, writer), given


async def status(connection: Connection) -> bytes:
    """Ask over a connection that stays open."""
    reader, writer = connection
    writer.write(http("GET", "/version"))
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if b"content-length" in line
    )
    await reader.readexactly(length)
    return head.split(b"\r\n")[0]


def test_the_public_port_has_tls_and_the_admin_port_has_not(used: Pair, first: Pair) -> None:
    async def scenario() -> None:
        async with tls_server(used) as server:
            url = f"https://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(verify=trusting(first), base_url=url) as client:
                assert (await client.get("/readyz")).status_code == 200
                body = completion(stream=True, max_tokens=3)
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    assert events((await answer.aread()).decode())[-1] == "[DONE]"
                big = await client.post("/v1/completions", content=b" " * (BODY + 1))
                assert big.status_code == 415
            async with server.admin() as admin:
                assert (await admin.get("/readyz")).status_code == 200
            async with server.client() as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get("/readyz")
            (_, writer), _ = await connect(server, trusting(first))
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.close()

    run(scenario())


def test_a_renewed_certificate_is_for_new_connections_and_running_ones_live_on(
    used: Pair, first: Pair, second: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with tls_server(used) as server:
            both = trusting(first, second)
            old, given = await connect(server, both)
            assert given == certificate(first)
            assert await status(old) == b"HTTP/1.1 200 OK"

            # The certificate alone does not belong to the key: the last pair stays.
            shutil.copyfile(second.certificate, used.certificate)
            torn, given = await connect(server, both)
            assert given == certificate(first)
            assert server.state.front().certificate_broken
            used.key.write_text("no key, but a secret")
            assert server.state.front().certificate_broken

            shutil.copyfile(second.key, used.key)
            new, given = await connect(server, both)
            assert given == certificate(second)
            assert not server.state.front().certificate_broken
            for connection in (old, torn, new):
                assert await status(connection) == b"HTTP/1.1 200 OK"
                connection[1].close()

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert caplog.text.count("cannot be used") == 2
    assert "a secret" not in caplog.text


def test_a_session_of_the_old_certificate_is_not_resumed_with_an_error(
    used: Pair, first: Pair, second: Pair
) -> None:
    async def scenario() -> None:
        async with tls_server(used) as server:
            both = trusting(first, second)
            for pair in (first, second, first):
                install(pair, used)
                connection, given = await connect(server, both)
                assert given == certificate(pair)
                assert await status(connection) == b"HTTP/1.1 200 OK"
                connection[1].close()

    run(scenario())


def test_a_connection_of_tls_keeps_no_large_buffer(used: Pair, first: Pair) -> None:
    """Both ends are in this process: by asyncio itself each keeps 256 KiB."""

    async def scenario() -> None:
        async with tls_server(used) as server:
            tracemalloc.start()
            try:
                clients = [await connect(server, trusting(first)) for _ in range(20)]
                each = tracemalloc.get_traced_memory()[0] / len(clients)
            finally:
                tracemalloc.stop()
            for connection, _ in clients:
                connection[1].close()
            assert each < 256 * 1024

    run(scenario())


def test_handshakes_are_bounded_in_number_and_time(
    used: Pair, first: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(traffic, "HANDSHAKES", 2)
        async with tls_server(used) as server:
            silent = [await server.raw() for _ in range(2)]
            # Connections are accepted in their order, so both are counted before this one.
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await connect(server, trusting(first))
            silent[0][1].write(b"this is not TLS at all\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await silent[0][0].read()
            connection, _ = await connect(server, trusting(first))
            assert await status(connection) == b"HTTP/1.1 200 OK"
            connection[1].close()
            for _, each in silent:
                each.close()
            monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.1)
            reader, writer = await server.raw()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "a silent one is closed"
            writer.close()

    run(scenario())


def test_a_key_that_needs_a_password_or_is_another_ones_is_named(
    first: Pair, second: Pair, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", str(first.key), "-out"]
    subprocess.run([*command, str(locked)], check=True, capture_output=True)
    for key in (locked, second.key, first.certificate, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError) as raised:
            Certificates(str(first.certificate), str(key))
        assert raised.value.field == "ssl_keyfile"
    with pytest.raises(ConfigError) as raised:
        Certificates(str(first.key), str(first.key))
    assert raised.value.field == "ssl_certfile"
