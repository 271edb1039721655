"""Asks pods and the hub what a pass wants to know, in the background: canary, load, sizing,
downloads, config.json.

A second keyed queue runs it, so that a pod which hangs delays no pass. What is learned goes into
``Known``; news wakes the resource.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.observe import observe
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.pods import downloads, startup
from fairlead_operator.decide.pods.load import LoadError, Sample, parse
from fairlead_operator.decide.pods.observed import Observed
from fairlead_operator.decide.pods.pod import address_of
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.decide.scale.state import Known, Memory
from fairlead_operator.probe.hub import Hub, HubError
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.kinds import RESOURCE, REVISION_LABEL, Key, Object
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

IDLE_SECONDS = 15.0  # between two looks at the load of a resource that is not autoscaled
RETRY_SECONDS = 2.0  # after a canary that failed, or while a download says nothing yet


class Asker:
    """``__call__`` is the work of the queue: the seconds after which to ask again, None for never."""

    def __init__(
        self,
        store: Store,
        memory: Memory,
        settings: Settings,
        pods: Pods,
        hub: Hub,
        wake: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._memory, self._settings = store, memory, settings
        self._pods, self._hub, self._wake, self._clock = pods, hub, wake, clock

    async def __call__(self, key: Key) -> float | None:
        body = self._store.get(RESOURCE, key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return None
        try:
            resource = InferenceDeployment.from_body(body)
        except ResourceError:
            return IDLE_SECONDS
        known = self._memory.of(key, resource.uid)
        seen = observe(self._store, key, resource.uid)
        known.forget_pods({p["metadata"]["uid"] for p in seen.pods})
        template = pod_template(resource, self._settings)
        serving = seen.serving(template["metadata"]["labels"][REVISION_LABEL])

        news = await self._config(resource, seen, known)
        untested = [p for p in serving if p["metadata"]["uid"] not in known.canaries]
        for pod in untested:
            news |= await self._canary(pod, known)
        for pod in seen.ready_pods():
            news |= await self._load(resource, pod, known)
        news |= await self._measure(serving, known)
        fetching = downloads.fetching(seen.pods)
        news |= await self._downloads(fetching, known)
        if news or not known.asked:
            known.asked = True
            self._wake(key)
        scaled = (
            resource.spec.autoscaling is not None
            and resource.spec.autoscaling.managed_by == "operator"
        )
        again = TICK if scaled or fetching else IDLE_SECONDS
        pending = any(p["metadata"]["uid"] not in known.canaries for p in serving)
        pending |= any(p["metadata"]["uid"] not in known.downloads for p in fetching)
        return RETRY_SECONDS if pending else again

    async def _canary(self, pod: Object, known: Known) -> bool:
        uid = pod["metadata"]["uid"]
        try:
            await self._pods.canary(address_of(pod))
        except ScrapeError as error:
            changed = known.silent.get(uid) != str(error)
            known.silent[uid] = str(error)
            return changed
        known.silent.pop(uid, None)
        known.canaries.add(uid)
        return True

    async def _load(self, resource: InferenceDeployment, pod: Object, known: Known) -> bool:
        """A good sample replaces the last; a bad one leaves it to grow stale. True when the pod
        tells of another start.
        """
        uid = pod["metadata"]["uid"]
        try:
            text = await self._pods.metrics(address_of(pod))
            load = parse(text, resource.engine.served_name)
        except (ScrapeError, LoadError):
            return False
        known.samples[uid] = Sample(load, self._clock())
        parts = startup.read(text, resource.engine.served_name)
        news = known.startups.get(uid) != parts
        known.startups[uid] = parts
        return news

    async def _measure(self, serving: list[Object], known: Known) -> bool:
        """The sizing that one serving pod measured; asked once a pod."""
        if not serving or known.measured_of in {p["metadata"]["uid"] for p in serving}:
            return False
        try:
            known.measured = await self._pods.memory(address_of(serving[0]))
        except ScrapeError:
            return False
        known.measured_of = serving[0]["metadata"]["uid"]
        return True

    async def _downloads(self, fetching: list[Object], known: Known) -> bool:
        """How far the downloads are; True when that is worth showing."""
        now = {}
        for pod in fetching:
            uid = pod["metadata"]["uid"]
            with contextlib.suppress(ScrapeError):
                if found := downloads.read(await self._pods.progress(address_of(pod))):
                    now[uid] = found
                    continue
            if uid in known.downloads:
                now[uid] = known.downloads[uid]
        alive = {pod["metadata"]["uid"] for pod in fetching}
        known.downloads = {uid: one for uid, one in known.downloads.items() if uid in alive}
        shown = downloads.show(known.downloads, now, self._clock() - known.downloads_at)
        if shown is known.downloads:
            return False
        known.downloads, known.downloads_at = shown, self._clock()
        return True

    async def _config(self, resource: InferenceDeployment, seen: Observed, known: Known) -> bool:
        """The model's config.json: shipped, from the hub, or from a pod that has it."""
        model = resource.spec.model
        identity = f"{model.source}@{model.revision}"
        if known.config is not None and known.config_of == identity:
            return False
        if known.config_of != identity:
            known.config, known.config_of = None, identity
        try:
            known.config = await self._hub.config(model.where, model.revision)
        except HubError as error:
            answer = await self._config_of_pods(seen)
            if answer is None:
                changed = known.config_error != (error.reason, str(error))
                known.config_error = (error.reason, str(error))
                return changed
            known.config = answer
        return True

    async def _config_of_pods(self, seen: Observed) -> Mapping[str, Any] | None:
        for pod in seen.pods:
            if address_of(pod):
                try:
                    return await self._pods.model_config(address_of(pod))
                except ScrapeError:
                    continue
        return None
