"""Gives turns in an upgrade: which template a deployment gets now, today's or the one it has.

Owns the turns that were granted and are not seen in the cluster yet. The rules are
``decide.children.upgrade``'s; here the newest Deployments are read before a turn is granted.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version

from fairlead_operator.cluster.client import Cluster
from fairlead_operator.decide.children.manifests import revision_of
from fairlead_operator.decide.children.podtemplate import Deadlines, pod_template
from fairlead_operator.decide.children.upgrade import (
    DEADLINES_MARK,
    DEFAULTS_MARK,
    REVISION_MARK,
    SPEC_MARK,
    TURN_MARK,
    Member,
    Turn,
    deadlines_of,
    decide_turn,
    defaults_hash,
    marks,
    member_of,
    spec_hash,
)
from fairlead_operator.decide.release import is_served_by_another
from fairlead_operator.memory import Memo
from fairlead_operator.resource.kinds import (
    DEPLOYMENT,
    RESOURCE,
    REVISION_LABEL,
    Key,
    Object,
    key_of,
)
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings

WAITING = Turn(allowed=True)
PAUSED = Turn(allowed=False, message="changed defaults wait until spec.paused is false")


@dataclass(frozen=True, slots=True)
class Target:
    """The template that the Deployment should hold now. ``turn``: why it may, or may not yet, be
    today's.
    """

    template: Object
    marks: dict[str, str] = field(default_factory=dict)
    turn: Turn = WAITING

    @property
    def revision(self) -> str:
        labels = self.template["metadata"].get("labels") or {}
        return str(labels.get(REVISION_LABEL) or self.marks.get(REVISION_MARK, ""))


class Upgrades:
    """The turns of all resources of an operator."""

    def __init__(self, cluster: Cluster, settings: Settings, now: Callable[[], datetime]) -> None:
        self._cluster, self._settings, self._now = cluster, settings, now
        self._defaults = defaults_hash(settings, version("fairlead"))
        self._template: Memo[Object] = Memo(pod_template)
        self._spec_hash: Memo[str] = Memo(spec_hash)
        self._granted: set[Key] = set()
        self._granting = asyncio.Lock()

    async def target(self, resource: InferenceDeployment, live: Object | None) -> Target:
        """The template for this pass. A turn it takes lasts until ``finish``."""
        key = (resource.namespace, resource.name)
        template = self._template(key, resource, self._settings)
        deadlines = Deadlines.of(resource)
        current_marks = {
            SPEC_MARK: self._spec_hash(key, resource),
            DEFAULTS_MARK: self._defaults,
            DEADLINES_MARK: f"{deadlines.progress},{deadlines.drain}",
            REVISION_MARK: str(template["metadata"]["labels"][REVISION_LABEL]),
        }
        if live is None:
            return Target(template, current_marks)
        live_marks = marks(live)
        if revision_of(live) == current_marks[REVISION_MARK]:
            return self._same_revision(resource, template, current_marks, live_marks)
        if live_marks.get(SPEC_MARK, current_marks[SPEC_MARK]) != current_marks[SPEC_MARK]:
            return Target(template, current_marks)  # its own spec changed: no turn is needed
        if live_marks.get(REVISION_MARK) == current_marks[REVISION_MARK]:
            # Today's was written, and somebody else changed it.
            return Target(template, current_marks)
        turn, was_ready = (PAUSED, False) if resource.spec.paused else await self._turn(key)
        if turn.allowed:
            turn_mark = {TURN_MARK: self._defaults} if was_ready else {}
            return Target(template, current_marks | turn_mark, turn)
        names = [name for name in (*current_marks, TURN_MARK) if name in live_marks]
        return Target(live["spec"]["template"], {name: live_marks[name] for name in names}, turn)

    def _same_revision(
        self,
        resource: InferenceDeployment,
        template: Object,
        current_marks: dict[str, str],
        live_marks: Mapping[str, str],
    ) -> Target:
        """The template for a Deployment of today's revision: its pods keep their deadlines."""
        deadlines = deadlines_of(live_marks.get(DEADLINES_MARK, ""))
        if deadlines is None:
            return Target(template, current_marks)
        names = [name for name in (TURN_MARK, DEADLINES_MARK) if name in live_marks]
        merged_marks = current_marks | {name: live_marks[name] for name in names}
        if deadlines != Deadlines.of(resource):
            template = pod_template(resource, self._settings, deadlines)
        return Target(template, merged_marks)

    def finish(self, key: Key) -> None:
        """Take note that the pass is over: what it wrote can be seen in the cluster."""
        self._granted.discard(key)

    def forget(self, key: Key) -> None:
        self._template.forget(key)
        self._spec_hash.forget(key)

    async def _turn(self, key: Key) -> tuple[Turn, bool]:
        """The turn, and whether others have to wait until this one is Ready again."""
        turn = decide_turn(key, self._fleet(), self._settings.upgrade_concurrency, self._granted)
        if not turn.allowed:
            return turn, False
        async with self._granting:
            resources = self._cluster.store.all(RESOURCE)
            served = {key_of(body)[0] for body in resources} if self._settings.namespaces else {""}
            for namespace in sorted(served):
                bodies, version = await self._cluster.list(DEPLOYMENT, namespace)
                self._cluster.store.replace(DEPLOYMENT, namespace, bodies, version)
            fleet = self._fleet()
            turn = decide_turn(key, fleet, self._settings.upgrade_concurrency, self._granted)
            if turn.allowed:
                self._granted.add(key)
            return turn, any(member.key == key and member.holds for member in fleet)

    def _fleet(self) -> list[Member]:
        store, now = self._cluster.store, self._now()
        members = []
        for body in store.all(DEPLOYMENT):
            resource = store.get(RESOURCE, key_of(body))
            if resource is not None and not is_served_by_another(resource, self._settings.release):
                members.append(member_of(body, resource, self._defaults, now))
        return members
