"""``fairlead serve`` after its flags: listen, load, prove, serve, drain.

Owns the order and what the HTTP side gets. Decides no exit code but that of a dead engine; the
table of refusals is commands/refusals.py.
"""

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fairlead_runtime.api import server as http
from fairlead_runtime.api.auth import KeyRing
from fairlead_runtime.api.state import Backend, Face
from fairlead_runtime.config import EngineConfig
from fairlead_runtime.hub import source
from fairlead_runtime.hub.fetch import Progress
from fairlead_runtime.models.files import CONFIG
from fairlead_runtime.outputs import Drained, EngineDead
from fairlead_runtime.preflight import check_record
from fairlead_runtime.serving.metrics import Stats
from fairlead_runtime.serving.service import Service
from fairlead_runtime.start import host, termination
from fairlead_runtime.start.resolve import check_supported

if TYPE_CHECKING:
    from fairlead_runtime.start.build import Built

log = logging.getLogger("fairlead.serve")
T = TypeVar("T")


def run(model: str, config: EngineConfig, host: str, port: int, admin_port: int) -> int:
    """Serve until SIGTERM; 0 then, 1 when the engine gave up. Raises what refuses the configuration
    or the model.
    """
    check_supported(config)
    source.check_revision(source.parse(model), config.revision)
    check_record(config)
    keys = KeyRing(config.api_key_file) if config.api_key_file else None
    listeners = http.listen(host, port, admin_port)
    for name, listener in zip(("public", "admin"), listeners, strict=True):
        log.info("%s port: http://%s:%d", name, *listener.getsockname()[:2])
    face = Face(name=config.served_name or model, source=model, keys=keys)
    try:
        drained = asyncio.run(_serve(face, listeners, model, config))
    except EngineDead as error:
        log.critical("the engine gave up: %s", error)
        return 1
    words = f"{drained.finished} running requests finished, {drained.aborted} were cut off"
    termination.leave(termination.line("Drained", words, **drained._asdict()), os.environ)
    return 0


async def _serve(
    face: Face, listeners: http.Listeners, model: str, config: EngineConfig
) -> Drained:
    services: list[Service] = []

    async def load() -> Backend:
        backend, service = await _load(face, model, config)
        services.append(service)
        return backend

    try:
        return await http.serve(face, listeners, load, drain_timeout=config.drain_timeout)
    finally:
        for service in services:
            await service.stop()


async def _load(face: Face, model: str, config: EngineConfig) -> tuple[Backend, Service]:
    """Fetch, show config.json, load, prove, start. Runs while the ports answer already."""
    told = _progress(face)
    path = await _aside(lambda: source.resolve(model, revision=config.revision, report=told).path)
    stats = Stats(face.name)
    built = await _aside(lambda: _build(face, path, config, stats))
    warmed = time.monotonic() - built.loaded_at
    stats.started(loaded=host.process_age() - warmed, warmed=warmed)
    service = Service(built.engine, built.intake, built.vocabulary)
    service.start()
    backend = Backend(
        service=service,
        tokenizer=built.tokenizer,
        vocabulary=built.vocabulary,
        metrics=lambda: stats.exposition(service.snapshot(), draining=face.draining),
        memory=built.memory.as_dict,
        died=service.died,
    )
    return backend, service


def _build(face: Face, path: Path, config: EngineConfig, stats: Stats) -> "Built":
    face.model_config = (path / CONFIG).read_bytes()
    # Imported here: torch and the models take seconds, in which the probes answer already.
    from fairlead_runtime.start.build import build

    return build(path, config, observer=stats)


async def _aside(work: Callable[[], T]) -> T:
    """``work`` on a thread that does not keep the process alive: a signal while weights load ends
    it at once.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def target() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - it goes to the waiter
            outcome = functools.partial(done.set_exception, error)
        else:
            outcome = functools.partial(done.set_result, value)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=target, name="loading", daemon=True).start()
    return await done


def _progress(face: Face) -> Callable[[Progress], None]:
    """A log line per tenth of the download; config.json is shown as soon as it is there."""
    told = 0

    def report(progress: Progress) -> None:
        nonlocal told
        if progress.path is not None and face.model_config is None:
            face.model_config = (progress.path / CONFIG).read_bytes()
        tenth = 10 * progress.done // max(1, progress.total)
        if tenth > told:
            told = tenth
            log.info("fetched %d %% of %.2f GiB", 10 * tenth, progress.total / 2**30)

    return report
