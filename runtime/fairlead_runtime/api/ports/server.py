"""The server process: load, serve, drain, end.

Owns both ports in one event loop, and the signals. The ports are open while the model loads, so
that probes and ``/model/config.json`` answer. SIGTERM and SIGINT start the drain, and the process
ends with it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator

from fairlead_runtime.api.ports.app import admin_app, public_app
from fairlead_runtime.api.state.http_load import HttpLoad
from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.front.doors import Listeners
from fairlead_runtime.front.drain import Drain
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.front.port import Port, allow_files
from fairlead_runtime.outputs import DrainResult, EngineDead
from fairlead_runtime.serving.metrics import PORTS
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.traffic import CONNECTIONS, LEAST_FILES, Bound, PortBounds, files_of

DEFAULT_CONNECTIONS = Bound(CONNECTIONS, "at least")
HURRY_SECONDS = 0.5  # for what still runs when a second SIGINT comes
DEAD_SECONDS = 1  # for the last bytes of answers when the engine has ended

_log = logging.getLogger("fairlead.api")


async def serve(
    state: ServerState,
    listeners: Listeners,
    load: Callable[[], Awaitable[Backend]],
    *,
    drain_grace: float,
    drain_timeout: float,
    connections: Bound = DEFAULT_CONNECTIONS,
    ready: Callable[[], None] = lambda: _log.info("serving"),
) -> DrainResult:
    """Serve until SIGTERM or SIGINT, with the backend that ``load`` returns; the ports are open
    while it loads.

    Returns how many of the requests that ran at the signal or came later finished and how many
    were aborted. Raises whatever ``load`` raises, EngineDead when the engine gives up, and
    ConfigError where the process may open too few files. A second signal ends the drain. New
    requests are served for ``drain_grace`` seconds after SIGTERM, not after SIGINT, which a person
    sends; streams that run ``drain_timeout`` seconds longer end with an error event. The public
    port has at most ``connections``, fewer where the process may not open as many files. ``ready``
    is called when requests are served.
    """
    bounds = _port_bounds(connections)
    state.port_bounds = bounds
    pool = PromptPool()
    signals: asyncio.Queue[None] = asyncio.Queue()
    public = Port(
        public_app(state, pool, state.keys),
        listeners.public,
        bounds.public.most,
        state.certificates,
        bounds.handshakes,
    )
    drain = Drain(state, grace=drain_grace, timeout=drain_timeout, close_idle=public.close_idle)
    ports = [public, Port(admin_app(state, drain), listeners.admin, bounds.admin)]
    state.load = HttpLoad(
        pool, dict(zip(PORTS, [port.open_connections for port in ports], strict=True))
    )
    # The pool ends after the ports: until then requests come, also when the engine has ended.
    with contextlib.closing(pool), _signals(drain, state, signals):
        serving = [asyncio.create_task(port.serve()) for port in ports]
        watching = asyncio.create_task(state.load.watch_loop())
        try:
            return await _load_and_drain(state, load, signals, drain, ready)
        except EngineDead:
            for port in ports:
                port.server.config.timeout_graceful_shutdown = DEAD_SECONDS
            raise
        finally:
            drain.cancel()
            watching.cancel()
            for port in ports:
                port.server.should_exit = True
            await asyncio.gather(*serving)


def _port_bounds(connections: Bound) -> PortBounds:
    """What the limit on open files, raised as far as it may be, leaves of ``connections``; warns
    where that is less. Raises ConfigError where it is too little.
    """
    files = files_of(connections.most)
    allowed = allow_files(files)
    if allowed is not None and allowed < LEAST_FILES:
        raise ConfigError(
            "port",
            f"the server may open {allowed} files and needs {LEAST_FILES} at least",
            f"raise the hard limit, `ulimit -Hn`, best to {files}",
        )
    bounds = PortBounds.within(allowed, connections)
    if bounds.public.most < connections.most:
        _log.warning(
            "the public port takes %d connections of %d: %s; set the hard limit to %d",
            bounds.public.most,
            connections.most,
            bounds.public.reason,
            files,
        )
    return bounds


async def _load_and_drain(
    state: ServerState,
    load: Callable[[], Awaitable[Backend]],
    signals: "asyncio.Queue[None]",
    drain: Drain,
    ready: Callable[[], None],
) -> DrainResult:
    """Load, serve and drain."""
    signal_task = asyncio.ensure_future(signals.get())
    load_task = asyncio.ensure_future(load())
    try:
        await asyncio.wait({signal_task, load_task}, return_when=asyncio.FIRST_COMPLETED)
        if not load_task.done():
            return DrainResult(0, 0)  # no request runs yet
        state.attach(backend := load_task.result())
        ready()
        await _first(signal_task, backend.died.wait())
        if backend.died.is_set():
            raise EngineDead(backend.service.health().reason)
        return await _drain(backend, signals, drain)
    finally:
        signal_task.cancel()
        load_task.cancel()


async def _drain(backend: Backend, signals: "asyncio.Queue[None]", drain: Drain) -> DrainResult:
    """Drain, until a second signal or the end of the engine."""
    draining = drain.begin()
    await _first(draining, signals.get(), backend.died.wait())
    if backend.died.is_set():  # its streams have ended, so the drain is done as well
        raise EngineDead(backend.service.health().reason)
    return draining.result() if draining.done() else await drain.cut()


async def _first(*awaited: Awaitable[object]) -> None:
    """Wait until one is done; then cancel those that were coroutines."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaited]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, awaitable in zip(tasks, awaited, strict=True):
        if task is not awaitable:
            task.cancel()


@contextlib.contextmanager
def _signals(
    drain: Drain, state: ServerState, signals: "asyncio.Queue[None]"
) -> Generator[None, None, None]:
    """Handle SIGTERM and SIGINT: end readiness in the same turn of the loop, then queue the
    signal. A second SIGINT ends the process in HURRY_SECONDS at most, whatever still runs.
    """
    loop = asyncio.get_running_loop()
    interrupted = False

    def received(number: signal.Signals) -> None:
        nonlocal interrupted
        if number is signal.SIGINT:
            if interrupted:
                _end_soon()
            interrupted = True
            drain.skip_grace()
        drain.begin(process_ends=True, serving=state.backend is not None)
        signals.put_nowait(None)

    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _end_soon() -> None:
    """A person has interrupted twice: running streams get their last event, if that is quick. The
    kernel ends the engine's process with this one.
    """
    timer = threading.Timer(HURRY_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()
