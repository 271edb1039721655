"""The table of a run as a picture: for each row the share of the bound, or of the faster side, that
each side reaches. Longer is better.
"""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.gpu.report import Report, Row
from benchmarks.turns import OURS

LEFT, WIDTH, RIGHT = 250, 440, 70
BAR, GAP, TOP = 14, 10, 44  # heights
COLOURS = {OURS: "#1f5fbf", "transformers": "#94a3b8"}


def draw(report: Report) -> Iterator[str]:
    """The lines of an SVG file."""
    rows = [row for row in report.rows if row.ours and (row.bound or row.theirs)]
    bars = sum(bool(row.ours) + bool(row.theirs) for row in rows)
    width, height = LEFT + WIDTH + RIGHT, TOP + GAP * (len(rows) + 1) + BAR * bars
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    yield 'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    title = f"{report.model}, {report.device}, {report.date[:10]}: longer is faster"
    yield f'<text x="4" y="14">{escape(title)}</text>'
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = 4 + 110 * number
        yield f'<rect x="{x}" y="22" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="31">{name}</text>'
    yield f'<text x="{4 + 110 * len(COLOURS)}" y="31">dashed: the bound, or the faster one</text>'
    end = LEFT + WIDTH
    yield f'<path d="M{end} {TOP}V{height - 4}" stroke="#64748b" stroke-dasharray="3 3"/>'
    y = TOP
    for row in rows:
        y += GAP
        yield f'<text x="4" y="{y + BAR - 3}">{escape(row.name)}</text>'
        for name, values in ((OURS, row.ours), ("transformers", row.theirs)):
            if values:
                yield from _bar(y, name, row, values)
                y += BAR
    yield "</svg>"


def _bar(y: int, name: str, row: Row, values: Sequence[float]) -> Iterator[str]:
    value = statistics.median(values)
    medians = [statistics.median(one) for one in (row.ours, row.theirs) if one]
    whole = row.bound or (max(medians) if row.more else min(medians))
    share = min(1.0, value / whole if row.more else whole / value)
    size = WIDTH * share
    shape = f'width="{size:.1f}" height="{BAR - 2}" fill="{COLOURS[name]}"'
    yield f'<rect x="{LEFT}" y="{y}" {shape}><title>{name}</title></rect>'
    yield f'<text x="{LEFT + size + 4:.1f}" y="{y + BAR - 4}">{value:.4g} {escape(row.unit)}</text>'
