"""Charts of a backtest: lines of block characters for a terminal, and an SVG file.

Owns drawing only, from numbers and names. No colour carries meaning alone: every line of the SVG
has a label.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN_LEFT, MARGIN_TOP = 960, 150, 70, 64
BETWEEN = 56  # from a panel to the next: its axis, and the next one's legend
TICKS = 10  # numbers of the axis of time, about
UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0))
COLOURS = ("#1f5fbf", "#c2410c", "#15803d")

Series = tuple[str, Sequence[float]]


def sparkline(values: Sequence[float], width: int = 72) -> str:
    """The highest value of each of ``width`` intervals, as blocks; the tallest is the highest of
    all.
    """
    peaks = _peaks(values, width)
    top = max(peaks, default=0.0) or 1.0
    return "".join(BLOCKS[min(8, -int(-8 * value // top))] for value in peaks)


def _peaks(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    width = min(width, count)
    return [max(values[i * count // width : (i + 1) * count // width]) for i in range(width)]


def svg(title: str, seconds: float, panels: Sequence[Sequence[Series]]) -> str:
    """An SVG with one panel below the other over the same time; each panel's series share its
    scale.
    """
    parts = [
        _panel(panel, MARGIN_TOP + i * (HEIGHT + BETWEEN), seconds)
        for i, panel in enumerate(panels)
    ]
    width, height = MARGIN_LEFT + WIDTH + 30, MARGIN_TOP + len(panels) * (HEIGHT + BETWEEN)
    size = (
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12"'
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def ticks(seconds: float) -> tuple[str, list[float]]:
    """The unit of an axis of so many seconds, and about TICKS round numbers on it, from 0."""
    unit, length = next(
        ((name, size) for name, size in reversed(UNITS) if seconds >= 3 * size), UNITS[0]
    )
    span = max(seconds, 1.0) / length
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * n for n in (1, 2, 5, 10) if span / (power * n) <= TICKS)
    return unit, [n * step for n in range(math.floor(span / step + 1e-9) + 1)]


def _axis(seconds: float, top: int, bottom: int) -> Iterator[str]:
    """Grid lines, their times below, and at the right end the unit."""
    unit, times = ticks(seconds)
    for value in times:
        x = MARGIN_LEFT + WIDTH * value * dict(UNITS)[unit] / max(seconds, 1.0)
        yield f'<path d="M{x:.1f} {top}V{bottom + 4}" stroke="#e5e5e5"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:.4g}</text>'
    yield f'<text x="{MARGIN_LEFT + WIDTH + 14}" y="{bottom + 16}">{unit}</text>'


def _panel(panel: Sequence[Series], top: int, seconds: float) -> str:
    highest = max((max(values, default=0.0) for _, values in panel), default=0.0) or 1.0
    bottom = top + HEIGHT
    parts = [
        (
            f'<rect x="{MARGIN_LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" '
            'fill="none" stroke="#bbb"/>'
        ),
        f'<text x="{MARGIN_LEFT - 6}" y="{top + 10}" text-anchor="end">{highest:.4g}</text>',
        f'<text x="{MARGIN_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        *_axis(seconds, top, bottom),
    ]
    for i, (name, values) in enumerate(panel):
        colour = COLOURS[i % len(COLOURS)]
        peaks = _peaks(values, WIDTH // 2)
        step = WIDTH / max(1, len(peaks) - 1)
        points = " ".join(
            f"{MARGIN_LEFT + n * step:.1f},{bottom - HEIGHT * v / highest:.1f}"
            for n, v in enumerate(peaks)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts.append(
            f'<text x="{MARGIN_LEFT + 10 + 220 * i}" y="{top - 6}" fill="{colour}">'
            f"— {escape(name)}</text>"
        )
    return "\n".join(parts)
