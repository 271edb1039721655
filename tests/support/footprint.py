"""What the processes of a served model take, and what the pod planned for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.looks import Looks
from support.serve_process import Process

SAMPLE_SECONDS = 0.05


def looks_at(root: int, *, clean: bool = True) -> Looks:
    """At what a process and its descendants take, in bytes, for ``with``: what each holds alone,
    and the largest part that it shares with another once. ``clean`` False: without pages of files,
    such as a checkpoint's, that the system may drop at any time.
    """

    def taken() -> int:
        parts = [part for pid in _family(root) if (part := _memory(pid, clean=clean))]
        return sum(own for own, _ in parts) + max(shared for _, shared in parts)

    return Looks(taken, SAMPLE_SECONDS)


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


def planned_bytes(report: Mapping[str, Any]) -> int:
    """The sum of the plan: every term, and the cache."""
    terms = sum(term["plannedBytes"] for term in report["terms"])
    if any(term["name"] == "kv" for term in report["terms"]):
        return int(terms)
    return int(terms + report["numBlocks"] * report["blockBytes"])
