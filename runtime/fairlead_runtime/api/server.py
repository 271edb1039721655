"""The server process's life: listen, load, serve, drain, end.

Owns both ports in one event loop and the signals. The ports are open while the model loads, so that
probes and ``/model/config.json`` answer; SIGTERM ends readiness at once and the process when the
running streams are done.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from fairlead_runtime import preflight
from fairlead_runtime.api.app import admin_app, public_app
from fairlead_runtime.api.connection import (
    HEADER_BYTES,
    KEEP_ALIVE_SECONDS,
    GuardedProtocol,
    protocol_class,
)
from fairlead_runtime.api.limits import Pool
from fairlead_runtime.api.state import Backend, Face
from fairlead_runtime.config import ConfigError
from fairlead_runtime.outputs import Drained, EngineDead

BACKLOG = 2048
MAX_CONNECTIONS = (
    2048  # of each port; above what runs and waits by default, so that a full queue can say so
)
CLOSING_SECONDS = 5  # for the last bytes of answers after the drain

_log = logging.getLogger("fairlead.api")


class Listeners(NamedTuple):
    public: socket.socket
    admin: socket.socket


def listen(host: str, port: int, admin_port: int) -> Listeners:
    """Bind both ports before anything expensive happens; port 0 takes a free one.

    Raises ConfigError naming the flag that cannot be had.
    """
    public = preflight.listen("port", host, port, BACKLOG)
    try:
        return Listeners(public, preflight.listen("admin_port", host, admin_port, BACKLOG))
    except ConfigError:
        public.close()
        raise


async def serve(
    face: Face,
    listeners: Listeners,
    load: Callable[[], Awaitable[Backend]],
    *,
    drain_timeout: float,
    max_connections: int = MAX_CONNECTIONS,
) -> Drained:
    """Serve ``face`` until SIGTERM or SIGINT; ``load`` gives the started backend while the ports
    are open already.

    Returns what became of the requests that ran when the signal came.

    Raises whatever ``load`` raises, and EngineDead when the engine gave up. A second signal ends
    the drain. Streams that outlive ``drain_timeout`` seconds end with an error event.
    """
    _allow_files(2 * max_connections + 256)
    pool = Pool()
    signals: asyncio.Queue[None] = asyncio.Queue()
    ports = [
        _Port(public_app(face, pool, face.keys), listeners.public, max_connections),
        _Port(admin_app(face), listeners.admin, max_connections),
    ]
    with _signals(face, signals):
        serving = [asyncio.create_task(port.serve()) for port in ports]
        try:
            return await _live(face, load, signals, drain_timeout)
        finally:
            pool.close()
            for port in ports:
                port.server.should_exit = True
            await asyncio.gather(*serving)


async def _live(
    face: Face,
    load: Callable[[], Awaitable[Backend]],
    signals: "asyncio.Queue[None]",
    drain_timeout: float,
) -> Drained:
    """From loading to the end of the drain."""
    signalled = asyncio.ensure_future(signals.get())
    loading = asyncio.ensure_future(load())
    try:
        await asyncio.wait({signalled, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return Drained(0, 0)  # nothing runs yet that would have to finish
        face.attach(backend := loading.result())
        _log.info("serving")
        await _first(signalled, backend.died.wait())
        if backend.died.is_set():
            raise EngineDead(backend.service.health().reason)
        _log.info("draining")
        drained = await _drain(backend, signals, drain_timeout)
        _log.info("drained: %d requests finished, %d were cut off", *drained)
        return drained
    finally:
        signalled.cancel()
        loading.cancel()


async def _drain(backend: Backend, signals: "asyncio.Queue[None]", drain_timeout: float) -> Drained:
    """Let running requests finish; a second signal, or an engine that dies, ends the waiting."""
    draining = asyncio.ensure_future(backend.service.drain(drain_timeout))
    await _first(draining, signals.get(), backend.died.wait())
    if draining.done():
        return draining.result()
    draining.cancel()
    return await backend.service.drain(0.0)


async def _first(*awaited: Awaitable[object]) -> None:
    """Wait until one is done; what was a coroutine is ended then."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, each in zip(tasks, awaited, strict=True):
        if task is not each:
            task.cancel()


class _Port:
    """One uvicorn server on a bound socket; h11 is pinned by giving uvicorn our own subclass of its
    protocol.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, max_connections: int) -> None:
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
            raise RuntimeError("uvicorn uses another HTTP parser")  # noqa: TRY004 - a wrong build, no wrong type
        # Broken requests are counted by their answers; uvicorn would log a line for each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._socket = sock
        self.server = _Server(config)

    async def serve(self) -> None:
        await self.server.serve(sockets=[self._socket])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: two servers share a process, and a drain comes before
    the end.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.contextmanager
def _signals(face: Face, signals: "asyncio.Queue[None]") -> Generator[None, None, None]:
    """SIGTERM and SIGINT end readiness at once, within the signal's own turn of the loop."""
    loop = asyncio.get_running_loop()

    def received() -> None:
        face.begin_drain()
        signals.put_nowait(None)

    caught = (signal.SIGTERM, signal.SIGINT)
    for each in caught:
        loop.add_signal_handler(each, received)
    try:
        yield
    finally:
        for each in caught:
            loop.remove_signal_handler(each)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit on open files towards the hard one: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
