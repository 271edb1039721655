"""The ownership of a resource that several releases of the operator see. Pure.

A release is named by the namespace of its Lease: its replicas and its restarts are one release. The
first one writes its name into the status, and every other leaves the resource alone. It may not
read the Lease of another, so it asks through the status: a release that runs writes a status
without the question within seconds. One that does not answer is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fairlead_operator.decide.pods.events import Note

ANSWER_SECONDS = 60.0  # longer than a standby takes to follow a leader that was killed
RETRY_SECONDS = 600.0  # until a release that answered is asked again
OLDER = "unknown to this version"  # an owner that writes no mark; no namespace has this name
_MARK, _CHALLENGER = "servedBy", "challenger"  # fields of the status


@dataclass(frozen=True, slots=True)
class OwnershipMemory:
    """The memory that a process has of the releases that serve one resource. Times in seconds."""

    marks: int = 0  # times that it wrote its own mark
    marked_at: float = 0.0
    stored: bool = True  # an older custom resource definition drops the mark
    challenged_owner: str = ""  # the release that it asked last
    challenged_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """The action for a resource: ``serve`` it; ``mark`` it as served by this release; ``challenge``
    its owner through the status; ``yield`` it to an owner that cannot be asked; or ``wait``. After
    ``requeue_after`` seconds comes the next look.
    """

    act: Literal["serve", "mark", "challenge", "yield", "wait"]
    memory: OwnershipMemory
    requeue_after: float = 0.0


def decide(status: Mapping[str, Any], release: str, memory: OwnershipMemory, now: float) -> Step:
    """The step for a resource with this status. ``now``: a monotonic clock."""
    owner = str(status.get(_MARK) or "")
    if owner == release:
        return Step("serve", replace(memory, stored=True))
    if not owner:
        return _claim(memory, now)
    if owner != memory.challenged_owner:
        memory = replace(memory, challenged_owner=owner, challenged_at=now)
        return Step("challenge", memory, ANSWER_SECONDS)
    if status.get(_CHALLENGER) == release:
        patience = memory.challenged_at + ANSWER_SECONDS - now
        return Step("wait", memory, patience) if patience > 0 else _mark(memory, now)
    pause = memory.challenged_at + RETRY_SECONDS - now
    if pause > 0:
        return Step("wait", memory, pause)
    return Step("challenge", replace(memory, challenged_at=now), ANSWER_SECONDS)


def _claim(memory: OwnershipMemory, now: float) -> Step:
    """The step for a resource without a mark."""
    if memory.marks and not memory.stored:
        return Step("serve", memory)
    pause = memory.marked_at + RETRY_SECONDS - now
    if memory.marks < 2 or pause <= 0:
        return _mark(memory, now)
    # The mark was removed twice: two operators would write the status in turn for ever.
    act: Literal["wait", "yield"] = "wait" if memory.challenged_owner == OLDER else "yield"
    return Step(act, replace(memory, challenged_owner=OLDER), pause)


def _mark(memory: OwnershipMemory, now: float) -> Step:
    marks = memory.marks + 1
    return Step("mark", replace(memory, marks=marks, marked_at=now, challenged_owner=""))


def is_marked(body: Mapping[str, Any], release: str) -> bool:
    return bool((body.get("status") or {}).get(_MARK) == release)


def is_served_by_another(body: Mapping[str, Any], release: str) -> bool:
    """Whether the resource carries the mark of another release."""
    return bool((body.get("status") or {}).get(_MARK, release) != release)


def have_same_mark(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the same release serves two versions of a resource."""
    return bool((old.get("status") or {}).get(_MARK) == (new.get("status") or {}).get(_MARK))


def with_mark(status: Mapping[str, Any], release: str) -> dict[str, Any]:
    """The status with this release's mark."""
    return {**status, _MARK: release}


def with_challenger(status: Mapping[str, Any], release: str) -> dict[str, Any]:
    """The status with this release's question to the owner."""
    return {**status, _CHALLENGER: release}


def ownership_note(owner: str, release: str) -> Note:
    """The Event on a resource that this release leaves to another."""
    server = "an older operator" if owner == OLDER else f"the operator in namespace {owner}"
    return Note(
        "ServedByAnother",
        f"{server} serves this resource, so the one in namespace {release} leaves it alone: let "
        "only one release serve this namespace (scope.namespaces and scope.cluster of their "
        "charts)",
        f"{owner} {release}",
        "Warning",
    )
