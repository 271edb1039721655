"""The attention mask of one recorded step, as cells: which key each packed query sees.

The queries of all rows follow each other, and so do the keys of all rows: a row's cached tokens and
its new ones. A query sees the keys of its own row up to itself, as far as the window reaches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import RowView, StepView
from fairlead_runtime.sizing.arithmetic import ceil_div

MOST_CELLS = 96  # of a side; a larger mask has several tokens in a cell
NONE, PART, ALL = ".", "+", "#"


@dataclass(frozen=True, slots=True)
class Mask:
    """``lines[i][j]``: whether the queries of cell i see the keys of cell j. ``owners[i]`` is the
    row that the first query of cell i belongs to. A cell stands for ``per_cell`` tokens each way.
    """

    queries: int
    keys: int
    per_cell: int
    owners: tuple[RowView, ...]
    lines: tuple[str, ...]


def mask_of(view: StepView, window: int | None) -> Mask:
    """``window``: None for full attention; else a query sees that many keys, itself included."""
    queries = sum(row.count for row in view.rows)
    keys = sum(row.start + row.count for row in view.rows)
    per_cell = max(1, ceil_div(max(queries, keys), MOST_CELLS))
    owners: list[RowView] = []
    spans: list[tuple[int, int]] = []  # by query: the keys it sees, from and to
    first_key = 0
    for row in view.rows:
        for position in range(row.start, row.start + row.count):
            low = 0 if window is None else max(0, position - window + 1)
            spans.append((first_key + low, first_key + position + 1))
            owners.append(row)
        first_key += row.start + row.count
    lines = [_line(spans[at : at + per_cell], keys, per_cell) for at in range(0, queries, per_cell)]
    return Mask(queries, keys, per_cell, tuple(owners[::per_cell]), tuple(lines))


def _line(spans: Sequence[tuple[int, int]], keys: int, per_cell: int) -> str:
    cells = []
    for low in range(0, keys, per_cell):
        high = min(keys, low + per_cell)
        pairs = sum(max(0, min(high, end) - max(low, begin)) for begin, end in spans)
        cells.append(NONE if not pairs else ALL if pairs == (high - low) * len(spans) else PART)
    return "".join(cells)


def mask_text(recording: Recording, view: StepView) -> Iterator[str]:
    """Lines to print: the mask of each kind of layer, one line per query cell."""
    for window in dict.fromkeys(group.window for group in recording.groups):
        mask = mask_of(view, window)
        kind = "full attention" if window is None else f"a window of {window}"
        cell = f"; a cell is {mask.per_cell} tokens each way" if mask.per_cell > 1 else ""
        yield f"step {view.step}, {kind}: {mask.queries} queries, {mask.keys} keys{cell}"
        width = max((len(row.name) for row in mask.owners), default=0)
        for row, line in zip(mask.owners, mask.lines, strict=True):
            yield f"  [{row.slot}] {row.name:<{width}} {line}"
