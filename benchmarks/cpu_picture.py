"""The comparison of `cpu_peers.py` as a picture: bars of the median time over ours.

A bar that is longer than the axis ends there and has its number all the same: one engine that takes
twenty times as long would press the others into a corner.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.turns import OURS

# By model, workload and engine: the seconds of each round.
Seconds = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]

LEFT, WIDTH, RIGHT = 230, 480, 60
BAR, GAP, TOP, LEGEND = 14, 10, 44, 16  # heights
LONGEST = 4.0  # times as long as ours
COLOURS = ("#1f5fbf", "#cbd5e1", "#94a3b8", "#c2410c", "#15803d", "#a16207")
PER_LINE = 3  # names in a line of the legend


class Group(NamedTuple):
    """A workload on a model, and each engine's time over ours."""

    title: str
    ratios: Mapping[str, float]


def draw(seconds: Seconds) -> Iterator[str]:
    """The lines of an SVG file."""
    groups = list(_groups(seconds))
    names = list(dict.fromkeys(name for group in groups for name in group.ratios))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    top = TOP + LEGEND * (-(-len(names) // PER_LINE) - 1)
    height = top + sum(GAP + BAR * len(group.ratios) for group in groups) + GAP
    width = LEFT + WIDTH + RIGHT
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    yield 'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    yield '<text x="4" y="14">time over ours, median of the rounds: shorter is faster</text>'
    yield from _legend(colours)
    yield from _axis(top, height)
    y = top
    for group in groups:
        y += GAP
        yield f'<text x="4" y="{y + BAR - 3}">{group.title}</text>'
        for name, ratio in group.ratios.items():
            yield from _bar(y, name, ratio, colours[name])
            y += BAR
    yield "</svg>"


def _groups(seconds: Seconds) -> Iterator[Group]:
    for model, workloads in seconds.items():
        for workload, engines in workloads.items():
            # An engine may have run in the first rounds only.
            ratios = {
                name: statistics.median(
                    one / own for one, own in zip(taken, engines[OURS], strict=False)
                )
                for name, taken in engines.items()
            }
            yield Group(f"{model}, {workload}", ratios)


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    for number, (name, colour) in enumerate(colours.items()):
        x = 4 + (LEFT + WIDTH) // PER_LINE * (number % PER_LINE)
        y = 22 + LEGEND * (number // PER_LINE)
        yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="{y + 9}">{name}</text>'


def _axis(top: int, height: int) -> Iterator[str]:
    for ratio in range(1, int(LONGEST) + 1):
        x = LEFT + WIDTH * ratio / LONGEST
        colour = "#64748b" if ratio == 1 else "#e2e8f0"
        yield f'<path d="M{x:.0f} {top}V{height - 4}" stroke="{colour}" stroke-dasharray="3 3"/>'


def _bar(y: int, name: str, ratio: float, colour: str) -> Iterator[str]:
    size = WIDTH * min(ratio, LONGEST) / LONGEST
    shape = f'width="{size:.1f}" height="{BAR - 2}" fill="{colour}"'
    yield f'<rect x="{LEFT}" y="{y}" {shape}><title>{name}</title></rect>'
    more = "→ " if ratio > LONGEST else ""
    yield f'<text x="{LEFT + size + 4:.1f}" y="{y + BAR - 4}">{more}{ratio:.2f}</text>'
