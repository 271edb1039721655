"""Show a recording step by step, as text or as trace events for Perfetto and chrome://tracing.

Owns the two renderings, and what a line leaves to the lines before it: who waits, and which units a
row holds. Only reads the file and never runs a scheduler, so it also shows runs of other versions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairlead_runtime.recording.record import Line, RecordError, Recording
from fairlead_runtime.recording.words import Words
from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.groups import pool_units

STEP_SECONDS = 1e-3  # length of a step when the recording has no times
PROCESS = 1
LONGEST_NAME = 16  # characters of a request id; longer ids are replaced by a number


@dataclass(slots=True)
class _TracedSequence:
    """One live sequence of the recording."""

    name: str
    prompt: int
    limit: int
    tokens: int
    ids: list[int]  # prompt and generated
    place: tuple[int, int]  # in the queue
    slot: int | None = None  # while it runs: the lowest slot that was free at its start
    waits: bool = True
    computed: int = 0


class RowView(NamedTuple):
    name: str
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # as in plan.Row
    tokens: int  # prompt and generated, before the step
    limit: int
    units: int
    decode: bool
    how: str  # how it started: "starts", "prefix 8", "fork of r1/0", "restored"; else ""
    ids: Sequence[int] = ()  # of the whole sequence, also what it generates later
    samples: bool = False

    @property
    def cached_ids(self) -> Sequence[int]:
        return self.ids[: self.start]

    @property
    def new_ids(self) -> Sequence[int]:
        return self.ids[self.start : self.start + self.count]

    @property
    def sampled_ids(self) -> Sequence[int]:
        """The token that the step samples, where it samples one and the recording has it."""
        end = self.start + self.count
        return self.ids[end : end + 1] if self.samples else ()


@dataclass(slots=True)
class StepView:
    """One step of the recording. Times are in seconds."""

    step: int
    rows: list[RowView]
    preempted: list[tuple[str, int, bool]]  # name, slot, to host memory
    waiting: list[str]  # in order of arrival; only `priority` puts lower numbers first
    free: int
    cached: int
    # requests that arrived or ended since the previous step
    notes: list[str] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    errors: list[str] = field(default_factory=list)
    ended: list[tuple[str, Sequence[int]]] = field(default_factory=list)  # name, generated ids


def steps(recording: Recording, first: int = 0) -> Iterator[StepView]:
    """The steps of the recording from number ``first`` on. Raises RecordError when a line does not
    fit the run.
    """
    return (view for view in _all_steps(recording) if view.step >= first)


def _all_steps(recording: Recording) -> Iterator[StepView]:
    reader = _TraceReader(recording)
    try:
        for line in recording.lines():
            view = reader.take(line)
            if view is not None:
                yield view
        yield from reader.views.values()  # the recording ends within them
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError(f"{recording.path}: after step {reader.step}: {error!r}") from error


class _TraceReader:
    def __init__(self, recording: Recording) -> None:
        self.limits, self.groups = recording.limits, recording.groups
        self.sequences: dict[int, _TracedSequence] = {}
        self.slots: list[int | None] = []  # sequence id by slot
        self.notes: list[str] = []
        self.short_names: dict[str, str] = {}  # by long request id
        self.views: dict[int, StepView] = {}  # committed steps before their updates
        self.planned: dict[int, list[list[int]]] = {}  # the rows of these
        self.launched: set[int] = set()  # those of them that the device has
        self.leaving: list[int] = []  # whose last token the newest step samples
        self.step = 0
        self.ended = 0.0  # when the last step ended

    def take(self, line: Line) -> StepView | None:
        """Read one line. Returns the step that it completes, if any."""
        if "add" in line:
            self._add(line)
        elif "abort" in line:
            full, choice = line["abort"]
            name = self.short_names.get(full, full)
            label = f"{name}/{choice}"  # of one of several choices
            labels = {sequence.name for sequence in self.sequences.values()}
            self._remove(label if label in labels else name, "aborted")
        elif "fail" in line:
            self._remove(self.sequences[line["fail"][0]].name, f"failed: {line['fail'][1]}")
        elif "plan" in line:
            lost = [step for step in self.views if step not in self.launched]
            unfinished = self.views.pop(lost[0]) if lost else None
            view = self._plan(line)
            self.planned[view.step] = line["plan"]["rows"]
            self.views[view.step] = view
            return unfinished  # a step without an update
        elif "launch" in line:
            self.launched.add(line["launch"])
        elif "update" in line and line["update"] in self.views:
            self.launched.discard(line["update"])
            return self._update(line, self.views.pop(line["update"]))
        return None

    def _add(self, line: Line) -> None:
        request = line["add"]
        ids, n = request["prompt"], request["params"]["n"]
        prompt = len(ids)
        name = full = str(request["id"])
        if len(full) > LONGEST_NAME:
            name = f"#{len(self.short_names)}"
            self.short_names[full] = name
        urgent = self.limits.policy == "priority"
        for choice, i in enumerate(line["sequences"]):
            label = name if n == 1 else f"{name}/{choice}"
            place = (request["priority"] if urgent else 0, i)
            self.sequences[i] = _TracedSequence(
                label, prompt, prompt + request["max_tokens"], prompt, list(ids), place
            )
        full_name = f" = {full}" if name != full else ""
        self.notes.append(
            f"+ {name}{full_name}: prompt {prompt}, max_tokens {request['max_tokens']}, n {n}"
        )

    def _remove(self, name: str, reason: str) -> None:
        self.notes.append(f"- {name}: {reason}")
        for i, sequence in list(self.sequences.items()):
            if sequence.name == name or sequence.name.startswith(name + "/"):
                self._free_slot(i)
                del self.sequences[i]

    def _plan(self, line: Line) -> StepView:
        plan = line["plan"]
        self.step = plan["step"]
        preempted = []
        for i, offload in plan["preempted"]:
            self.sequences[i].waits = True
            preempted.append((self.sequences[i].name, self._free_slot(i), bool(offload)))
        for i in self.leaving:  # who starts may take their places
            if i in self.sequences:
                self._free_slot(i)
        how: dict[int, str] = {}
        for i, source, start, sibling in plan["admitted"]:
            self._take_slot(i)
            self.sequences[i].waits, self.sequences[i].computed = False, start
            fork = f"fork of {self.sequences[sibling].name}" if source == "fork" else ""
            how[i] = fork or (
                "restored" if source == "restore" else f"prefix {start}" if start else "starts"
            )
        rows = [self._row(row, how.get(row[0], "")) for row in plan["rows"]]
        waiting = sorted((s for s in self.sequences.values() if s.waits), key=lambda s: s.place)
        names = [sequence.name for sequence in waiting]
        view = StepView(self.step, rows, preempted, names, line["free"], line["cached"], self.notes)
        self.leaving = [
            i
            for i, start, count, samples in plan["rows"]
            if samples and start + count + 1 >= self.sequences[i].limit
        ]
        view.begin = line.get("t", self.step * STEP_SECONDS)
        view.end = view.begin + STEP_SECONDS
        self.notes = []
        return view

    def _row(self, planned: list[int], how: str) -> RowView:
        i, start, count, samples = planned
        sequence = self.sequences[i]
        decode = count == 1 and start >= sequence.prompt
        size = self.limits.block_size
        first_blocks = (group.first_block(sequence.computed, size) for group in self.groups)
        units = sum(ceil_div(start + count, size) - first for first in first_blocks)
        slot = -1 if sequence.slot is None else sequence.slot
        return RowView(
            sequence.name,
            slot,
            start,
            count,
            sequence.tokens,
            sequence.limit,
            units,
            decode,
            how,
            sequence.ids,
            bool(samples),
        )

    def _update(self, line: Line, view: StepView) -> StepView:
        view.end = line.get("t", view.end)
        # The device computes one step after another.
        view.begin = max(view.begin, min(self.ended, view.end))
        self.ended = view.end
        failed = {i: message for i, message, _ in line.get("errors", ())}
        for i, message in failed.items():
            view.errors.append(f"{self.sequences[i].name}: {message}")
        ids = self.sequences.keys() - failed.keys() - {*line.get("left_out", ())}
        rows = [row for row in self.planned.pop(view.step) if row[0] in ids]
        for i, start, count, _ in rows:
            self.sequences[i].computed = start + count
        sampled = [self.sequences[i] for i, _, _, samples in rows if samples]
        for sequence, token in zip(sampled, line["tokens"], strict=True):
            sequence.tokens += 1
            sequence.ids.append(token)
        for i in line.get("ended", ()):
            self._free_slot(i)
            sequence = self.sequences.pop(i)
            view.ended.append((sequence.name, sequence.ids[sequence.prompt :]))
        return view

    def _take_slot(self, i: int) -> None:
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        self.slots[slot : slot + 1] = [i]
        self.sequences[i].slot = slot

    def _free_slot(self, i: int) -> int:
        slot = self.sequences[i].slot
        if slot is None:
            return -1
        self.slots[slot] = self.sequences[i].slot = None
        return slot


# -- text


LEGEND = (
    "a row: [slot] request |= computed before, # in this step, . to come|; packed: each token as "
    "the last digit of its slot"
)


def as_text(recording: Recording, words: Words | None = None, first: int = 0) -> Iterator[str]:
    """Lines to print: the limits, then each step from ``first`` on with its rows and, with
    ``words``, what they say.
    """
    limits, groups = recording.limits, recording.groups
    units = pool_units(limits.num_blocks, len(groups))
    names = ["full" if g.window is None else f"window {g.window}" for g in groups]
    kinds = ", ".join([*names, f"{limits.state_units} a state"] if limits.state_units else names)
    bound = limits.prefill_beside_decodes
    bound_text = f" ({bound} of prompts while answers run)" if bound else ""
    yield (
        f"{limits.policy}: {limits.max_batch_tokens} tokens{bound_text} and "
        f"{limits.max_requests} requests a step; "
        f"{units} blocks of {limits.block_size} tokens ({kinds}), margin {limits.safety_margin:.0%}"
    )
    yield LEGEND
    for view in steps(recording, first):
        yield from view.notes
        tokens = sum(row.count for row in view.rows)
        decodes = sum(row.decode for row in view.rows)
        yield (
            f"step {view.step}: {tokens} tokens = {decodes} decode + {tokens - decodes} prefill, "
            f"beside {sum(row.start for row in view.rows)} cached keys | "
            f"blocks {units - view.free - view.cached} held, {view.cached} cached, "
            f"{view.free} free | "
            f"waiting {len(view.waiting)}{_names(view.waiting)}"
        )
        for name, _, offload in view.preempted:
            how = "moved to host memory" if offload else "to be recomputed"
            yield f"  ! {name} preempted, {how}"
        yield f"  packed {_packed(view.rows)}"
        width = max((len(row.name) for row in view.rows), default=0)
        for row in view.rows:
            yield _row_text(row, width)
            if words is not None:
                yield f"      {words.words(row.new_ids)} -> {words.words(row.sampled_ids)}".rstrip()
        for error in view.errors:
            yield f"  x {error}"
        for name, ids in view.ended:
            text = "" if words is None else f": {words.text(ids)}"
            yield f"  = {name} ends with {len(ids)} tokens{text}"


def _row_text(row: RowView, width: int) -> str:
    end = row.start + row.count
    phase = (
        f"decode  {row.start}" if row.decode else f"prefill {row.start}..{end - 1} of {row.tokens}"
    )
    scale = 24 / row.limit
    done, now = round(row.start * scale), max(round(end * scale), round(row.start * scale) + 1)
    bar = ("=" * done + "#" * (now - done))[:24].ljust(24, ".")
    text = (
        f"  [{row.slot}] {row.name:<{width}} |{bar}| {phase:<22} {row.units:>4} blocks  {row.how}"
    )
    return text.rstrip()


def _packed(rows: list[RowView], width: int = 80) -> str:
    """The step's packed tokens, each as the last digit of its slot; "|" separates sequences, and a
    token attends only within its own.
    """
    strip = "|".join(str(row.slot % 10) * min(row.count, width) for row in rows)
    return strip if len(strip) <= width else strip[: width - 3] + "..."


def _names(names: list[str]) -> str:
    text = " ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    return f" ({text})" if names else ""


# -- trace events


def as_events(
    recording: Recording, words: Words | None = None, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Events in Trace Event Format, for the list ``traceEvents``, of the steps from ``first`` on:
    one track per slot, counters for requests and blocks; with ``words`` what each row computes and
    samples.
    """
    units = pool_units(recording.limits.num_blocks, len(recording.groups))
    yield _meta("process_name", 0, f"fairlead ({recording.limits.policy})")
    named: set[int] = set()
    zero: float | None = None
    for view in steps(recording, first):
        zero = view.begin if zero is None else zero
        at, length = (view.begin - zero) * 1e6, max((view.end - view.begin) * 1e6, 1.0)
        for slot in [row.slot for row in view.rows] + [slot for _, slot, _ in view.preempted]:
            if slot not in named:
                named.add(slot)
                yield _meta("thread_name", slot, f"slot {slot}")
        for row in view.rows:
            phase = "decode" if row.decode else f"prefill {row.start}..{row.start + row.count - 1}"
            args = {
                "step": view.step,
                "start": row.start,
                "count": row.count,
                "blocks": row.units,
                "how": row.how,
            }
            if words is not None:
                args |= {"tokens": words.words(row.new_ids)}
                args |= {"sampled": words.words(row.sampled_ids)}
            yield _event("X", f"{row.name} {phase}", row.slot, at, dur=length, args=args, cat="row")
        for name, slot, offload in view.preempted:
            args = {"step": view.step, "offload": offload}
            yield _event("i", f"{name} preempted", slot, at, s="t", args=args, cat="preemption")
        queue = {"running": len(view.rows), "waiting": len(view.waiting)}
        blocks = {"held": units - view.free - view.cached, "cached": view.cached, "free": view.free}
        yield _event("C", "requests", 0, at, args=queue)
        yield _event("C", "blocks", 0, at, args=blocks)


def _event(phase: str, name: str, slot: int, at: float, **more: object) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": slot, "ts": round(at, 3), **more}


def _meta(name: str, slot: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": slot, "args": {"name": value}}
