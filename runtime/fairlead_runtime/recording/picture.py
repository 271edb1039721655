"""A recording as SVG: who sits in which slot at each step, or the mask of one step.

Owns the drawing only. A picture needs no script and no font; colours follow from the request's
name, so that one request has one colour in both pictures.
"""

import zlib
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from fairlead_runtime.recording.mask import ALL, CACHED, NONE, letter, mask_of, word_at
from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import RowView, StepView, steps
from fairlead_runtime.recording.words import Words

CELL, TOKEN, ROW, MARGIN, TOP = 8, 13, 18, 90, 40  # pixels; TOKEN: a cell of one token
LETTER = 7  # pixels that a letter takes
CACHED_OPACITY = 0.35
LEGENDS = (
    "bar above the keys: whose they are; pale: cached before the step, full: of this step",
    "a cell: full: the query sees all of it, paler: a part, grey: nothing",
)
SLOTS_LEGEND = "full: prefill, pale: decode, x: preempted; pointed at, a cell says more"
MOST_NAMES = 12  # requests whose colours the picture of the slots names
MOST_STEPS = 2000  # of one picture; later steps are left out, and the title says so
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    'font-family="monospace" font-size="11">'
)


def slots_picture(recording: Recording, words: Words | None = None) -> Iterator[str]:
    """One column per step, one line per slot, one colour per request. A prefill is filled, a decode
    is pale, and a preemption is a cross. ``words`` go into the tips.
    """
    views: list[StepView] = []
    cut = False
    for view in steps(recording):
        if len(views) == MOST_STEPS:
            cut = True
            break
        views.append(view)
    slots = 1 + max((row.slot for view in views for row in view.rows), default=-1)
    width = max(MARGIN + CELL * len(views), LETTER * len(SLOTS_LEGEND)) + 10
    yield _HEAD.format(width=width, height=TOP + ROW * (slots + 2) + 20)
    more = f", the first {MOST_STEPS} steps" if cut else ""
    yield _text(4, 16, f"{recording.limits.policy}: {len(views)} steps, {slots} slots{more}")
    for slot in range(slots):
        yield _text(4, TOP + ROW * slot + 13, f"slot {slot}")
    for column, view in enumerate(views):
        yield from _column(MARGIN + CELL * column, view, words)
    yield from _names(views, TOP + ROW * slots + 20)
    yield "</svg>"


def _names(views: Sequence[StepView], y: int) -> Iterator[str]:
    """The legend, and below it the first requests in their colours."""
    yield _text(4, y, SLOTS_LEGEND)
    names = list(dict.fromkeys(row.name for view in views for row in view.rows))
    x = 4
    for name in names[:MOST_NAMES]:
        yield f'<text x="{x}" y="{y + ROW}" fill="{_colour(name)}">{escape(name)}</text>'
        x += LETTER * (len(name) + 2)
    if len(names) > MOST_NAMES:
        yield _text(x, y + ROW, f"and {len(names) - MOST_NAMES} more")


def _column(x: int, view: StepView, words: Words | None) -> Iterator[str]:
    for row in view.rows:
        y = TOP + ROW * row.slot
        opacity = 0.45 if row.decode else 1.0
        yield _rectangle(
            x, y, CELL - 1, ROW - 3, _colour(row.name), _tip(view, row, words), opacity
        )
    for name, slot, _ in view.preempted:
        yield _text(x, TOP + ROW * slot + 13, "x", f"step {view.step}: {name} is preempted")


def mask_picture(view: StepView, window: int | None, words: Words | None = None) -> Iterator[str]:
    """The mask of one step: queries downwards, keys to the right, one colour per request. Above the
    keys a bar says whose they are and which were cached; with ``words`` each token stands beside
    its query and above its key.
    """
    mask = mask_of(view, window)
    size = TOKEN if mask.per_cell == 1 else CELL
    names = [f"[{row.slot}] {row.name}" for row in view.rows]
    queries = [word_at(mask, *at, words) for at in zip(mask.owners, mask.positions, strict=True)]
    keys = [
        word_at(mask, row, at, words)
        for row in view.rows
        for at in range((row.start + row.count) * (mask.per_cell == 1))
    ]
    matrix_x = 10 + LETTER * (
        max(map(len, names), default=0) + 1 + max(map(len, queries), default=0)
    )
    top = TOP + LETTER * max(map(len, keys), default=0) + 2 * size + 6
    width = max(matrix_x + size * len(mask.key_owners), matrix_x + LETTER * len(LEGENDS[0])) + 10
    bottom = top + size * len(mask.lines)
    yield _HEAD.format(width=width, height=bottom + 20 + ROW * len(LEGENDS))
    kind = "full attention" if window is None else f"a window of {window}"
    title = f"step {view.step}: {mask.queries} queries, {mask.keys} keys, {kind}"
    cell = f"; a cell is {mask.per_cell} tokens" if mask.per_cell > 1 else ""
    yield _text(4, 16, title + cell)
    for column, word in enumerate(keys):
        yield _upright(matrix_x + size * column + size - 2, top - size - 10, word) if word else ""
    colours = {letter(i): _colour(row.name) for i, row in enumerate(view.rows)}
    for column, (owner, age) in enumerate(zip(mask.key_owners, mask.key_ages, strict=True)):
        x = matrix_x + size * column
        opacity = CACHED_OPACITY if age == CACHED else 1.0
        yield _rectangle(x, top - size - 6, size, size, colours[owner], owner, opacity)
    named = ""
    for line, (row, word, cells) in enumerate(zip(mask.owners, queries, mask.lines, strict=True)):
        y = top + size * line
        if row.name != named:
            named = row.name
            yield _text(4, y + size - 2, names[[r.name for r in view.rows].index(named)])
        if word:
            yield _text(matrix_x - LETTER * len(word) - 4, y + size - 2, word)
        for column, visibility in enumerate(cells):
            colour = "#eeeeee" if visibility == NONE else _colour(row.name)
            opacity = 1.0 if visibility in {ALL, NONE} else 0.6
            yield _rectangle(matrix_x + size * column, y, size - 1, size - 1, colour, "", opacity)
    for place, legend in enumerate(LEGENDS):
        yield _text(4, bottom + 16 + ROW * place, legend)
    yield "</svg>"


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
