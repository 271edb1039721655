"""kopf's part: watching. Every handler hands what it saw to the store's owner, and nothing else.

Only ``on.event``, ``on.login`` and ``on.startup`` are used: everything else of kopf writes finalizers or annotations,
and a finalizer would keep a resource from being deleted while no operator runs.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kopf

from fairlead_operator.kinds import Kind, Object

log = logging.getLogger(__name__)

Deliver = Callable[[Kind, bool, Object], None]  # kind, deleted, object


def registry(kinds: Sequence[Kind], environ: Mapping[str, str], deliver: Deliver) -> kopf.OperatorRegistry:
    """One silent handler per kind. ``deliver`` is called in kopf's thread."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        if environ.get("KUBECONFIG"):
            return kopf.login_with_kubeconfig(**given)
        return kopf.login_with_service_account(**given)

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings, kinds)

    for kind in kinds:
        group, _, version = kind.api_version.rpartition("/")
        observe = _observer(kind, deliver)
        kopf.on.event(group, version, kind.plural, registry=handlers, id=kind.plural)(observe)
    return handlers


def _observer(kind: Kind, deliver: Deliver) -> Callable[..., Any]:
    async def observe(event: Mapping[str, Any], **_: Any) -> None:
        deliver(kind, event.get("type") == "DELETED", event["object"])

    return observe


def _configure(settings: kopf.OperatorSettings, kinds: Sequence[Kind]) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no right to watch CRDs or namespaces is asked for
    settings.peering.standalone = True  # the Lease decides who writes
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (0.5, 1, 2, 3)
    settings.watching.server_timeout = 240
    settings.watching.inactivity_timeout = (
        25  # a watch that went silent is opened anew; the re-list covers the gap
    )
    settings.watching.connect_timeout = 5
    settings.watching.reconnect_backoff = 0.5
    settings.queueing.worker_limit = 50
    settings.queueing.idle_timeout = 1
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
        self, kinds: Sequence[Kind], namespaces: Sequence[str], environ: Mapping[str, str], deliver: Deliver
    ) -> None:
        self._kinds, self._namespaces, self._environ, self._deliver = kinds, namespaces, environ, deliver
        self._stop = threading.Event()

    async def run(self, restarted: Callable[[], None], pause: float = 2.0) -> None:
        """Keep the watches up until cancelled, whatever the API server answers."""
        try:
            while True:
                await asyncio.to_thread(self._once)
                restarted()
                await asyncio.sleep(pause)
        finally:
            self._stop.set()

    def _once(self) -> None:
        try:
            asyncio.run(
                kopf.operator(
                    registry=registry(self._kinds, self._environ, self._deliver),
                    settings=kopf.OperatorSettings(),
                    clusterwide=not self._namespaces,
                    namespaces=list(self._namespaces),
                    standalone=True,
                    stop_flag=self._stop,
                )
            )
        except BaseException as error:  # noqa: BLE001 - kopf ends on 401, 409, 410, 500 and cut answers: start again
            log.warning("watches ended: %s", str(error)[:1024])
