"""Write the figures of a run of `make e2e` as a table and a drawn timeline, for cluster.md.

FAIRLEAD_E2E_FIGURES=figures.json make e2e && python benchmarks/cluster.py figures.json
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

WIDTH = 60  # characters of the timeline
APPLY = "apply"  # the scenario whose moments the timeline shows
MOMENTS = (  # in the order in which they come; seconds after `kubectl apply` was typed
    "pod scheduled",
    "container started",
    "model loaded",
    "self-test passed",
    "first token through the Service",
    "Ready",
)


def timeline(moments: Mapping[str, float]) -> Iterator[str]:
    """One bar per part, from the moment before to its own."""
    reached = [(name, moments[name]) for name in MOMENTS if name in moments]
    end = max((at for _, at in reached), default=0.0)
    if not end:
        return
    before = 0.0
    for name, at in reached:
        start, stop = round(WIDTH * before / end), round(WIDTH * at / end)
        bar = " " * start + "█" * max(1, stop - start)
        yield f"{name:<32}{bar:<{WIDTH + 1}}{at:6.1f} s"
        before = max(before, at)


def table(figures: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    yield "| scenario | figure | value |"
    yield "|---|---|---|"
    for scenario, values in figures.items():
        for name, value in values.items():
            yield f"| {scenario} | {name} | {value} |"


def main() -> None:
    figures = json.loads(Path(sys.argv[1]).read_text())
    moments = {
        name.removesuffix(", s after apply"): float(value)
        for name, value in figures.get(APPLY, {}).items()
        if name.endswith(", s after apply")
    }
    print("```")
    print(*timeline(moments), sep="\n")
    print("```\n")
    print(*table(figures), sep="\n")


if __name__ == "__main__":
    main()
