"""What the processes of a served model take, and what the pod planned for them."""

import threading
from pathlib import Path
from typing import Any, Self

from support.serve_process import Process

SAMPLE_SECONDS = 0.05


class Footprint:
    """The most memory that the pod's processes took, in bytes, by sampling: what each holds alone,
    and the largest part that it shares with another once. ``clean`` False: without pages of files,
    such as a checkpoint's, that the system may drop at any time.
    """

    def __init__(self, root: int, *, clean: bool = True) -> None:
        self.peak = self.samples = 0
        self._root, self._clean = root, clean
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            found = (_memory(pid, clean=self._clean) for pid in _family(self._root))
            parts = [part for part in found if part]
            self.peak = max(self.peak, sum(own for own, _ in parts) + max(s for _, s in parts))
            self.samples += 1


def _family(root: int) -> list[int]:
    """The process and its descendants."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += map(int, task.read_text().split())
            except OSError:  # the thread has ended
                continue
    return found


def _memory(pid: int, *, clean: bool) -> tuple[int, int] | None:
    """Bytes that the process has alone, and shares; None once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    kinds = ("Clean", "Dirty") if clean else ("Dirty",)
    own, shared = (sum(sizes[f"{of}_{kind}"] for kind in kinds) for of in ("Private", "Shared"))
    return own, shared


def memory_report(server: Process) -> dict[str, Any]:
    """What /debug/memory says."""
    with server.client("admin") as admin:
        report: dict[str, Any] = admin.get("/debug/memory").raise_for_status().json()
    return report


def planned_bytes(server: Process) -> int:
    """The sum of the plan: every term, and the cache."""
    report = memory_report(server)
    terms = sum(term["plannedBytes"] for term in report["terms"])
    if any(term["name"] == "kv" for term in report["terms"]):
        return int(terms)
    return int(terms + report["numBlocks"] * report["blockBytes"])
