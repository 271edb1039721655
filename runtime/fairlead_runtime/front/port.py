"""One port of a server: uvicorn on a bound socket, with bounds on its connections and, where it has
certificates, TLS with bounds on its handshakes.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_runtime.front.connection import (
    HEADER_BYTES,
    KEEP_ALIVE_SECONDS,
    GuardedProtocol,
    idle_connections,
    protocol_class,
)
from fairlead_runtime.front.tls import Certificates, accept_forever
from fairlead_runtime.sizing.traffic import HANDSHAKES

CLOSING_SECONDS = 5  # for the last bytes of answers when the port closes


class HeadAsGet:
    """Pure ASGI: HEAD is answered as GET is, of which uvicorn leaves the body out. Servers must
    know both (RFC 9110, 9.1), and monitors ask the probes so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send)
        finally:
            scope.update({**as_get, "method": "HEAD"})  # what it found is logged


class Port:
    """One uvicorn server on a bound socket, with our subclass of uvicorn's h11 protocol."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        max_connections: int,
        certificates: Certificates | None = None,
        handshakes: int = HANDSHAKES,
    ) -> None:
        """``certificates``: of TLS, with so many ``handshakes`` at a time; None: no TLS."""
        config = uvicorn.Config(
            app,
            http=protocol_class(max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        config.load()
        if not issubclass(config.http_protocol_class, GuardedProtocol):
            raise RuntimeError("uvicorn uses another HTTP parser")  # noqa: TRY004 - not a caller's type
        # uvicorn would log a line for each malformed request.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._socket = sock
        self.server = (
            _Server(config)
            if certificates is None
            else _TlsServer(config, certificates, handshakes)
        )

    def open_connections(self) -> int:
        return len(self.server.server_state.connections)

    def close_idle(self) -> None:
        """Close the connections that wait for another request, so that clients with a pool of
        connections open others.
        """
        for connection in idle_connections(self.server.server_state.connections):
            connection.timeout_keep_alive_handler()

    async def serve(self) -> None:
        await self.server.serve(sockets=[self._socket])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: two servers share this process, and it must drain before
    it ends.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _TlsServer(_Server):
    """The server with TLS, and with bounds on its handshakes, which uvicorn cannot be given."""

    def __init__(self, config: uvicorn.Config, certificates: Certificates, handshakes: int) -> None:
        super().__init__(config)
        self._certificates = certificates
        self._handshakes = handshakes
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        for sock in sockets or []:
            accepting = accept_forever(
                sock, self._certificates, self._new_protocol, self._handshakes
            )
            self._accepting = asyncio.create_task(accepting)
        self.started = True

    def _new_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await super().shutdown(sockets)


def allow_files(count: int) -> int | None:
    """Raise the soft limit on open files towards the hard limit: a connection is a file. Returns
    the number of files that this process may open now; None: no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return None if soft == resource.RLIM_INFINITY else soft
