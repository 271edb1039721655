"""The progress of the pods' downloads, as the status shows it: in coarse steps, which cost few
writes. Pure.

The status changes when a download passes a tenth, and at most every ``SHOW_SECONDS``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator.decide.pods.pod import fetch_status, is_deleting
from fairlead_operator.resource.json_text import count_of
from fairlead_operator.resource.kinds import Object

SHOW_SECONDS = 30.0
STEP = 10  # percent
MOST_BYTES = 1 << 60
CODE = "FetchingWeights"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes downloaded and bytes in all."""

    done: int
    total: int

    @property
    def percent(self) -> int:
        return 100 * self.done // self.total

    def __str__(self) -> str:
        return (
            f"{self.percent} % of the weights are there: {_size(self.done)} of {_size(self.total)}"
        )


def read(answer: Mapping[str, Any]) -> Download | None:
    """A pod's answer to ``/progress``; None while it holds no numbers, or impossible ones."""
    done, total = (count_of(answer.get(f"{name}_bytes"), MOST_BYTES) for name in ("done", "total"))
    return Download(done, total) if total and done is not None and done <= total else None


def fetching(pods: Iterable[Object]) -> list[Object]:
    """Pods that download their weights now and are not being deleted."""
    return [
        pod
        for pod in pods
        if not is_deleting(pod) and "running" in (fetch_status(pod).get("state") or {})
    ]


def show(
    current: Mapping[str, Download], latest: Mapping[str, Download], waited: float
) -> Mapping[str, Download]:
    """The downloads to show from now on, by pod uid; ``current`` itself where the change is too
    small or too soon.

    ``waited``: seconds since the last change of what is shown.
    """
    if waited < SHOW_SECONDS or {uid: _step(download) for uid, download in current.items()} == {
        uid: _step(download) for uid, download in latest.items()
    }:
        return current
    return dict(latest)


def messages(
    downloads: Mapping[str, Download], pods: Iterable[Object], status: Mapping[str, Any]
) -> Mapping[str, str]:
    """The blocker's message by pod uid. A pod without an answer yet, as after a restart, keeps its
    message in ``status``, the one written last.
    """
    previous = {
        str(blocker.get("object")): str(blocker.get("message"))
        for blocker in status.get("blockers") or ()
        if blocker.get("code") == CODE
    }
    by_uid = {uid: str(download) for uid, download in downloads.items()}
    for pod in fetching(pods):
        uid, about = pod["metadata"]["uid"], f"Pod/{pod['metadata']['name']}"
        if uid not in by_uid and about in previous:
            by_uid[uid] = previous[about]
    return by_uid


def _step(download: Download) -> tuple[int, int]:
    return download.percent // STEP, download.total


def _size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"
