"""Which release of the operator serves a resource that several of them see. Pure.

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
_MARK, _QUESTION = "servedBy", "challenger"  # fields of the status


@dataclass(frozen=True, slots=True)
class Met:
    """What a process remembers of the releases that it met at one resource. Times in seconds."""

    marks: int = 0  # times that it wrote its own mark
    marked_at: float = 0.0
    stored: bool = True  # an older custom resource definition drops the mark
    asked: str = ""  # the release that it asked last
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: ``serve``; write the own mark and serve; write a question to the owner; say
    that the resource is left to an owner that cannot be asked; or wait for ``again`` seconds.
    """

    act: Literal["serve", "mark", "ask", "leave", "wait"]
    met: Met
    again: float = 0.0


def decide(status: Mapping[str, Any], release: str, met: Met, now: float) -> Step:
    """The step for a resource with this status. ``now``: a monotonic clock."""
    owner = str(status.get(_MARK) or "")
    if owner == release:
        return Step("serve", replace(met, stored=True))
    if not owner:
        if met.marks and not met.stored:
            return Step("serve", met)
        again = met.marked_at + RETRY_SECONDS - now
        if met.marks < 2 or again <= 0:
            return _mark(met, now)
        # It was removed twice: two operators would write the status in turn for ever.
        return Step("wait" if met.asked == OLDER else "leave", replace(met, asked=OLDER), again)
    if owner != met.asked:
        return Step("ask", replace(met, asked=owner, asked_at=now), ANSWER_SECONDS)
    if status.get(_QUESTION) == release:
        again = met.asked_at + ANSWER_SECONDS - now
        return Step("wait", met, again) if again > 0 else _mark(met, now)
    again = met.asked_at + RETRY_SECONDS - now
    if again > 0:
        return Step("wait", met, again)
    return Step("ask", replace(met, asked_at=now), ANSWER_SECONDS)


def _mark(met: Met, now: float) -> Step:
    return Step("mark", replace(met, marks=met.marks + 1, marked_at=now, asked=""))


def is_marked(body: Mapping[str, Any], release: str) -> bool:
    return bool((body.get("status") or {}).get(_MARK) == release)


def is_served_by_another(body: Mapping[str, Any], release: str) -> bool:
    """Whether the resource carries the mark of another release."""
    return bool((body.get("status") or {}).get(_MARK, release) != release)


def same_mark(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two versions of a resource are served by the same release."""
    return bool((one.get("status") or {}).get(_MARK) == (other.get("status") or {}).get(_MARK))


def marked(status: Mapping[str, Any], release: str) -> dict[str, Any]:
    """The status with this release's mark."""
    return {**status, _MARK: release}


def asking(status: Mapping[str, Any], release: str) -> dict[str, Any]:
    """The status with this release's question."""
    return {**status, _QUESTION: release}


def left_alone(owner: str, release: str) -> Note:
    """The Event on a resource that this release leaves to another."""
    who = "an older operator" if owner == OLDER else f"the operator in namespace {owner}"
    return Note(
        "ServedByAnother",
        f"{who} serves this resource, so the one in namespace {release} leaves it alone: let only "
        "one release serve this namespace (scope.namespaces and scope.cluster of their charts)",
        f"{owner} {release}",
        "Warning",
    )
