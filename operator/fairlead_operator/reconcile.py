"""The operator on one screen: observe → decide → render → diff → apply → report, for one resource.

Level-triggered: the cause of a pass does not matter, and another pass changes nothing. It decides
from the store; it writes through ``Cluster``, which is fenced by the Lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fairlead_operator.cluster.client import Cluster
from fairlead_operator.cluster.observe import observe
from fairlead_operator.decide import release
from fairlead_operator.decide.children import claims
from fairlead_operator.decide.children.allowlists import not_allowed
from fairlead_operator.decide.children.capacity import PlanError, capacity_of, with_measured
from fairlead_operator.decide.children.diff import Apply, Conflict, Writes, diff, ours, owner_text
from fairlead_operator.decide.children.manifests import keeps_weights, render
from fairlead_operator.decide.children.rollout import choose
from fairlead_operator.decide.pods import blockers, downloads, drains
from fairlead_operator.decide.pods.blockers import Blocker, blocker
from fairlead_operator.decide.pods.drains import DrainCounts, Drained
from fairlead_operator.decide.pods.events import Note, changes, event_about
from fairlead_operator.decide.pods.observed import Observed
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.scaling import Scaling, hold, load_of, replicas_of, scale
from fairlead_operator.decide.scale.state import FIRST_LOOK_SECONDS, ScalingMemory, awaits_probes
from fairlead_operator.decide.status import (
    Capacity,
    Findings,
    invalid,
    is_progress,
    reports_generation,
    status_of,
)
from fairlead_operator.errors import ApiError
from fairlead_operator.memory import Memo, Memory
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.kinds import (
    BY_NAME,
    DEPLOYMENT,
    EVENT,
    POD,
    RESOURCE,
    UID_LABEL,
    Key,
    Kind,
    Object,
    key_of,
)
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from fairlead_operator.upgrades import Upgrades

log = logging.getLogger(__name__)

RESYNC_SECONDS = 20.0
REFUSED_SECONDS = 10.0
TURN_SECONDS = 5.0  # between two looks of one that waits for its turn in an upgrade
PROGRESS_SECONDS = 10.0  # between two writes of a status that tell how far a rollout is
_REFUSALS = frozenset({400, 403, 422})  # answers that the same write would get again


class Reconciler:
    """``__call__`` is the work of the queue. ``probed``: the prober's results, by key and uid."""

    def __init__(
        self,
        cluster: Cluster,
        probed: Callable[[Key, str], ProbeResults | None],
        settings: Settings,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._probed, self._settings = cluster, probed, settings
        self._now, self._clock = now, clock
        self._upgrades = Upgrades(cluster, settings, now)
        self._scaling: Memory[ScalingMemory] = Memory()
        self._drains: Memory[DrainCounts] = Memory()
        self._met: Memory[release.Met] = Memory()
        self._events: Memory[tuple[Note, ...]] = Memory()  # still to be written, oldest first
        # The status that was written last, and what an older CRD left of it.
        self._pruned: Memory[tuple[Object, Object]] = Memory()
        self._reported_at: Memory[float] = Memory()  # the last write of the status
        self._planned: Memo[Capacity] = Memo(planned_capacity)
        self._writes: Memo[Writes] = Memo(diff)

    async def __call__(self, key: Key) -> float | None:
        """One pass: seconds until the resource is due again, None for one that is gone."""
        try:
            return await self._pass(key)
        finally:
            self._upgrades.done(key)

    async def _pass(self, key: Key) -> float | None:
        body = self._cluster.store.get(RESOURCE, key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._forget(key)
            self._met.forget(key)
            return None  # the garbage collector deletes the children, by their owner references
        if (again := await self._left_alone(key, body)) is not None:
            self._forget(key)
            return again
        body = self._cluster.store.get(RESOURCE, key) or body  # with the mark
        try:
            resource = self._cluster.store.resource(body)
        except ResourceError as error:
            refusal = blocker("InvalidSpec", f"{RESOURCE.name}/{key[1]}", str(error))
            generation = int(body["metadata"].get("generation") or 0)
            await self._report(
                body, invalid(generation, refusal, body.get("status") or {}, self._now())
            )
            return self._again(body, RESYNC_SECONDS)

        uid = resource.uid
        before: Mapping[str, Any] = body.get("status") or {}
        results = self._probed(key, uid) or ProbeResults()
        memory = self._scaling.get(key, uid) or ScalingMemory.first(before, self._clock())
        self._scaling.put(key, uid, memory)
        seen = observe(self._cluster.store, key, uid)
        target = await self._upgrades.target(resource, seen.deployment)
        revision = target.revision
        drained = self._drained(key, uid, revision, before)
        planned = with_measurement(
            self._planned(key, resource, results.config, results.config_error), results
        )
        scaling = scale(
            resource,
            seen,
            memory,
            results,
            planned.concurrent_tokens,
            self._now(),
            self._clock(),
        )
        choice = choose(resource, seen, revision, scaling.replicas, before, self._now())
        refusals = not_allowed(resource, self._settings) + claims.never_shared(resource, seen)

        cached = keeps_weights(resource) and bool(seen.serving(revision))
        wanted = render(
            resource,
            self._settings,
            scaling.replicas,
            choice.replacement,
            template=target.template,
            marks=target.marks,
            cached=cached,
        )
        writes = self._writes(key, wanted, seen.children, uid)
        try:
            if not resource.spec.paused and not refusals:
                # The first of all creations needs no question: the API server refuses it if the
                # child exists.
                if seen.children:
                    await self._make_sure(body, writes)
                refusals = await self._carry_out(writes)
                seen = observe(self._cluster.store, key, uid)
        finally:
            # Also after an error: the Deployment may have been written before it.
            if not self._commit(key, uid, scaling):
                scaling = hold(resource, seen, memory)
        refusals += [_conflict(one) for one in writes.conflicts]
        if target.turn.held:
            about = f"{RESOURCE.name}/{resource.name}"
            refusals.append(blocker("UpgradeHeld", about, target.turn.why))

        load, load_at = load_of(results, memory.load_at, seen.running_pods(), before, self._clock())
        findings = Findings(
            served_by=self._settings.release,
            desired=scaling.replicas,
            revision=revision,
            strategy=choice.chosen,
            why=choice.why if choice.chosen == "OneByOne" else target.turn.why or choice.why,
            blockers=judge(
                resource, seen, results, revision, scaling.replicas, planned, refusals, before
            ),
            capacity=planned,
            drained=drained,
            canaries=results.canaries,
            startups=results.startups,
            load=load,
            autoscaling=scaling.status,
            scaling=scaling.condition,
        )
        await self._write_events(key, uid, body)
        if awaits_probes(memory, results, self._clock()) and reports_generation(
            before, resource.generation
        ):
            return self._again(body, FIRST_LOOK_SECONDS)
        status = status_of(resource, seen, findings, before, self._now())
        if (held_for := self._held_back(key, uid, before, status)) > 0:
            return self._again(body, min(held_for, scaling.again))
        await self._report(body, status)
        memory = self._scaling.get(key, uid) or memory
        self._scaling.put(key, uid, replace(memory, load_at=load_at))
        if choice.announced_only:
            return 0.0  # the status has said so: now it may happen
        again = REFUSED_SECONDS if refusals else RESYNC_SECONDS
        if not (target.turn.allowed or resource.spec.paused):
            again = TURN_SECONDS
        return self._again(body, min(again, scaling.again))

    async def _left_alone(self, key: Key, body: Object) -> float | None:
        """Seconds until the next look at a resource that another release serves; None for one that
        this release serves.
        """
        uid, name = str(body["metadata"].get("uid") or ""), self._settings.release
        status: Mapping[str, Any] = body.get("status") or {}
        step = release.decide(status, name, self._met.get(key, uid) or release.Met(), self._clock())
        met = step.met
        if step.act == "mark":
            await self._write_status(body, release.marked(status, name))
            stored = self._cluster.store.get(RESOURCE, key) or {}
            met = replace(met, stored=release.is_marked(stored, name))
        elif step.act in {"ask", "leave"}:
            note = release.left_alone(met.asked, name)
            log.warning("%s/%s: %s", *key, note.message)
            await self._event(body, note)
            if step.act == "ask":
                await self._write_status(body, release.asking(status, name))
        self._met.put(key, uid, met)
        return None if step.act in {"serve", "mark"} else step.again

    def _forget(self, key: Key) -> None:
        for remembered in (
            self._scaling,
            self._drains,
            self._events,
            self._pruned,
            self._reported_at,
        ):
            remembered.forget(key)
        for computed in (self._planned, self._writes, self._upgrades):
            computed.forget(key)

    def count_drained(self, key: Key, pod: Object) -> None:
        """Count the requests of a pod that ended, for a resource that had a pass before."""
        uid = str((pod["metadata"].get("labels") or {}).get(UID_LABEL, ""))
        counts, drained = self._drains.get(key, uid), drains.read(pod)
        if counts is not None and drained is not None:
            self._drains.put(key, uid, counts.plus(pod["metadata"]["uid"], drained))

    def _drained(self, key: Key, uid: str, revision: str, before: Mapping[str, Any]) -> Drained:
        """The requests that pods drained since this revision became the target."""
        counts = self._drains.get(key, uid) or DrainCounts.of_status(before)
        # Every pod that may still change, those that ended included: none is counted twice.
        pods = self._cluster.store.children(POD, key)
        counts = counts.since(revision).of_pods(frozenset(p["metadata"]["uid"] for p in pods))
        self._drains.put(key, uid, counts)
        return counts.total

    def _commit(self, key: Key, uid: str, scaling: Scaling) -> bool:
        """Remember a decision, and owe its Events, if the Deployment has its count."""
        live = self._cluster.store.children(DEPLOYMENT, key)
        if not live or replicas_of(live[0]) != scaling.replicas:
            return False
        self._scaling.put(key, uid, scaling.memory)
        self._events.put(key, uid, (self._events.get(key, uid) or ()) + scaling.events)
        return True

    async def _write_events(self, key: Key, uid: str, body: Object) -> None:
        """Those owed. Each is kept until it is written: a pass may end early."""
        while owed := self._events.get(key, uid):
            await self._event(body, owed[0])
            self._events.put(key, uid, owed[1:])

    def _again(self, body: Object, after: float) -> float:
        """At once if the answer to our status write held a newer spec: the watch then delivers
        nothing newer, and no wake.
        """
        live = self._cluster.store.get(RESOURCE, key_of(body))
        newer = live is not None and live["metadata"].get("generation") != body["metadata"].get(
            "generation"
        )
        return 0.0 if newer else after

    async def _make_sure(self, body: Object, writes: Writes) -> None:
        """Read again before any write: lists and watches may be behind.

        An old resource would undo the user's last change, an old Deployment the autoscaler's last
        count. Raises ApiError (409, Stale) when this pass was decided from either.
        """
        changed = [(BY_NAME[one.manifest["kind"]], one.manifest) for one in writes.apply if one.uid]
        to_read = [(RESOURCE, key_of(body))] if writes.apply or writes.delete else []
        to_read += [(kind, key_of(manifest)) for kind, manifest in changed if kind is DEPLOYMENT]
        before = [self._cluster.store.get(kind, key) for kind, key in to_read]
        now = await asyncio.gather(*(self._look(kind, key) for kind, key in to_read))
        for (kind, key), held, live in zip(to_read, before, now, strict=True):
            if held is None or live is None or not _same(held, live):
                raise ApiError(
                    409, "Stale", f"{kind.name}/{key[1]} has changed since it was last seen"
                )

    async def _carry_out(self, writes: Writes) -> list[Blocker]:
        """Write. A refusal that a retry cannot change is a blocker; every other error is raised,
        and retried.
        """
        refused = []
        for step in writes.apply:
            kind = BY_NAME[step.manifest["kind"]]
            about = f"{kind.name}/{step.manifest['metadata']['name']}"
            log.info("apply %s: %s", about, step.why)
            try:
                if step.first and (live := self._cluster.store.get(kind, key_of(step.manifest))):
                    await self._cluster.patch(kind, live, step.first)
                await self._cluster.apply(kind, step.manifest, step.uid)
            except ApiError as error:
                if error.code == 409 and step.uid is None:
                    refused += await self._look_again(step)
                elif error.code in _REFUSALS:
                    log.warning("%s is refused: %s", about, error)
                    code = "QuotaExceeded" if "exceeded quota" in error.message else "WriteRefused"
                    refused.append(blocker(code, about, error.message))
                else:
                    await self._refresh(kind, key_of(step.manifest), error)
                    raise
        for gone in writes.delete:
            kind = BY_NAME[gone.body["kind"]]
            about = f"{kind.name}/{gone.body['metadata']['name']}"
            log.info("delete %s: %s", about, gone.why)
            try:
                await self._cluster.delete(kind, gone.body)
            except ApiError as error:
                if error.code in _REFUSALS:
                    log.warning("%s is not deleted: %s", about, error)
                    refused.append(blocker("WriteRefused", about, error.message))
                    continue
                await self._refresh(kind, key_of(gone.body), error)
                raise
        return refused

    async def _refresh(self, kind: Kind, key: Key, error: ApiError) -> None:
        """After a conflict the store is behind: read the object, because a watch may not deliver it
        before the next list.
        """
        if error.code == 409:
            await self._look(kind, key)

    async def _look(self, kind: Kind, key: Key) -> Object | None:
        """One object as the API server has it now; the store takes it."""
        store = self._cluster.store
        held, asked_at = store.get(kind, key), store.now()
        body = await self._cluster.get(kind, key)
        if body is not None:
            store.take(kind, body, asked_at)
        elif held is not None:
            store.deleted(kind, held)
        return body

    async def _look_again(self, step: Apply) -> list[Blocker]:
        """The name of an object to create is taken: by one of ours that was not seen yet, or by a
        foreign one.
        """
        kind = BY_NAME[step.manifest["kind"]]
        meta = step.manifest["metadata"]
        asked_at = self._cluster.store.now()
        body = await self._cluster.get(kind, (meta["namespace"], meta["name"]))
        if body is None:
            raise ApiError(409, "Conflict", f"{kind.name}/{meta['name']} was created and deleted")
        if ours(body, meta["ownerReferences"][0]["uid"]):
            self._cluster.store.take(kind, body, asked_at)
            raise ApiError(409, "Stale", f"{kind.name}/{meta['name']} is ours and was not seen yet")
        return [_conflict(Conflict(kind.name, meta["name"], owner_text(body)))]

    def _held_back(
        self, key: Key, uid: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> float:
        """Seconds until this status is written, 0 for now. Each step of a rollout changes it, and
        a write costs the API server more than anything else that the operator asks of it.
        """
        reported_at = self._reported_at.get(key, uid)
        if reported_at is None or old == new or not is_progress(old, new):
            return 0.0
        return reported_at + PROGRESS_SECONDS - self._clock()

    async def _report(self, body: Object, new: Object) -> None:
        """Write the status if it differs; before it, an Event for each change of its blockers."""
        old: Mapping[str, Any] = body.get("status") or {}
        key, uid = key_of(body), str(body["metadata"].get("uid") or "")
        if old == new or self._pruned.get(key, uid) == (new, old):
            return
        for note in changes(old, new):
            await self._event(body, note)
        await self._write_status(body, new)
        self._reported_at.put(key, uid, self._clock())
        stored = (self._cluster.store.get(RESOURCE, key) or {}).get("status")
        if stored is not None and stored != new:
            self._pruned.put(key, uid, (new, stored))

    async def _write_status(self, body: Object, status: Object) -> None:
        try:
            await self._cluster.set_status(body, status)
        except ApiError as error:
            await self._refresh(RESOURCE, key_of(body), error)
            raise

    async def _event(self, body: Object, note: Note) -> None:
        event = event_about(body, note, self._now())
        try:
            await self._cluster.post_event(EVENT, event)
        except ApiError as error:
            if error.code != 409:
                raise


def _same(held: Object, live: Object) -> bool:
    """Whether a decision from ``held`` still holds: neither the spec nor the release that serves it
    changed.
    """
    return release.same_mark(held, live) and all(
        held["metadata"].get(name) == live["metadata"].get(name) for name in ("uid", "generation")
    )


def _conflict(one: Conflict) -> Blocker:
    return blocker(
        "Conflict",
        f"{one.kind}/{one.name}",
        f"{one.kind} {one.name} exists and belongs to {one.owner}",
    )


def judge(
    resource: InferenceDeployment,
    seen: Observed,
    results: ProbeResults,
    revision: str,
    replicas: int,
    planned: Capacity,
    refusals: Sequence[Blocker],
    before: Mapping[str, Any],
) -> list[Blocker]:
    """All blockers at this moment, most important first. ``before``: the status so far."""
    about = f"{RESOURCE.name}/{resource.name}"
    everything = list(refusals)
    if replicas == 0:
        return sorted([*everything, blocker("NoReplicas", about, "spec.replicas is 0")])
    live = seen.deployment
    surging = live is not None and live["spec"]["strategy"]["type"] != "Recreate"
    everything += blockers.find(
        revision=revision,
        pods=seen.pods,
        deployment=live,
        events=seen.events,
        surging=surging,
        downloads=downloads.messages(results.downloads, seen.pods, before),
    )
    everything += blockers.of_failed(seen.failed, seen.pods, revision, replicas)
    everything += claims.not_shared(resource, seen, revision, replicas)
    serving = seen.serving(revision)
    body = planned.body
    if body is not None and body.get("fits") is False and not seen.ready_pods():
        everything.append(blocker("DoesNotFit", about, str(body.get("message", ""))))
    for pod in serving:
        if why := results.canary_failures.get(pod["metadata"]["uid"]):
            everything.append(blocker("CanaryFailed", f"Pod/{pod['metadata']['name']}", why))
    if not everything and not any(p["metadata"]["uid"] in results.canaries for p in serving):
        text = (
            "waiting for the first token of a ready pod"
            if serving
            else "no pod is in the Service's endpoints yet"
        )
        everything.append(blocker("Starting", about, text))
    return sorted(everything)


def with_measurement(planned: Capacity, results: ProbeResults) -> Capacity:
    """The plan beside what a pod measured. Without a plan, what it measured stands alone."""
    if not results.measured:
        return planned
    return replace(planned, body=with_measured(planned.body or {}, results.measured))


def planned_capacity(
    resource: InferenceDeployment, config: Mapping[str, Any] | None, why_none: tuple[str, str]
) -> Capacity:
    """The plan for the model of this config.json. ``why_none``: reason and message without one."""
    if config is None:
        return Capacity(None, *why_none)
    try:
        return Capacity(capacity_of(config, resource))
    except PlanError as error:
        return Capacity(None, error.reason, str(error))
