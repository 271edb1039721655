"""What the operator remembers of a resource between passes: answers of its pods and of the hub.

Lost on restart without harm: everything in here is asked for again. Nothing in here is ever a
reason to delete anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead_operator.decide.pods import drains
from fairlead_operator.decide.pods.downloads import Download
from fairlead_operator.decide.pods.drains import Drained
from fairlead_operator.decide.pods.events import Note
from fairlead_operator.decide.pods.load import Sample
from fairlead_operator.decide.scale.autoscale import History
from fairlead_operator.resource.kinds import Key

FIRST_LOOK_SECONDS = 5.0  # that pods and the hub have to answer before "not known" is said


@dataclass(slots=True)
class Known:
    """One resource's answers, by pod uid where they are a pod's."""

    uid: str
    since: float | None = None  # monotonic clock of the first pass
    asked: bool = False  # pods and the hub, at least once
    canaries: set[str] = field(default_factory=set)  # pods that made a token
    silent: dict[str, str] = field(default_factory=dict)  # serving pods that did not, and why
    config: Mapping[str, Any] | None = None  # the model's config.json
    config_of: str = ""  # source and revision it belongs to
    config_error: tuple[str, str] = (
        "ConfigUnavailable",
        "the model's config.json is not known yet",
    )
    downloads: Mapping[str, Download] = field(default_factory=dict)  # as shown, of pods that fetch
    downloads_at: float = float("-inf")
    measured: Mapping[str, Any] = field(default_factory=dict)  # a pod's /debug/memory
    measured_of: str = ""  # pod uid
    startups: dict[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # seconds of each pod's last start, by part
    samples: dict[str, Sample] = field(default_factory=dict)  # last good load of each pod
    history: History = field(default_factory=History)
    decided_at: float = float("-inf")  # monotonic clock of the last tick
    autoscaled: Mapping[str, Any] | None = None  # status.autoscaling of the last tick
    scaling_fact: tuple[str, str, str] = ("Unknown", "NoData", "nothing measured yet: holding")
    load_at: float = float("-inf")
    count_is_ours: bool | None = None  # whether the count was the operator's in the last pass
    asked_replicas: int | None = None  # spec.replicas of the last pass
    drained: Drained = field(default_factory=Drained)  # since the revision became the target
    drained_of: str = ""  # that revision
    ended: dict[str, Drained] = field(default_factory=dict)  # pods that ended, counted already
    untold: list[Note] = field(default_factory=list)  # Events still to be written

    def begin(self, before: Mapping[str, Any], clock: float) -> None:
        """The first pass of this operator: what only the status ``before`` tells is taken from
        there.
        """
        if self.since is None:
            self.since = clock
            self.autoscaled = before.get("autoscaling")
            self.drained_of, counted = drains.of_status(before)
            self.drained = self.drained.plus(counted)

    def end(self, pod: str, drained: Drained) -> None:
        """A pod ended; telling it again changes nothing."""
        if pod not in self.ended:
            self.ended[pod] = drained
            self.drained = self.drained.plus(drained)

    def drained_since(self, revision: str) -> Drained:
        """The counts of this revision's time; another one starts anew."""
        if self.drained_of != revision:
            self.drained_of, self.drained = revision, Drained()
        return self.drained

    def in_the_dark(self, clock: float) -> bool:
        """Whether nobody was asked yet: what is not known then is no news.

        An operator that starts again would take back that a resource is Ready, and say it again a
        moment later.
        """
        return self.since is not None and not self.asked and clock - self.since < FIRST_LOOK_SECONDS

    def forget_pods(self, alive: set[str]) -> None:
        self.canaries &= alive
        self.samples = {uid: sample for uid, sample in self.samples.items() if uid in alive}
        self.startups = {uid: parts for uid, parts in self.startups.items() if uid in alive}
        self.ended = {uid: counts for uid, counts in self.ended.items() if uid in alive}
        self.silent = {uid: why for uid, why in self.silent.items() if uid in alive}


class Memory:
    """By resource; one made anew under the same name starts empty."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}

    def of(self, key: Key, uid: str) -> Known:
        known = self._known.get(key)
        if known is None or known.uid != uid:
            known = self._known[key] = Known(uid)
        return known

    def pod_ended(self, key: Key, pod: str, drained: Drained) -> None:
        """Of a resource that was looked at before; what ended earlier is nobody's news."""
        if (known := self._known.get(key)) is not None:
            known.end(pod, drained)

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)
