"""The operator on one screen: observe → decide → apply → report, for one resource.

Level-triggered: the cause of a pass does not matter, and another pass changes nothing. It decides
from the store; it writes through ``Cluster``, which is fenced by the Lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fairlead_operator.cluster.client import Cluster
from fairlead_operator.cluster.observe import observe
from fairlead_operator.decide import release
from fairlead_operator.decide.children import claims
from fairlead_operator.decide.children.allowlists import allowlist_blockers
from fairlead_operator.decide.children.diff import (
    Apply,
    Conflict,
    Delete,
    Writes,
    diff,
    is_owned,
    owner_text,
)
from fairlead_operator.decide.children.manifests import Replacement, keeps_weights, render
from fairlead_operator.decide.children.rollout import Choice, choose
from fairlead_operator.decide.judge import judge, plan_capacity, with_measurement
from fairlead_operator.decide.pods import drains
from fairlead_operator.decide.pods.blockers import Blocker, blocker
from fairlead_operator.decide.pods.drains import DrainCounts, DrainedRequests
from fairlead_operator.decide.pods.events import Note, changes, event_about
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.scaling import Scaling, hold, load_of, replicas_of, scale
from fairlead_operator.decide.scale.state import FIRST_LOOK_SECONDS, ScalingMemory, awaits_probes
from fairlead_operator.decide.status import (
    Capacity,
    Findings,
    invalid_status,
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
from fairlead_operator.upgrades import Target, Upgrades

log = logging.getLogger(__name__)

RESYNC_SECONDS = 20.0
REFUSED_SECONDS = 10.0
TURN_SECONDS = 5.0  # between two passes of a resource that waits for its turn in an upgrade
PROGRESS_SECONDS = 10.0  # between two writes of a status that tell how far a rollout is
_REFUSALS = frozenset({400, 403, 422})  # answers that the same write would get again


@dataclass(frozen=True, slots=True)
class _Observation:
    """One resource at the start of a pass: what the store, the pods and the last pass say of it."""

    key: Key
    body: Object
    resource: InferenceDeployment
    results: ProbeResults
    memory: ScalingMemory
    snapshot: Snapshot
    target: Target

    @property
    def uid(self) -> str:
        return self.resource.uid

    @property
    def status(self) -> Mapping[str, Any]:
        """The status as it was written last."""
        return self.body.get("status") or {}


@dataclass(frozen=True, slots=True)
class _Decision:
    """The writes of a pass and what they follow from. With ``refusals`` nothing is written."""

    drained: DrainedRequests
    capacity: Capacity
    scaling: Scaling
    choice: Choice
    refusals: Sequence[Blocker]
    writes: Writes


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The cluster after the writes. ``scaling``: as decided, if the Deployment has its count."""

    snapshot: Snapshot
    scaling: Scaling
    refusals: Sequence[Blocker]


