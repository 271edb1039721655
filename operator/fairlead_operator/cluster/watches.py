"""kopf's part: watching. Every handler passes the object on, and does nothing else.

Only ``on.event``, ``on.login`` and ``on.startup`` are used: kopf's other handlers write finalizers
or annotations, and a finalizer would block the deletion of a resource while no operator runs.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kopf

from fairlead_operator.cluster.client import PAGE
from fairlead_operator.resource.kinds import Kind, Object

log = logging.getLogger(__name__)

Deliver = Callable[[Kind, bool, Object], None]  # kind, deleted, object


def registry(
    kinds: Sequence[Kind], environ: Mapping[str, str], deliver: Deliver
) -> kopf.OperatorRegistry:
    """A registry with a handler per kind, without logs. ``deliver`` is called in kopf's thread."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return _log_in(environ, **arguments)

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings, kinds)

    for kind in kinds:
        group, _, version = kind.api_version.rpartition("/")
        observe = _observer(kind, deliver)
        kopf.on.event(group, version, kind.plural, registry=handlers, id=kind.plural)(observe)
    return handlers


class _Connection(kopf.ConnectionInfo):
    """A connection that takes the same certificates as the operator's own client."""

    def as_ssl_context(self) -> ssl.SSLContext:
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def _log_in(environ: Mapping[str, str], **arguments: Any) -> _Connection | None:
    by_file = bool(environ.get("KUBECONFIG"))
    find = kopf.login_with_kubeconfig if by_file else kopf.login_with_service_account
    info = find(**arguments)
    if info is None:
        return None
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    return _Connection(**values)


def _observer(kind: Kind, deliver: Deliver) -> Callable[..., Any]:
    async def observe(event: Mapping[str, Any], **_: Any) -> None:
        deliver(kind, event.get("type") == "DELETED", event["object"])

    return observe


class _NoCopies(kopf.DiffBaseStorage):
    """A storage that keeps nothing of an object. kopf compares each with its last version for
    handlers that are not used here, and the copy for it takes most of the time that an event takes.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def _configure(settings: kopf.OperatorSettings, kinds: Sequence[Kind]) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no right to watch CRDs or namespaces is asked for
    settings.persistence.diffbase_storage = _NoCopies()
    settings.peering.standalone = True  # the Lease decides who writes
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (0.5, 1, 2, 3)
    settings.watching.server_timeout = 240
    # A watch without events is opened again; the re-list covers the gap.
    settings.watching.inactivity_timeout = 25
    settings.watching.connect_timeout = 5
    settings.watching.reconnect_backoff = 0.5
    settings.watching.chunk_size = PAGE
    # kopf has a worker for each object with news, which stays for this long: with a limit, news of
    # thousands of pods would wait for workers that do nothing.
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 0.1
    settings.queueing.error_delays = (1, 2, 5, 10)
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    for kind in kinds:
        group, _, version = kind.api_version.rpartition("/")
        if kind.labels:
            settings.watching.label_selectors[group, version, kind.plural] = kind.labels
        if kind.fields:
            settings.watching.field_selectors[group, version, kind.plural] = kind.fields


class Watches:
    """kopf in a thread with a loop of its own: when it ends, it cancels every task of its loop."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        environ: Mapping[str, str],
        deliver: Deliver,
    ) -> None:
        self._kinds, self._namespaces, self._environ, self._deliver = (
            kinds,
            namespaces,
            environ,
            deliver,
        )
        self._left_out: frozenset[str] = frozenset()
        self._open: frozenset[str] = frozenset()  # what kopf watches
        self._grown = asyncio.Event()  # more is to be watched
        self._ended = False
        self._stop: Callable[[], object] = lambda: None

    def leave_out(self, namespaces: frozenset[str]) -> None:
        """Watch all namespaces but these: one that is gone would end the watches of the others.

        What is watched already and left out now is watched on until kopf starts again.
        """
        self._left_out = namespaces
        if not self._open.issuperset(self._watched):
            self._grown.set()
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                self._stop()

    @property
    def _watched(self) -> list[str]:
        return [name for name in self._namespaces if name not in self._left_out]

    async def run(self, restarted: Callable[[], None], pause: float = 2.0) -> None:
        """Keep the watches open until cancelled, whatever the API server answers."""
        try:
            while True:
                self._grown.clear()
                self._open = frozenset(self._watched)
                if self._open or not self._namespaces:
                    await asyncio.to_thread(self._once)
                    if not self._grown.is_set():
                        restarted()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._grown.wait(), pause)
        finally:
            self._ended = True
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                self._stop()

    def _once(self) -> None:
        # Not asyncio.run: it waits without limit for tasks that do not end when cancelled.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._watch(loop))
        except BaseException as error:  # noqa: BLE001 - kopf ends on 401, 409, 410, 500 and cut answers: start again
            log.warning("watches ended: %s", str(error)[:1024])
        finally:
            loop.close()

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch as ``kopf.operator`` does, but end within seconds: kopf waits for the tasks of a
        broken watch.
        """
        stop = asyncio.Event()  # a threading.Event would hold a thread of the loop for ever
        self._stop = functools.partial(loop.call_soon_threadsafe, stop.set)
        if self._ended or self._grown.is_set():
            return
        roots = await kopf.spawn_tasks(
            registry=registry(self._kinds, self._environ, self._deliver),
            settings=kopf.OperatorSettings(),
            clusterwide=not self._namespaces,
            namespaces=sorted(self._open),
            standalone=True,
            stop_flag=stop,
        )
        done, _ = await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
        await _end(set(roots))  # first these: they close the connections
        await _end({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel twice, because kopf may ignore the first; the closing loop ends what still runs."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(2):
        for task in pending:
            task.cancel()
        if pending:
            finished, pending = await asyncio.wait(pending, timeout=1)
            for task in finished:
                if not task.cancelled():
                    task.exception()  # read, so that asyncio does not report it as never retrieved
