"""A recording as SVG: who sits in which slot at each step, or the mask of one step.

Owns the drawing only. A picture needs no script and no font; colours follow from the request's
name, so that one request has one colour in both pictures.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from fairlead_runtime.recording.mask import ALL, CACHED, NONE, Mask, letter, mask_of, word_at
from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import RowView, StepView, steps
from fairlead_runtime.recording.words import Words

CELL, TOKEN, ROW, MARGIN, TOP = 8, 13, 18, 60, 40  # pixels; CELL: a step, TOKEN: a cell of a mask
LETTER = 7  # pixels that a letter takes
BAND = 120  # steps beside each other; those that follow stand below
TICK = 10  # steps between two numbers of an axis
DECODE_OPACITY, CACHED_OPACITY, PART_OPACITY = 0.45, 0.35, 0.6
NONE_COLOUR = "#eeeeee"
MOST_NAMES = 12  # requests whose colours the picture of the slots names
MOST_STEPS = 2000  # of one picture; the title says where later ones begin
_Swatches = Sequence[tuple[str, float, str]]  # colour, opacity, meaning
SLOTS_LEGEND: _Swatches = (
    ("#555555", 1.0, "prefill"),
    ("#555555", DECODE_OPACITY, "decode"),
    ("", 1.0, "x preempted"),
    ("", 1.0, "a cell says more when it is pointed at"),
)
MASK_LEGEND: _Swatches = (
    ("#555555", 1.0, "the query sees the key"),
    ("#555555", PART_OPACITY, "a part of a cell's keys"),
    (NONE_COLOUR, 1.0, "not"),
    ("#555555", CACHED_OPACITY, "bar above: a key that was cached, dark: one of this step"),
)


def slots_picture(
    recording: Recording, words: Words | None = None, first: int = 0
) -> Iterator[str]:
    """From step ``first`` on one column per step, one line per slot, one colour per request. A
    prefill is filled, a decode is pale, and a preemption is a cross. ``words`` go into the tips.
    """
    views: list[StepView] = []
    last = first
    for view in steps(recording, first):
        if len(views) < MOST_STEPS:
            views.append(view)
        last = view.step
    slots = 1 + max((row.slot for view in views for row in view.rows), default=-1)
    bands = [views[at : at + BAND] for at in range(0, len(views), BAND)]
    height = ROW * (slots + 2)  # of a band: its slots, the axis and a space
    yield _head(MARGIN + CELL * BAND + 10, TOP + height * len(bands) + 2 * ROW)
    yield _text(4, 16, _title(recording, views, slots, last))
    for place, band in enumerate(bands):
        top = TOP + height * place
        for slot in range(slots):
            yield _text(4, top + ROW * slot + 13, f"slot {slot}")
        yield from _axis(band, top + ROW * slots)
        for column, view in enumerate(band):
            yield from _column(MARGIN + CELL * column, top, view, words)
    bottom = TOP + height * len(bands) + 4
    yield from _legend(4, bottom, SLOTS_LEGEND)
    yield from _names(views, bottom + ROW)
    yield "</svg>"


def _title(recording: Recording, views: Sequence[StepView], slots: int, last: int) -> str:
    policy = recording.limits.policy
    if not views:
        return f"{policy}: no step"
    span = f"steps {views[0].step:,} to {views[-1].step:,}"
    more = f" of {last:,}" if last > views[-1].step else ""
    rest = f"; the next: --from {views[-1].step + 1}" if more else ""
    return f"{policy}: {span}{more}, {slots} slots{rest}"


def _axis(band: Sequence[StepView], y: int) -> Iterator[str]:
    """The numbers of steps, below their columns."""
    yield _text(4, y + 13, "step")
    for column, view in enumerate(band):
        if column % TICK == 0:
            x = MARGIN + CELL * column
            yield f'<path d="M{x} {y}v4" stroke="#888888"/>'
            yield _text(x, y + 13, str(view.step))


def _names(views: Sequence[StepView], y: int) -> Iterator[str]:
    """The first requests in their colours."""
    names = list(dict.fromkeys(row.name for view in views for row in view.rows))
    x, most = 4, MARGIN + CELL * BAND - LETTER * 12
    for place, name in enumerate(names):
        if place == MOST_NAMES or x + LETTER * len(name) > most:
            yield _text(x, y + 10, f"and {len(names) - place} more")
            return
        yield f'<text x="{x}" y="{y + 10}" fill="{_colour(name)}">{escape(name)}</text>'
        x += LETTER * (len(name) + 2)


def _legend(x: int, y: int, swatches: _Swatches) -> Iterator[str]:
    yield "<g>"
    for colour, opacity, meaning in swatches:
        if colour:
            yield _rectangle(x, y, TOKEN, TOKEN - 1, colour, "", opacity)
            x += TOKEN + 5
        yield _text(x, y + 10, meaning)
        x += LETTER * len(meaning) + 16
    yield "</g>"


def _column(x: int, top: int, view: StepView, words: Words | None) -> Iterator[str]:
    for row in view.rows:
        y = top + ROW * row.slot
        opacity = DECODE_OPACITY if row.decode else 1.0
        yield _rectangle(
            x, y, CELL - 1, ROW - 3, _colour(row.name), _tip(view, row, words), opacity
        )
    for name, slot, _ in view.preempted:
        yield _text(x, top + ROW * slot + 13, "x", f"step {view.step}: {name} is preempted")


def mask_picture(view: StepView, window: int | None, words: Words | None = None) -> Iterator[str]:
    """The mask of one step: queries downwards, keys to the right, one colour per request. Above the
    keys a bar says whose they are and which were cached; with ``words`` each token stands beside
    its query and above its key.
    """
    mask = mask_of(view, window)
    names = _row_names(mask, view)
    queries = [word_at(mask, *at, words) for at in zip(mask.owners, mask.positions, strict=True)]
    keys = [
        word_at(mask, row, at, words)
        for row in view.rows
        for at in range((row.start + row.count) * (mask.per_cell == 1))
    ]
    matrix_x = 10 + LETTER * (
        max(map(len, names.values()), default=0) + 1 + max(map(len, queries), default=0)
    )
    matrix_x = max(matrix_x, 10 + LETTER * len("queries, down"))
    # Above the bar the keys' words, or whose they are.
    top = TOP + max(LETTER * max(map(len, keys), default=0), ROW) + 2 * TOKEN + 6
    legend_width = sum(TOKEN + 21 + LETTER * len(meaning) for *_, meaning in MASK_LEGEND)
    bottom = top + TOKEN * len(mask.lines)
    width = max(matrix_x + TOKEN * len(mask.key_owners), legend_width) + 10
    yield _head(width, bottom + 2 * ROW)
    kind = "full attention" if window is None else f"a window of {window}"
    title = f"step {view.step}: {mask.queries} queries, {mask.keys} keys, {kind}"
    cell = f"; a cell is {mask.per_cell} tokens" if mask.per_cell > 1 else ""
    yield _text(4, 16, title + cell)
    yield _text(4, top - TOKEN - 10, "keys, across")
    yield _text(4, top - 8, "queries, down")
    for column, word in enumerate(keys):
        yield (
            _upright(matrix_x + TOKEN * column + TOKEN - 2, top - TOKEN - 10, word) if word else ""
        )
    if not any(keys):
        yield from _owners(mask, view, matrix_x, top - TOKEN - 10)
    colours = {letter(i): _colour(row.name) for i, row in enumerate(view.rows)}
    for column, (owner, age) in enumerate(zip(mask.key_owners, mask.key_ages, strict=True)):
        x = matrix_x + TOKEN * column
        opacity = CACHED_OPACITY if age == CACHED else 1.0
        yield _rectangle(x, top - TOKEN - 6, TOKEN, TOKEN, colours[owner], owner, opacity)
    named = ""
    for line, (row, word, cells) in enumerate(zip(mask.owners, queries, mask.lines, strict=True)):
        y = top + TOKEN * line
        if row.name != named:
            named = row.name
            yield _text(4, y + TOKEN - 2, names[named])
        if word:
            yield _text(matrix_x - LETTER * len(word) - 4, y + TOKEN - 2, word)
        for column, visibility in enumerate(cells):
            colour = NONE_COLOUR if visibility == NONE else _colour(row.name)
            opacity = 1.0 if visibility in {ALL, NONE} else PART_OPACITY
            x = matrix_x + TOKEN * column
            yield _rectangle(x, y, TOKEN - 1, TOKEN - 1, colour, "", opacity)
    yield from _legend(4, bottom + ROW // 2, MASK_LEGEND)
    yield "</svg>"


def _row_names(mask: Mask, view: StepView) -> dict[str, str]:
    """The label of each row that is the first of a cell of queries: with how many follow in it."""
    places = {row.name: place for place, row in enumerate(view.rows)}
    firsts = list(dict.fromkeys(places[row.name] for row in mask.owners))
    ends = [*firsts[1:], len(view.rows)]
    names = {}
    for place, end in zip(firsts, ends, strict=True):
        row, more = view.rows[place], end - place - 1
        names[row.name] = f"[{row.slot}] {row.name}" + (f" and {more} more" if more else "")
    return names


def _owners(mask: Mask, view: StepView, x: int, y: int) -> Iterator[str]:
    """Whose keys begin where, as far as there is room."""
    names = {letter(i): row.name for i, row in enumerate(view.rows)}
    if len(names) < len(view.rows):
        return  # there are more rows than letters
    for owner, cells in groupby(enumerate(mask.key_owners), key=lambda cell: cell[1]):
        columns = [column for column, _ in cells]
        room = TOKEN * len(columns) // LETTER
        yield _text(x + TOKEN * columns[0], y, names[owner][: max(1, room - 1)])


def _head(width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="background:#ffffff" '
        'font-family="monospace" font-size="11">'
    )


def _tip(view: StepView, row: RowView, words: Words | None) -> str:
    phase = "decode" if row.decode else "prefill"
    span = f"{row.start}..{row.start + row.count - 1}"
    tip = f"step {view.step}: {row.name} {phase} {span}, {row.units} blocks {row.how}".rstrip()
    if words is None:
        return tip
    return f"{tip}: {words.words(row.new_ids)} -> {words.words(row.sampled_ids)}".rstrip()


def _colour(name: str) -> str:
    """Choices of one request share its colour."""
    return f"hsl({zlib.crc32(name.partition('/')[0].encode()) % 360},65%,45%)"


def _rectangle(
    x: int, y: int, width: int, height: int, colour: str, tip: str, opacity: float
) -> str:
    shape = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" '
        f'fill-opacity="{opacity:g}"'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def _text(x: int, y: int, text: str, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<text x="{x}" y="{y}">{title}{escape(text)}</text>'


def _upright(x: int, y: int, text: str) -> str:
    """A text that reads upwards from its place."""
    return f'<text transform="translate({x},{y}) rotate(-90)">{escape(text)}</text>'
