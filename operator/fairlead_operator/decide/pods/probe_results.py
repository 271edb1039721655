"""The results of one resource's probes: answers of its pods and of the hub. Pure; the prober
replaces it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fairlead_operator.decide.pods.downloads import Download
from fairlead_operator.decide.pods.load import Sample

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Answers of the pods, by pod uid, and of the hub."""

    complete: bool = False  # whether pods and the hub were probed at least once
    canaries: frozenset[str] = frozenset()  # pods that generated a token
    canaries_due: frozenset[str] = frozenset()  # serving pods whose first canary has no answer yet
    canary_failures: Mapping[str, str] = field(default_factory=dict)  # why serving pods did not
    config: Mapping[str, Any] | None = None  # the model's config.json
    config_of: str = ""  # source and revision it belongs to
    config_error: tuple[str, str] = (
        "ConfigUnavailable",
        "the model's config.json is not known yet",
    )
    downloads: Mapping[str, Download] = field(default_factory=dict)  # as the status shows them
    downloads_at: float = float("-inf")  # monotonic clock of their last change
    measured: Mapping[str, Any] = field(default_factory=dict)  # a pod's /debug/memory
    measured_of: str = ""  # that pod's uid
    startups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # seconds by part
    samples: Mapping[str, Sample] = field(default_factory=dict)  # last good load
    unresponsive: frozenset[str] = frozenset()  # pods that did not answer their last scrape

    def of_pods(self, uids: frozenset[str], fetching: frozenset[str]) -> "ProbeResults":
        """The results without those of pods that are gone; ``fetching``: pods that download."""
        return replace(
            self,
            canaries=self.canaries & uids,
            canaries_due=self.canaries_due & uids,
            canary_failures=_only(self.canary_failures, uids),
            downloads=_only(self.downloads, fetching),
            startups=_only(self.startups, uids),
            samples=_only(self.samples, uids),
            unresponsive=self.unresponsive & uids,
        )

    def shows_as(self, results: "ProbeResults") -> bool:
        """Whether both give the same status, but for the load: scaling reads that at its ticks."""
        return _without_load(self) == _without_load(results)


def _without_load(results: ProbeResults) -> ProbeResults:
    return replace(results, samples={}, unresponsive=frozenset())


def _only(values: Mapping[str, V], uids: frozenset[str]) -> Mapping[str, V]:
    return {uid: value for uid, value in values.items() if uid in uids}
