"""Probes pods and the hub in the background: load, sizing, downloads, config.json.

A second keyed queue runs it, so that a pod which hangs delays no pass. The pods of a resource are
asked together, so that one which hangs delays no other. It owns the results, to which ``Canaries``
adds; a change that the status shows wakes the resource.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.observe import observe
from fairlead_operator.decide.children.manifests import revision_of
from fairlead_operator.decide.pods import downloads, startup
from fairlead_operator.decide.pods.load import (
    SERIES,
    LoadError,
    Sample,
    lines_of,
    parse,
    parse_served,
)
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.pod import address_of
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.release import is_served_by_another
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.memory import Memory
from fairlead_operator.probe.canaries import PodKey
from fairlead_operator.probe.hub import Hub, HubError
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.kinds import RESOURCE, Key, Object
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

IDLE_SECONDS = 15.0  # between probes of a resource that is not autoscaled
RETRY_SECONDS = 2.0  # while a download reports nothing yet


class Prober:
    """Work of the second queue: ``__call__`` returns the seconds until the next probes, None for
    never.
    """

    def __init__(
        self,
        store: Store,
        results: Memory[ProbeResults],
        settings: Settings,
        pods: Pods,
        hub: Hub,
        wake: Callable[[Key], None],
        send_canary: Callable[[PodKey], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._results, self._settings = store, results, settings
        self._pods, self._hub, self._wake, self._clock = pods, hub, wake, clock
        self._send_canary = send_canary

    async def __call__(self, key: Key) -> float | None:
        body = self._store.get(RESOURCE, key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._results.forget(key)
            return None
        if is_served_by_another(body, self._settings.release):
            self._results.forget(key)
            return None  # a new mark wakes it
        try:
            resource = self._store.resource(body)
        except ResourceError:
            return IDLE_SECONDS
        snapshot = observe(self._store, key, resource.uid)
        # The Deployment's own: in an upgrade it may keep an older template for a while.
        live = snapshot.deployment
        serving = [] if live is None else snapshot.serving(revision_of(live))
        fetching = downloads.fetching(snapshot.pods)
        previous = self._of(resource).of_pods(_uids(snapshot.pods), _uids(fetching))
        self._results.put(key, resource.uid, previous)

        due = _uids(serving) - previous.canaries
        self._learn(resource, canaries_due=due - previous.canary_failures.keys())
        for uid in due:
            self._send_canary((key, uid))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._config(resource, snapshot))
            for pod in snapshot.running_pods():
                group.create_task(self._load(resource, pod))
            group.create_task(self._measure(resource, serving))
            group.create_task(self._downloads(resource, fetching))
        self._learn(resource, complete=True)
        results = self._of(resource)
        if not results.shows_as(previous):
            self._wake(key)
        if any(p["metadata"]["uid"] not in results.downloads for p in fetching):
            return RETRY_SECONDS
        policy = resource.spec.autoscaling
        scales = policy is not None and policy.managed_by == "operator"
        return TICK if scales or fetching else IDLE_SECONDS

    def _of(self, resource: InferenceDeployment) -> ProbeResults:
        return self._results.get(_key(resource), resource.uid) or ProbeResults()

    def _learn(self, resource: InferenceDeployment, **changes: Any) -> None:
        """Store results at once, so that a pod which hangs holds back no result of another."""
        results = replace(self._of(resource), **changes)
        self._results.put(_key(resource), resource.uid, results)

    async def _load(self, resource: InferenceDeployment, pod: Object) -> None:
        """Read a pod's load: a good sample replaces the last one, which otherwise grows stale."""
        uid, name = pod["metadata"]["uid"], resource.engine.served_name
        try:
            unresponsive = uid in self._of(resource).unresponsive
            body = await self._pods.metrics(address_of(pod), unresponsive=unresponsive)
        except ScrapeError:
            self._learn(resource, unresponsive=self._of(resource).unresponsive | {uid})
            return
        self._learn(resource, unresponsive=self._of(resource).unresponsive - {uid})
        text = lines_of(body, SERIES + startup.SERIES)
        try:
            load = parse(text, name)
        except LoadError:
            return
        parts = startup.read(text, name)
        results = self._of(resource)
        self._learn(
            resource,
            samples={**results.samples, uid: Sample(load, self._clock(), parse_served(text, name))},
            startups={**results.startups, uid: parts},
        )

    async def _measure(self, resource: InferenceDeployment, serving: list[Object]) -> None:
        """Read the sizing that one serving pod measured, once a pod."""
        if not serving or self._of(resource).measured_of in _uids(serving):
            return
        with contextlib.suppress(ScrapeError):
            measured = await self._pods.memory(address_of(serving[0]))
            uid = serving[0]["metadata"]["uid"]
            self._learn(resource, measured=measured, measured_of=uid)

    async def _downloads(self, resource: InferenceDeployment, fetching: list[Object]) -> None:
        current = self._of(resource).downloads
        latest = dict(current)

        async def ask(pod: Object) -> None:
            with contextlib.suppress(ScrapeError):
                progress = downloads.read(await self._pods.progress(address_of(pod)))
                if progress is not None:
                    latest[pod["metadata"]["uid"]] = progress

        await asyncio.gather(*(ask(pod) for pod in fetching))
        next_shown = downloads.show(
            current, latest, self._clock() - self._of(resource).downloads_at
        )
        if next_shown is not current:
            self._learn(resource, downloads=next_shown, downloads_at=self._clock())

    async def _config(self, resource: InferenceDeployment, snapshot: Snapshot) -> None:
        """The model's config.json: shipped, from the hub, or from a pod that has it."""
        model = resource.spec.model
        identity = f"{model.source}@{model.revision}"
        if self._of(resource).config_of != identity:
            self._learn(resource, config=None, config_of=identity)
        if self._of(resource).config is not None:
            return
        try:
            config: Mapping[str, Any] | None = await self._hub.config(model.origin, model.revision)
        except HubError as error:
            config = await self._config_of_pods(snapshot)
            if config is None:
                self._learn(resource, config_error=(error.reason, str(error)))
        if config is not None:
            self._learn(resource, config=config)

    async def _config_of_pods(self, snapshot: Snapshot) -> Mapping[str, Any] | None:
        for pod in snapshot.pods:
            if address_of(pod):
                try:
                    return await self._pods.model_config(address_of(pod))
                except ScrapeError:
                    continue
        return None


def _key(resource: InferenceDeployment) -> Key:
    return resource.namespace, resource.name


def _uids(pods: Iterable[Object]) -> frozenset[str]:
    return frozenset(pod["metadata"]["uid"] for pod in pods)
