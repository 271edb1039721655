"""Sends the canary to pods that serve: one token through the pod's own queue.

A third keyed queue runs it, by pod: a canary waits behind the pod's requests for as long as the
runtime lets it, and delays no scrape meanwhile. It writes to the prober's results.
"""

from collections.abc import Callable
from dataclasses import replace

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.observe import observe
from fairlead_operator.decide.pods.pod import address_of
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.memory import Memory
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.resource.kinds import RESOURCE, Key

RETRY_SECONDS = 2.0  # after a failed canary

PodKey = tuple[Key, str]  # the resource, the pod's uid


class Canaries:
    """Work of the canaries' queue: ``__call__`` returns the seconds until the next canary, None for
    never.
    """

    def __init__(
        self,
        store: Store,
        results: Memory[ProbeResults],
        pods: Pods,
        wake: Callable[[Key], None],
    ) -> None:
        self._store, self._results, self._pods, self._wake = store, results, pods, wake

    async def __call__(self, pod_key: PodKey) -> float | None:
        key, uid = pod_key
        body = self._store.get(RESOURCE, key)
        owner = "" if body is None else body["metadata"]["uid"]
        previous = self._results.get(key, owner)
        running = observe(self._store, key, owner).running_pods()
        pod = next((p for p in running if p["metadata"]["uid"] == uid), None)
        if previous is None or pod is None or uid in previous.canaries:
            return None  # the prober asks again when the pod serves again
        error = ""
        try:
            await self._pods.canary(address_of(pod))
        except ScrapeError as refusal:
            error = str(refusal)
        results = self._results.get(key, owner)
        if results is None:
            return None  # the resource was deleted meanwhile
        failures = {
            name: failure for name, failure in results.canary_failures.items() if name != uid
        }
        next_results = replace(
            results,
            canaries=results.canaries if error else results.canaries | {uid},
            canary_failures={**failures, uid: error} if error else failures,
            canaries_due=results.canaries_due - {uid},
        )
        self._results.put(key, owner, next_results)
        if not next_results.shows_as(results):
            self._wake(key)
        return RETRY_SECONDS if error else None
