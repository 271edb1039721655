"""Which certificates of an API server both connections take: the client's and kopf's.

Python 3.13, the images', checks certificates strictly; the tests make every Python do so.
"""

import asyncio
import http.server
import json
import logging
import shutil
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest

from fairlead_operator.cluster import watches
from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import connect
from fairlead_operator.errors import ApiError
from fairlead_operator.metrics import Metrics
from support.certificates import AUTHORITY, Pair, make_pair, sign

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(pair: Pair) -> Iterator[int]:
    """An API server with this certificate: its port on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # refusals are expected
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    create = ssl.create_default_context

    def create_strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


async def by_client(environ: dict[str, str]) -> bool:
    """Whether the operator's own client connects."""
    async with connect(Store(), Metrics(), environ) as cluster:
        try:
            return bool(await cluster.call("discover", "GET", "/version") == {})
        except ApiError:
            return False


async def by_kopf(environ: dict[str, str]) -> bool:
    """Whether the connection of kopf's watches does."""
    info = watches._log_in(environ, logger=logging.getLogger(), settings=kopf.OperatorSettings())
    assert info
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"{info.server}/version", ssl=info.as_ssl_context()) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


@pytest.mark.usefixtures("strict")
def test_certificates_are_judged_as_kubectl_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, other = (make_pair(tmp_path, name, AUTHORITY) for name in ("ca", "other"))
    old, expired = sign(authority, tmp_path, "old"), sign(authority, tmp_path, "expired", -1)
    config = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(config))

    def connected(pair: Pair, trusted: Pair, host: str = "127.0.0.1") -> list[bool]:
        with serving(pair) as port:
            server = f"https://{host}:{port}"
            config.write_text(kubeconfig(server, trusted))
            environ = {"KUBECONFIG": str(config)}
            return [asyncio.run(by_client(environ)), asyncio.run(by_kopf(environ))]

    assert connected(old, authority) == [True, True], "it has no authority key identifier"
    assert connected(old, other) == [False, False], "of another authority"
    assert connected(expired, authority) == [False, False]
    assert connected(old, authority, "localhost") == [False, False], "of another name"


def kubeconfig(server: str, trusted: Pair) -> str:
    cluster = {"server": server, "certificate-authority": str(trusted.certificate)}
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    return json.dumps(body)
