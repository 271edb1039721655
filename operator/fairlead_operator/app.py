"""The tasks of the operator process. It ends by a signal alone, whatever the API server answers.

Owns the parts' lifetimes. kopf's watches make reactions quick; the steady re-list through our own
client makes them certain: a change that no watch delivers is seen ``RELIST_SECONDS`` later. Of a
namespace without a resource only resources are listed, and after ``IDLE_SECONDS`` watched.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping

from fairlead_operator.cluster.cache import Store, resource_of
from fairlead_operator.cluster.client import Cluster, connect
from fairlead_operator.cluster.lease import Election
from fairlead_operator.cluster.watches import Watches
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.errors import ApiError, FencedError
from fairlead_operator.health import Health
from fairlead_operator.memory import Memory
from fairlead_operator.metrics import Metrics
from fairlead_operator.probe.canaries import Canaries, PodKey
from fairlead_operator.probe.hub import Hub
from fairlead_operator.probe.pod_client import Pods
from fairlead_operator.probe.prober import Prober
from fairlead_operator.reconcile import Reconciler
from fairlead_operator.resource.kinds import (
    EVENT,
    GROUP,
    POD,
    RESOURCE,
    VERSION,
    Key,
    Kind,
    Object,
    key_of,
    watched_kinds,
)
from fairlead_operator.resource.settings import Settings
from fairlead_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

RELIST_SECONDS = 18.0
RELIST_RETRY_SECONDS = 2.0
# Without a resource, until a namespace is left out of the children's watches: to come back restarts
# those of all namespaces.
IDLE_SECONDS = 600.0
READ_SINGLY = 20  # objects that differ; more are read in one list
RELEASE_SECONDS = 2.0
# At a time; the clients bound the requests.
WORKERS, PROBES, CANARIES = 50, 1000, 200
# After news of a child: a rollout has many, and they become one pass. A new spec waits for nothing.
CHILD_SETTLE = 0.5


class Operator:
    """One operator process. ``run`` works until cancelled."""

    def __init__(
        self,
        settings: Settings,
        health: Health,
        metrics: Metrics,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings, self._health, self._metrics, self._environ = (
            settings,
            health,
            metrics,
            environ,
        )
        self._kinds = watched_kinds(claims=settings.create_model_cache)
        self._store = Store()
        self._gone: frozenset[str] = frozenset()  # namespaces that the last lists did not find
        self._occupied_at: dict[str, float] = {}  # when each namespace last had a resource
        self._watches: list[Watches] = []
        self._arrival = asyncio.Event()  # a resource came to a namespace that had none
        self._began = asyncio.Event()  # the first lists are done

    async def run(self) -> None:
        hub = Hub(self._settings.hub, proxies=self._settings.proxies)
        try:
            async with (
                connect(self._store, self._metrics, self._environ) as cluster,
                Pods() as pods,
            ):
                await self._run(cluster, pods, hub)
        finally:
            await hub.close()

    async def _run(self, cluster: Cluster, pods: Pods, hub: Hub) -> None:
        self._cluster = cluster
        served = ", ".join(sorted(self._settings.namespaces)) or "all namespaces"
        self._election = Election(
            cluster,
            self._settings.lease_namespace,
            self._settings.identity,
            serves=served,
        )
        cluster.may_write = self._election.holds
        results: Memory[ProbeResults] = Memory()
        self._reconciler = Reconciler(cluster, results.get, self._settings)
        self._queue: WorkQueue[Key] = WorkQueue(self._pass)
        canaries = Canaries(self._store, results, pods, self._queue.wake)
        self._canaries: WorkQueue[PodKey] = WorkQueue(
            functools.partial(self._send_canary, canaries), settle=0.0
        )
        prober = Prober(
            self._store,
            results,
            self._settings,
            pods,
            hub,
            self._queue.wake,
            self._canaries.wake,
        )
        self._probes: WorkQueue[Key] = WorkQueue(functools.partial(self._probe, prober), settle=0.2)
        namespaces, deliver = self._settings.namespaces, self._from_watch()
        groups = (self._kinds[:1], self._kinds[1:]) if namespaces else (self._kinds,)
        self._watches = [Watches(kinds, namespaces, self._environ, deliver) for kinds in groups]
        self._leave_out()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._election.run(self._on_election))
                group.create_task(self._relist())
                if namespaces:
                    group.create_task(self._enter())
                group.create_task(self._watch())
                group.create_task(self._queue.run(WORKERS))
                group.create_task(self._probes.run(PROBES))
                group.create_task(self._canaries.run(CANARIES))
        finally:
            # After everything that writes has ended; a standby then takes over at once.
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self._election.release()

    async def _pass(self, key: Key) -> float | None:
        if not self._may_work(key):
            return None
        with self._metrics.duration.time():
            try:
                requeue_after = await self._reconciler(key)
            except FencedError:
                return None
            except Exception as error:
                self._metrics.reconciles.labels("error").inc()
                self._metrics.errors.labels("reconcile").inc()
                if not isinstance(error, ApiError):
                    log.exception("a pass failed", extra={"key": str(key)})
                raise
        self._metrics.reconciles.labels("ok").inc()
        return requeue_after

    def _may_work(self, key: Key) -> bool:
        """Whether this process may act for a resource: it holds the Lease, and every kind was
        listed in the resource's namespace. Taking over wakes every key, and so does the end of the
        first lists.
        """
        is_gone = self._store.get(RESOURCE, key) is None  # to be forgotten: nothing is read of it
        return self._election.holds() and (is_gone or self._is_listed(key[0]))

    def _is_listed(self, namespace: str) -> bool:
        """Whether every kind was listed there. Before that, a missing object may exist."""
        scope = namespace if self._settings.namespaces else ""
        return all(self._store.has_list(kind, scope) for kind in self._kinds)

    async def _probe(
        self, work: Callable[[Key], Awaitable[float | None]], key: Key
    ) -> float | None:
        return await work(key) if self._may_work(key) else None

    async def _send_canary(self, canaries: Canaries, pod: PodKey) -> float | None:
        return await canaries(pod) if self._may_work(pod[0]) else None

    def _on_election(self, leading: bool) -> None:
        self._metrics.leader.set(leading)
        if leading:
            self._wake_all()

    def _wake_all(self, namespace: str = "") -> None:
        for body in self._store.all(RESOURCE):
            if namespace in {"", key_of(body)[0]}:
                self._wake(key_of(body))

    def _wake(self, key: Key, after: float | None = None) -> None:
        """Make a resource due in both queues, to decide and to probe. Without news, each queue goes
        on at its own interval.
        """
        self._queue.wake(key, after)
        self._probes.wake(key, after)

    def _from_watch(self) -> Callable[[Kind, bool, Object], None]:
        """A callback that hands objects from kopf's thread to this loop's."""
        loop = asyncio.get_running_loop()

        def deliver(kind: Kind, deleted: bool, body: Object) -> None:
            # dict(): kopf keeps its own object.
            loop.call_soon_threadsafe(self._take, kind, deleted, dict(body))

        return deliver

    def _take(self, kind: Kind, deleted: bool, body: Object) -> None:
        changed = self._store.remove(kind, body) if deleted else self._store.put(kind, body)
        if changed:
            self._wake_for(kind, body)

    def _wake_for(self, kind: Kind, body: Object) -> None:
        """Wake the resource that an object is, or belongs to."""
        namespace, name = key_of(body)
        if kind is RESOURCE:
            self._wake((namespace, name))
            if not self._is_listed(namespace):
                self._arrival.set()
        elif kind is EVENT:
            for pod in self._store.pods_about(body):
                self._wake_for(*pod)
        elif (owner := resource_of(body)) and self._store.get(RESOURCE, owner) is not None:
            # Here and not in a pass: a pod that ended may be gone before one begins.
            if kind is POD:
                self._reconciler.count_drained(owner, body)
            self._wake(owner, CHILD_SETTLE)

    async def _watch(self) -> None:
        """Start once our kind is served: kopf would wait for it for ever and log nothing."""
        while True:
            try:
                discovery = await self._cluster.call("discover", "GET", f"/apis/{GROUP}/{VERSION}")
                if any(
                    api_resource.get("name") == RESOURCE.plural
                    for api_resource in discovery.get("resources", ())
                ):
                    break
                log.warning("the InferenceDeployment CRD is not installed: install it; waiting")
            except ApiError as error:
                log.warning("looking for the InferenceDeployment CRD: %s", error)
            await asyncio.sleep(RELIST_RETRY_SECONDS)
        async with asyncio.TaskGroup() as group:
            for watches in self._watches:
                group.create_task(watches.run(self._metrics.restarts.inc))

    def _leave_out(self) -> None:
        """Watch resources where namespaces exist, and all else only where resources are or lately
        were. Forget all else where no resource is: what is left out is then listed no longer.
        """
        if not self._settings.namespaces:
            return
        now, occupied = self._store.now(), self._occupied()
        self._store.keep_only(self._kinds[1:], occupied)
        self._occupied_at |= dict.fromkeys(occupied, now)
        idle = {
            name
            for name in self._settings.namespaces
            if now - self._occupied_at.get(name, -math.inf) > IDLE_SECONDS
        }
        for watches, left_out in zip(self._watches, (self._gone, self._gone | idle), strict=False):
            watches.leave_out(left_out)

    def _occupied(self) -> frozenset[str]:
        """The namespaces that have a resource."""
        return frozenset(key_of(body)[0] for body in self._store.all(RESOURCE))

    def _unlisted(self) -> set[str]:
        """The namespaces with a resource in which a kind was not listed yet."""
        there = self._occupied() - self._gone
        return {namespace for namespace in there if not self._is_listed(namespace)}

    async def _enter(self) -> None:
        """List all kinds in a namespace, and watch them, as soon as its first resource comes."""
        await self._began.wait()
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            self._leave_out()
            for namespace in sorted(self._unlisted()):
                await self._list_children(namespace)
            if self._unlisted():
                asyncio.get_running_loop().call_later(RELIST_RETRY_SECONDS, self._arrival.set)

    async def _relist(self) -> None:
        while True:
            is_complete = await self._list_all()
            self._leave_out()
            self._began.set()
            if is_complete:
                self._health.ready = True
            await asyncio.sleep(RELIST_SECONDS if is_complete else RELIST_RETRY_SECONDS)

    async def _list_all(self) -> bool:
        """Whether everything was listed, except for the namespaces in which every kind is refused.

        Those are gone, and with them the operator's Role: nothing else waits for them.
        """
        namespaces = self._settings.namespaces or ("",)
        errors = {name: [await self._list(RESOURCE, name)] for name in namespaces}
        self._leave_out()
        occupied = self._occupied()
        for name in namespaces:
            if not name or name in occupied:
                errors[name] += await self._list_children(name)
        failed = {name for name, answers in errors.items() if any(answers)}
        refused = {name for name in failed if name and all(map(_is_refusal, errors[name]))}
        gone = frozenset(
            [name for name in refused if name in occupied or await self._refuses_children(name)]
        )
        for namespace in gone - self._gone:
            log.warning(
                "namespace %s is not served: it was deleted, or no Role lets the operator read it",
                namespace,
            )
        self._gone = gone
        return failed <= gone

    async def _list_children(self, namespace: str) -> list[ApiError | None]:
        """The errors of the lists of all kinds but our own."""
        return [await self._list(kind, namespace) for kind in self._kinds[1:]]

    async def _refuses_children(self, namespace: str) -> bool:
        """Whether all kinds but our own are refused there: no Role, not one that lacks a right."""
        for kind in self._kinds[1:]:
            try:
                await self._cluster.versions(kind, namespace)
            except ApiError as error:
                if _is_refusal(error):
                    continue
            return False
        return True

    async def _newest_list(self, kind: Kind, namespace: str) -> tuple[list[Object], int]:
        """The list as the API server has it now. Watches keep the store current, so that only
        versions are listed, and whole objects are read where they differ.
        """
        if not self._store.has_list(kind, namespace):
            return await self._cluster.list(kind, namespace)
        versions, version = await self._cluster.versions(kind, namespace)
        stale_keys = self._store.stale_keys(kind, namespace, versions, version)
        if stale_keys is None or len(stale_keys) > READ_SINGLY:
            return await self._cluster.list(kind, namespace)
        # Before the reads: meanwhile the store may forget a namespace.
        cached = {key: self._store.get(kind, key) for key in versions}
        read = {key: await self._cluster.list_one(kind, key) for key in stale_keys}
        return [body for body in (cached | read).values() if body is not None], version

    async def _list(self, kind: Kind, namespace: str) -> ApiError | None:
        try:
            bodies, version = await self._newest_list(kind, namespace)
        except ApiError as error:
            self._metrics.errors.labels("list").inc()
            if namespace not in self._gone:
                log.warning("list %s: %s", kind.plural, error)
            return error
        was_listed = self._is_listed(namespace)
        for body in self._store.replace(kind, namespace, bodies, version):
            self._wake_for(kind, body)
        if not was_listed and self._is_listed(namespace):
            self._wake_all(namespace)
        return None

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            await asyncio.sleep(1)


def _is_refusal(error: ApiError | None) -> bool:
    """Whether the API server refused a list for good: no right to it, or no such kind."""
    return error is not None and error.code in {403, 404}