class Reconciler:
    """Work of the queue: ``__call__`` is one pass over one resource. ``results_of``: the prober's
    results, by key and uid.
    """

    def __init__(
        self,
        cluster: Cluster,
        results_of: Callable[[Key, str], ProbeResults | None],
        settings: Settings,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._results_of, self._settings = cluster, results_of, settings
        self._now, self._clock = now, clock
        self._upgrades = Upgrades(cluster, settings, now)
        self._scaling: Memory[ScalingMemory] = Memory()
        self._drains: Memory[DrainCounts] = Memory()
        self._ownership: Memory[release.OwnershipMemory] = Memory()
        self._events: Memory[tuple[Note, ...]] = Memory()  # still to be written, oldest first
        # The status that was written last, and what an older CRD left of it.
        self._pruned: Memory[tuple[Object, Object]] = Memory()
        self._reported_at: Memory[float] = Memory()  # the last write of the status
        self._capacity: Memo[Capacity] = Memo(plan_capacity)
        self._writes: Memo[Writes] = Memo(diff)

    async def __call__(self, key: Key) -> float | None:
        """One pass: seconds until the resource is due again, None for one that is gone."""
        try:
            return await self._pass(key)
        finally:
            self._upgrades.finish(key)

    async def _pass(self, key: Key) -> float | None:
        body = self._cluster.store.get(RESOURCE, key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._forget(key)
            self._ownership.forget(key)
            return None  # the garbage collector deletes the children, by their owner references
        if (requeue_after := await self._yield_to_owner(key, body)) is not None:
            self._forget(key)
            return requeue_after
        body = self._cluster.store.get(RESOURCE, key) or body  # with the mark
        try:
            resource = self._cluster.store.resource(body)
        except ResourceError as error:
            return await self._refuse(key, body, error)
        observation = await self._observe(key, body, resource)
        decision = self._decide(observation)
        outcome = await self._apply(observation, decision)
        return await self._report(observation, decision, outcome)

    async def _yield_to_owner(self, key: Key, body: Object) -> float | None:
        """Leave a resource to the release that serves it: seconds until the next look at it; None
        where this release serves.
        """
        uid, name = str(body["metadata"].get("uid") or ""), self._settings.release
        status: Mapping[str, Any] = body.get("status") or {}
        memory = self._ownership.get(key, uid) or release.OwnershipMemory()
        step = release.decide(status, name, memory, self._clock())
        memory = step.memory
        if step.act == "mark":
            await self._write_status(body, release.with_mark(status, name))
            stored = self._cluster.store.get(RESOURCE, key) or {}
            memory = replace(memory, stored=release.is_marked(stored, name))
        elif step.act in {"challenge", "yield"}:
            note = release.ownership_note(memory.challenged_owner, name)
            log.warning("%s/%s: %s", *key, note.message)
            await self._post_event(body, note)
            if step.act == "challenge":
                await self._write_status(body, release.with_challenger(status, name))
        self._ownership.put(key, uid, memory)
        return None if step.act in {"serve", "mark"} else step.requeue_after

    async def _refuse(self, key: Key, body: Object, error: ResourceError) -> float:
        """Report that the spec is invalid: seconds until the next pass."""
        refusal = blocker("InvalidSpec", f"{RESOURCE.name}/{key[1]}", str(error))
        generation = int(body["metadata"].get("generation") or 0)
        status = invalid_status(generation, refusal, body.get("status") or {}, self._now())
        await self._update_status(body, status)
        return self._requeue_after(body, RESYNC_SECONDS)

    # -- the four steps of a pass

    async def _observe(self, key: Key, body: Object, resource: InferenceDeployment) -> _Observation:
        uid = resource.uid
        results = self._results_of(key, uid) or ProbeResults()
        memory = self._scaling.get(key, uid)
        if memory is None:
            memory = ScalingMemory.first(body.get("status") or {}, self._clock())
        self._scaling.put(key, uid, memory)
        snapshot = observe(self._cluster.store, key, uid)
        target = await self._upgrades.target(resource, snapshot.deployment)
        return _Observation(key, body, resource, results, memory, snapshot, target)

    def _decide(self, observation: _Observation) -> _Decision:
        key, resource, results = observation.key, observation.resource, observation.results
        snapshot, revision = observation.snapshot, observation.target.revision
        drained = self._drained_requests(observation)
        capacity = self._capacity(key, resource, results.config, results.config_error)
        capacity = with_measurement(capacity, results)
        scaling = scale(
            resource,
            snapshot,
            observation.memory,
            results,
            capacity.concurrent_tokens,
            self._now(),
            self._clock(),
            capacity.connections,
            capacity.states,
        )
        choice = choose(
            resource, snapshot, revision, scaling.replicas, observation.status, self._now()
        )
        refusals = allowlist_blockers(resource, self._settings)
        refusals += claims.new_claim_blockers(resource, snapshot)
        manifests = self._render(observation, scaling.replicas, choice.replacement)
        writes = self._writes(key, manifests, snapshot.children, resource.uid)
        return _Decision(drained, capacity, scaling, choice, refusals, writes)

    async def _apply(self, observation: _Observation, decision: _Decision) -> _Outcome:
        key, resource, snapshot = observation.key, observation.resource, observation.snapshot
        refusals, scaling = [*decision.refusals], decision.scaling
        try:
            if not resource.spec.paused and not refusals:
                # The first of all creations needs no question: the API server refuses it if the
                # child exists.
                if snapshot.children:
                    await self._check_fresh(observation.body, decision.writes)
                refusals = await self._write_children(decision.writes)
                snapshot = observe(self._cluster.store, key, resource.uid)
        finally:
            # Also after an error: the Deployment may have been written before it.
            has_count = self._commit(key, resource.uid, scaling)
        if not has_count:
            scaling = hold(resource, snapshot, observation.memory)
        refusals += [_conflict_blocker(conflict) for conflict in decision.writes.conflicts]
        turn = observation.target.turn
        if turn.is_held:
            about = f"{RESOURCE.name}/{resource.name}"
            refusals.append(blocker("UpgradeHeld", about, turn.message))
        return _Outcome(snapshot, scaling, refusals)

    async def _report(
        self, observation: _Observation, decision: _Decision, outcome: _Outcome
    ) -> float:
        """Write Events and the status: seconds until the next pass."""
        key, uid, body = observation.key, observation.uid, observation.body
        results, memory = observation.results, observation.memory
        old, pods = observation.status, outcome.snapshot.running_pods()
        load, load_at = load_of(results, memory.load_at, pods, old, self._clock())
        findings = self._findings(observation, decision, outcome, load)
        await self._write_events(key, uid, body)
        if awaits_probes(memory, results, self._clock()) and reports_generation(
            old, observation.resource.generation
        ):
            return self._requeue_after(body, FIRST_LOOK_SECONDS)
        new = status_of(observation.resource, outcome.snapshot, findings, old, self._now())
        if (delay := self._status_delay(key, uid, old, new)) > 0:
            return self._requeue_after(body, min(delay, outcome.scaling.requeue_after))
        await self._update_status(body, new)
        memory = self._scaling.get(key, uid) or memory
        self._scaling.put(key, uid, replace(memory, load_at=load_at))
        if decision.choice.announced_only:
            return 0.0  # the status has said so: now it may happen
        interval = min(_interval(observation, outcome), outcome.scaling.requeue_after)
        return self._requeue_after(body, interval)

    # -- parts of the steps

    def _render(
        self, observation: _Observation, replicas: int, replacement: Replacement
    ) -> list[Object]:
        resource, target = observation.resource, observation.target
        return render(
            resource,
            self._settings,
            replicas,
            replacement,
            template=target.template,
            marks=target.marks,
            cached=keeps_weights(resource) and bool(observation.snapshot.serving(target.revision)),
        )

    def _findings(
        self,
        observation: _Observation,
        decision: _Decision,
        outcome: _Outcome,
        load: Mapping[str, int] | None,
    ) -> Findings:
        choice, scaling, results = decision.choice, outcome.scaling, observation.results
        message = choice.message
        if choice.strategy != "OneByOne":
            message = observation.target.turn.message or message
        return Findings(
            served_by=self._settings.release,
            desired=scaling.replicas,
            revision=observation.target.revision,
            strategy=choice.strategy,
            rollout_message=message,
            blockers=judge(
                observation.resource,
                outcome.snapshot,
                results,
                observation.target.revision,
                scaling.replicas,
                decision.capacity,
                outcome.refusals,
                observation.status,
            ),
            capacity=decision.capacity,
            drained=decision.drained,
            canaries=results.canaries,
            startups=results.startups,
            load=load,
            autoscaling=scaling.status,
            scaling=scaling.condition,
        )

    def _forget(self, key: Key) -> None:
        for memory in (
            self._scaling,
            self._drains,
            self._events,
            self._pruned,
            self._reported_at,
        ):
            memory.forget(key)
        for memo in (self._capacity, self._writes, self._upgrades):
            memo.forget(key)

    def count_drained(self, key: Key, pod: Object) -> None:
        """Count the requests of a pod that ended, for a resource that had a pass before."""
        uid = str((pod["metadata"].get("labels") or {}).get(UID_LABEL, ""))
        counts, requests = self._drains.get(key, uid), drains.read(pod)
        if counts is not None and requests is not None:
            self._drains.put(key, uid, counts.plus(pod["metadata"]["uid"], requests))

    def _drained_requests(self, observation: _Observation) -> DrainedRequests:
        """The requests that pods drained since this revision became the target."""
        key, uid, revision = observation.key, observation.uid, observation.target.revision
        counts = self._drains.get(key, uid) or DrainCounts.of_status(observation.status)
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
        """Write the Events of decisions, and forget each once it is written: a pass may end
        early.
        """
        while notes := self._events.get(key, uid):
            await self._post_event(body, notes[0])
            self._events.put(key, uid, notes[1:])

    def _requeue_after(self, body: Object, interval: float) -> float:
        """Seconds until the next pass: 0 if the answer to our status write held a newer spec, for
        the watch then delivers nothing newer, and no wake.
        """
        live = self._cluster.store.get(RESOURCE, key_of(body))
        newer = live is not None and live["metadata"].get("generation") != body["metadata"].get(
            "generation"
        )
        return 0.0 if newer else interval

    async def _check_fresh(self, body: Object, writes: Writes) -> None:
        """Read again before any write: lists and watches may be behind.

        An old resource would undo the user's last change, an old Deployment the autoscaler's last
        count. Raises ApiError (409, Stale) when this pass was decided from either.
        """
        objects = [(RESOURCE, key_of(body))] if writes.apply or writes.delete else []
        manifests = [step.manifest for step in writes.apply if step.uid]
        objects += [(DEPLOYMENT, key_of(m)) for m in manifests if m["kind"] == DEPLOYMENT.name]
        cached = [self._cluster.store.get(kind, key) for kind, key in objects]
        live = await asyncio.gather(*(self._read(kind, key) for kind, key in objects))
        for (kind, key), old, new in zip(objects, cached, live, strict=True):
            if old is None or new is None or not _is_same_spec(old, new):
                raise ApiError(
                    409, "Stale", f"{kind.name}/{key[1]} has changed since it was last seen"
                )

    async def _write_children(self, writes: Writes) -> list[Blocker]:
        """Apply and delete. A refusal that a retry cannot change is a blocker; every other error is
        raised, and retried.
        """
        refusals = []
        for apply in writes.apply:
            refusals += await self._apply_child(apply)
        for delete in writes.delete:
            refusals += await self._delete_child(delete)
        return refusals

    async def _apply_child(self, step: Apply) -> list[Blocker]:
        kind, key = BY_NAME[step.manifest["kind"]], key_of(step.manifest)
        about = f"{kind.name}/{step.manifest['metadata']['name']}"
        log.info("apply %s: %s", about, step.reason)
        try:
            if step.first and (live := self._cluster.store.get(kind, key)):
                await self._cluster.patch(kind, live, step.first)
            await self._cluster.apply(kind, step.manifest, step.uid)
        except ApiError as error:
            if error.code == 409 and step.uid is None:
                return await self._explain_conflict(step)
            if error.code in _REFUSALS:
                log.warning("%s is refused: %s", about, error)
                code = "QuotaExceeded" if "exceeded quota" in error.message else "WriteRefused"
                return [blocker(code, about, error.message)]
            await self._refresh(kind, key, error)
            raise
        return []

    async def _delete_child(self, step: Delete) -> list[Blocker]:
        kind = BY_NAME[step.body["kind"]]
        about = f"{kind.name}/{step.body['metadata']['name']}"
        log.info("delete %s: %s", about, step.reason)
        try:
            await self._cluster.delete(kind, step.body)
        except ApiError as error:
            if error.code in _REFUSALS:
                log.warning("%s is not deleted: %s", about, error)
                return [blocker("WriteRefused", about, error.message)]
            await self._refresh(kind, key_of(step.body), error)
            raise
        return []

    async def _refresh(self, kind: Kind, key: Key, error: ApiError) -> None:
        """Read the object after a conflict, for the store is behind: a watch may not deliver it
        before the next list.
        """
        if error.code == 409:
            await self._read(kind, key)

    async def _read(self, kind: Kind, key: Key) -> Object | None:
        """One object as the API server has it now; the store takes it."""
        store = self._cluster.store
        cached, asked_at = store.get(kind, key), store.now()
        body = await self._cluster.get(kind, key)
        if body is not None:
            store.take(kind, body, asked_at)
        elif cached is not None:
            store.mark_deleted(kind, cached)
        return body

    async def _explain_conflict(self, step: Apply) -> list[Blocker]:
        """The blocker for an object to create whose name a foreign one has. Raises ApiError where
        it is one of ours that was not seen yet, or is gone by now.
        """
        kind = BY_NAME[step.manifest["kind"]]
        meta = step.manifest["metadata"]
        asked_at = self._cluster.store.now()
        body = await self._cluster.get(kind, (meta["namespace"], meta["name"]))
        if body is None:
            raise ApiError(409, "Conflict", f"{kind.name}/{meta['name']} was created and deleted")
        if is_owned(body, meta["ownerReferences"][0]["uid"]):
            self._cluster.store.take(kind, body, asked_at)
            raise ApiError(409, "Stale", f"{kind.name}/{meta['name']} is ours and was not seen yet")
        return [_conflict_blocker(Conflict(kind.name, meta["name"], owner_text(body)))]

    def _status_delay(
        self, key: Key, uid: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> float:
        """Seconds until this status is written, 0 for now. Each step of a rollout changes it, and
        a write costs the API server more than anything else that the operator asks of it.
        """
        reported_at = self._reported_at.get(key, uid)
        if reported_at is None or old == new or not is_progress(old, new):
            return 0.0
        return reported_at + PROGRESS_SECONDS - self._clock()

    async def _update_status(self, body: Object, new: Object) -> None:
        """Write the status if it differs; before it, an Event for each change of its blockers."""
        old: Mapping[str, Any] = body.get("status") or {}
        key, uid = key_of(body), str(body["metadata"].get("uid") or "")
        if old == new or self._pruned.get(key, uid) == (new, old):
            return
        for note in changes(old, new):
            await self._post_event(body, note)
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

    async def _post_event(self, body: Object, note: Note) -> None:
        event = event_about(body, note, self._now())
        try:
            await self._cluster.post_event(EVENT, event)
        except ApiError as error:
            if error.code != 409:
                raise


def _interval(observation: _Observation, outcome: _Outcome) -> float:
    """Seconds until the next pass where scaling needs none sooner."""
    if not (observation.target.turn.allowed or observation.resource.spec.paused):
        return TURN_SECONDS
    return REFUSED_SECONDS if outcome.refusals else RESYNC_SECONDS


def _is_same_spec(old: Object, new: Object) -> bool:
    """Whether a decision from ``old`` still holds: neither the spec nor the release that serves it
    changed.
    """
    return release.have_same_mark(old, new) and all(
        old["metadata"].get(name) == new["metadata"].get(name) for name in ("uid", "generation")
    )


def _conflict_blocker(conflict: Conflict) -> Blocker:
    return blocker(
        "Conflict",
        f"{conflict.kind}/{conflict.name}",
        f"{conflict.kind} {conflict.name} exists and belongs to {conflict.owner}",
    )
