"""The attention mask of one recorded step, as cells: which key each packed query sees.

The queries of all rows follow each other, and so do the keys of all rows: a row's cached tokens and
its new ones. A query sees the keys of its own row up to itself, as far as the window reaches.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import RowView, StepView
from fairlead_runtime.recording.words import Words
from fairlead_runtime.sizing.arithmetic import ceil_div

MOST_CELLS = 96  # of a side; a larger mask has several tokens in a cell
NONE, PART, ALL = ".", "+", "#"
CACHED, NEW = "=", "#"
LETTERS = string.ascii_uppercase + string.ascii_lowercase
LEGEND = "keys: = cached, # new; a query sees of a key cell: # all, + a part, . nothing"


@dataclass(frozen=True, slots=True)
class Mask:
    """``lines[i][j]``: whether the queries of cell i see the keys of cell j. ``owners[i]`` is the
    row that the first query of cell i belongs to. A cell stands for ``per_cell`` tokens each way.
    """

    queries: int
    keys: int
    per_cell: int
    owners: tuple[RowView, ...]
    positions: tuple[int, ...]  # by cell of queries, the first one's place in its sequence
    lines: tuple[str, ...]
    key_owners: str  # by cell, the letter of the row that its first key belongs to
    key_ages: str  # by cell, whether its first key was cached or is new


def mask_of(view: StepView, window: int | None) -> Mask:
    """``window``: None for full attention; else a query sees that many keys, itself included."""
    queries = sum(row.count for row in view.rows)
    keys = sum(row.start + row.count for row in view.rows)
    per_cell = max(1, ceil_div(max(queries, keys), MOST_CELLS))
    owners: list[RowView] = []
    positions: list[int] = []
    spans: list[tuple[int, int]] = []  # by query: the keys it sees, from and to
    first_key = 0
    for row in view.rows:
        for position in range(row.start, row.start + row.count):
            low = 0 if window is None else max(0, position - window + 1)
            spans.append((first_key + low, first_key + position + 1))
            owners.append(row)
            positions.append(position)
        first_key += row.start + row.count
    lines = [_line(spans[at : at + per_cell], keys, per_cell) for at in range(0, queries, per_cell)]
    letters = "".join(letter(i) * (r.start + r.count) for i, r in enumerate(view.rows))
    ages = "".join(CACHED * row.start + NEW * row.count for row in view.rows)
    return Mask(
        queries,
        keys,
        per_cell,
        tuple(owners[::per_cell]),
        tuple(positions[::per_cell]),
        tuple(lines),
        letters[::per_cell],
        ages[::per_cell],
    )


def letter(row: int) -> str:
    """The letter of a step's row, by its place."""
    return LETTERS[row % len(LETTERS)]


def _line(spans: Sequence[tuple[int, int]], keys: int, per_cell: int) -> str:
    cells = []
    for low in range(0, keys, per_cell):
        high = min(keys, low + per_cell)
        pairs = sum(max(0, min(high, end) - max(low, begin)) for begin, end in spans)
        cells.append(NONE if not pairs else ALL if pairs == (high - low) * len(spans) else PART)
    return "".join(cells)


def mask_text(recording: Recording, view: StepView, words: Words | None = None) -> Iterator[str]:
    """Lines to print: whose keys the columns are, the mask of each kind of layer, one line per
    query cell, and with ``words`` the tokens of both.
    """
    letters = {row.name: letter(place) for place, row in enumerate(view.rows)}
    if words is not None:
        for row in view.rows:
            parts = [words.words(ids) for ids in (row.cached_ids, row.new_ids) if ids]
            yield f"{letters[row.name]} = [{row.slot}] {row.name}: {' | '.join(parts)}"
    for window in dict.fromkeys(group.window for group in recording.groups):
        mask = mask_of(view, window)
        kind = "full attention" if window is None else f"a window of {window}"
        cell = f"; a cell is {mask.per_cell} tokens each way" if mask.per_cell > 1 else ""
        yield f"step {view.step}, {kind}: {mask.queries} queries, {mask.keys} keys{cell}"
        labels = list(_labels(mask, letters, words))
        width = max(map(len, labels), default=0)
        yield f"  {'keys of':<{width}} {mask.key_owners}"
        yield f"  {'':<{width}} {mask.key_ages}"
        for label, line in zip(labels, mask.lines, strict=True):
            yield f"  {label:<{width}} {line}"
    yield LEGEND


def _labels(mask: Mask, letters: Mapping[str, str], words: Words | None) -> Iterator[str]:
    for row, position in zip(mask.owners, mask.positions, strict=True):
        label = f"[{row.slot}] {letters[row.name]} {row.name}"
        yield f"{label} {word_at(mask, row, position, words)}".rstrip()


def word_at(mask: Mask, row: RowView, position: int, words: Words | None) -> str:
    """The token at a position of a row, where a cell is one token and the recording has it."""
    known = mask.per_cell == 1 and position < len(row.ids)
    return words.word(row.ids[position]) if words is not None and known else ""
