"""The turns of an upgrade: when the operator's defaults change, deployments roll one by one.

Owns the marks that a Deployment carries for this, and the decision. A *changed default* is a
template that differs though its resource's spec does not: another default image, another hub,
another version of this operator. Everything is read from the cluster, so a new operator goes on
where the last one stopped.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.decide.children.manifests import revision_of
from fairlead_operator.decide.children.podtemplate import Deadlines
from fairlead_operator.decide.pods.blockers import NORMAL
from fairlead_operator.resource.kinds import GROUP, Key, Object, key_of
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from fairlead_runtime.settings.engine_config import EngineConfig

# Annotations of the Deployment, not of its template: they change without a new pod.
SPEC_MARK = f"{GROUP}/spec-hash"  # of what the resource asks of the template
DEFAULTS_MARK = f"{GROUP}/defaults-hash"  # of the defaults the template was written with
REVISION_MARK = f"{GROUP}/revision"  # of the template that was written last
DEADLINES_MARK = f"{GROUP}/deadlines"  # seconds of progress and drain in its template
TURN_MARK = f"{GROUP}/upgrade-turn"  # the defaults for which it took a turn while it was Ready
# A pod that waits for room is not a fault yet: the rollout's own deadline judges it.
_NO_FAULT = NORMAL | {"SurgeBlocked", "InsufficientAccelerator", "Unschedulable"}
FAULT_SECONDS = 60.0  # a blocker of a fault that stands this long is a failed upgrade


def spec_hash(resource: InferenceDeployment) -> str:
    """A hash of what the resource asks of its pods. Values equal to a default are left out, so a
    custom resource definition with one more defaulted field changes no hash.
    """
    spec = resource.spec
    engine = dataclasses.replace(resource.engine, drain_timeout=EngineConfig().drain_timeout)
    template_inputs = {
        "image": resource.image,
        "engine": _strip_defaults(engine),
        "model": _strip_defaults(spec.model),
        "resources": _strip_defaults(spec.resources),
        "modelCache": _strip_defaults(spec.model_cache),
        "security": _strip_defaults(spec.security.api_key_secret_ref),
        "podTemplate": _strip_defaults(spec.pod_template),
    }
    return _digest(template_inputs)


def defaults_hash(settings: Settings, version: str) -> str:
    """A hash of what a template takes from the operator. ``version``: of the operator itself."""
    network = (settings.proxy_environment, settings.ca_config_map, settings.ca_key)
    images = (settings.image_for(0), settings.image_for(1), settings.image_pull_secrets)
    return _digest([images, settings.hub, network, settings.fs_group, version])


def _strip_defaults(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _strip_defaults(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != _default(f)
        }
    if isinstance(value, tuple):
        return [_strip_defaults(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def deadlines_of(mark: str) -> Deadlines | None:
    """The deadlines in DEADLINES_MARK; None where it holds none."""
    if not re.fullmatch("[0-9]{1,6},[0-9]{1,6}", mark):
        return None
    progress, drain = mark.split(",")
    return Deadlines(int(progress), int(drain))


def marks(deployment: Object) -> Mapping[str, str]:
    return deployment["metadata"].get("annotations") or {}


@dataclass(frozen=True, slots=True)
class Member:
    """One deployment of the fleet, as an upgrade to ``defaults`` sees it."""

    key: Key
    pending: bool  # its template was written with other defaults
    takes_turn: bool  # it rolls, or has rolled, in its turn
    ready: bool  # it is Ready and has no pod of another revision; a missing pod is no matter
    idle: bool  # paused, or without replicas
    failure: str  # why it failed; "" while it has not

    @property
    def holds(self) -> bool:
        """Whether others wait until this one is Ready again: not if it was not Ready before."""
        return self.ready and not self.idle


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer whether a deployment may roll now. ``is_held``: one that failed holds it;
    ``message`` says which one it waits for.
    """

    allowed: bool
    message: str = ""
    is_held: bool = False


def member_of(deployment: Object, resource: Object, defaults: str, now: datetime) -> Member:
    """The member of the fleet that a Deployment and the body of its resource make."""
    status: Mapping[str, Any] = resource.get("status") or {}
    spec: Mapping[str, Any] = resource.get("spec") or {}
    live_marks = marks(deployment)
    replicas = deployment["spec"].get("replicas", 1)
    ready = (
        status.get("targetRevision") == revision_of(deployment)
        and (status.get("rollout") or {}).get("phase") != "Rolling"
        and _is_true(status, "Ready")
    )
    return Member(
        key=key_of(deployment),
        pending=live_marks.get(DEFAULTS_MARK) != defaults,
        # Without replicas nothing of it rolls, and nothing becomes Ready.
        takes_turn=live_marks.get(TURN_MARK) == defaults and replicas > 0,
        ready=ready,
        idle=bool(spec.get("paused")) or not replicas,
        failure="" if ready else _failure(deployment, status, now),
    )


def decide_turn(
    key: Key, fleet: Iterable[Member], concurrency: int, granted: Iterable[Key]
) -> Turn:
    """The turn of ``key`` to roll to the new defaults. ``granted``: turns given but not seen in the
    cluster yet. ``concurrency`` 0: no deployment rolls, each keeps its pods until its spec changes.
    """
    members = {member.key: member for member in fleet}
    mine = members.get(key)
    if concurrency == 0:
        return Turn(False, "changed defaults wait for a change of the spec (upgrade.concurrency 0)")
    running = {
        k for k, member in members.items() if member.takes_turn and not member.ready and k != key
    }
    for name in sorted(running):
        if members[name].failure:
            text = f"{_name(name)} failed with the new defaults ({members[name].failure})"
            return Turn(False, f"{text}: the others keep their pods", is_held=True)
    running |= {k for k in granted if k != key}
    if mine is None:
        return Turn(True)
    # The one that asks is pending, also where only the rendering changed and no default did.
    first = sorted(
        k
        for k, member in members.items()
        if (member.pending or k == key) and member.holds and k not in running
    )
    if mine.holds:
        free = concurrency - len(running)
        if free > 0 and key in first[:free]:
            return Turn(True)
        ahead = sorted(running) or first
        return Turn(False, f"waits for its turn in the upgrade, after {_name(ahead[0])}")
    if first or running:
        ahead = sorted(running) or first
        return Turn(False, f"waits until the Ready ones are upgraded, now {_name(ahead[0])}")
    return Turn(True)


def _name(key: Key) -> str:
    return "/".join(key)


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    return any(
        c.get("type") == kind and c.get("status") == "True" for c in status.get("conditions") or ()
    )


def _failure(deployment: Object, status: Mapping[str, Any], now: datetime) -> str:
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        if (
            condition.get("type") == "Progressing"
            and condition.get("reason") == "ProgressDeadlineExceeded"
        ):
            return "ProgressDeadlineExceeded"
    if status.get("targetRevision") != revision_of(deployment):
        return ""  # the status is of the time before the turn
    for blocker in status.get("blockers") or ():
        since = str(blocker.get("since") or "")
        if blocker.get("code") in _NO_FAULT or not since:
            continue
        if (now - datetime.fromisoformat(since)).total_seconds() >= FAULT_SECONDS:
            return str(blocker.get("code"))
    return ""
