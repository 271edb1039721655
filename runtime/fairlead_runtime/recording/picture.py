"""A recording as SVG: who sits in which slot at each step, or the mask of one step.

Owns the drawing only. A picture needs no script and no font; colours follow from the request's
name, so that one request has one colour in both pictures.
"""

import zlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

from fairlead_runtime.recording.mask import ALL, NONE, mask_of
from fairlead_runtime.recording.record import Recording
from fairlead_runtime.recording.trace import RowView, StepView, steps

CELL, ROW, MARGIN, TOP = 8, 18, 90, 40  # pixels
MOST_STEPS = 2000  # of one picture; later steps are left out, and the title says so
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    'font-family="monospace" font-size="11">'
)


def slots_picture(recording: Recording) -> Iterator[str]:
    """One column per step, one line per slot. A prefill is filled, a decode is pale, and a
    preemption is a cross.
    """
    views: list[StepView] = []
    cut = False
    for view in steps(recording):
        if len(views) == MOST_STEPS:
            cut = True
            break
        views.append(view)
    slots = 1 + max((row.slot for view in views for row in view.rows), default=-1)
    yield _HEAD.format(width=MARGIN + CELL * len(views) + 10, height=TOP + ROW * slots + 20)
    more = f", the first {MOST_STEPS} steps" if cut else ""
    yield _text(4, 16, f"{recording.limits.policy}: {len(views)} steps, {slots} slots{more}")
    for slot in range(slots):
        yield _text(4, TOP + ROW * slot + 13, f"slot {slot}")
    for column, view in enumerate(views):
        yield from _column(MARGIN + CELL * column, view)
    yield "</svg>"


def _column(x: int, view: StepView) -> Iterator[str]:
    for row in view.rows:
        y = TOP + ROW * row.slot
        opacity = 0.45 if row.decode else 1.0
        yield _rectangle(x, y, CELL - 1, ROW - 3, _colour(row.name), _tip(view, row), opacity)
    for name, slot, _ in view.preempted:
        yield _text(x, TOP + ROW * slot + 13, "x", f"step {view.step}: {name} is preempted")


def mask_picture(view: StepView, window: int | None) -> Iterator[str]:
    """The mask of one step: queries downwards, keys to the right, one colour per request."""
    mask = mask_of(view, window)
    width = len(mask.lines[0]) if mask.lines else 0
    yield _HEAD.format(width=MARGIN + CELL * width + 10, height=TOP + CELL * len(mask.lines) + 20)
    kind = "full attention" if window is None else f"a window of {window}"
    title = f"step {view.step}: {mask.queries} queries, {mask.keys} keys, {kind}"
    cell = f"; a cell is {mask.per_cell} tokens" if mask.per_cell > 1 else ""
    yield _text(4, 16, title + cell)
    named = ""
    for line, (row, cells) in enumerate(zip(mask.owners, mask.lines, strict=True)):
        y = TOP + CELL * line
        if row.name != named:
            named = row.name
            yield _text(4, y + CELL, f"[{row.slot}] {row.name}")
        for column, visibility in enumerate(cells):
            colour = "#eeeeee" if visibility == NONE else _colour(row.name)
            opacity = 1.0 if visibility in {ALL, NONE} else 0.6
            yield _rectangle(MARGIN + CELL * column, y, CELL - 1, CELL - 1, colour, "", opacity)
    yield "</svg>"


def _tip(view: StepView, row: RowView) -> str:
    phase = "decode" if row.decode else "prefill"
    span = f"{row.start}..{row.start + row.count - 1}"
    return f"step {view.step}: {row.name} {phase} {span}, {row.units} blocks {row.how}".rstrip()


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
