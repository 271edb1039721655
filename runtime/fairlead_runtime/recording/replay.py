"""Replay a recorded run on a new scheduler: every plan must be equal byte for byte.

Owns the comparison. Computes no token: it takes the sampled ones from the recording.
"""

from typing import NamedTuple

from fairlead_runtime.recording.record import (
    Line,
    RecordError,
    Recording,
    canonical,
    encode,
    request_of,
)
from fairlead_runtime.request.sequence import Failure, FailureKind
from fairlead_runtime.scheduling.plan import Result, Work
from fairlead_runtime.scheduling.scheduler import Scheduler


class Difference(NamedTuple):
    """The first plan that differs, recorded and replayed, in canonical JSON."""

    step: int
    recorded: str
    replayed: str


class Replay(NamedTuple):
    steps: int
    difference: Difference | None


def replay(recording: Recording) -> Replay:
    """Feed arrivals, aborts, failures and tokens to a new scheduler and compare its plans with the
    recorded ones.

    Raises RecordError when a line does not fit the run.
    """
    scheduler = Scheduler(recording.limits, recording.groups, recording.identity)
    works: dict[int, Work] = {}  # committed and not updated yet, by step
    steps = 0
    for line in recording.lines():
        try:
            if "plan" in line:
                plan = scheduler.plan()
                recorded, replayed = encode(line["plan"]), canonical(plan)
                if recorded != replayed:
                    return Replay(steps, Difference(plan.step, recorded, replayed))
                works[plan.step] = scheduler.commit(plan)
                steps += 1
            else:
                _apply(scheduler, line, works)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise RecordError(f"{recording.path}: after step {steps}: {error!r}") from error
    return Replay(steps, None)


def _apply(scheduler: Scheduler, line: Line, works: dict[int, Work]) -> None:
    if "add" in line:
        ids = [s.id for s in scheduler.add(request_of(line["add"]))]
        if ids != line["sequences"]:
            raise RecordError(
                f"request {line['add']['id']!r} became sequences {ids}, not {line['sequences']}"
            )
    elif "abort" in line:
        request_id, choice = line["abort"]
        scheduler.abort(request_id, choice)
    elif "fail" in line:
        sequence_id, *failure = line["fail"]
        scheduler.fail(sequence_id, _failure(*failure))
    elif "reset" in line:
        evicted = scheduler.reset_cache()
        if evicted != line["reset"]:
            raise RecordError(f"{evicted} units were evicted, not {line['reset']}")
    elif "launch" in line:
        scheduler.launch(works[line["launch"]])
    elif "recall" in line:
        scheduler.recall()
    elif "update" in line:
        work, left_out = works.pop(line["update"]), set(line.get("left_out", ()))
        work = work.subset(row for row in work.rows if row.sequence.id not in left_out)
        failed = {i: _failure(*failure) for i, *failure in line.get("errors", ())}
        scheduler.update(work, _results(work, line["tokens"], failed))
    else:
        raise RecordError(f"unknown kind of line, with the keys {sorted(line)}")


def _results(work: Work, tokens: list[int], failed: dict[int, Failure]) -> dict[int, Result]:
    rows = [row for row in work.living().rows if row.samples and row.sequence.id not in failed]
    results = {row.sequence.id: Result(token) for row, token in zip(rows, tokens, strict=True)}
    return results | {i: Result(0, failure=failure) for i, failure in failed.items()}


def _failure(message: str, kind: str) -> Failure:
    return Failure(message, FailureKind(kind))
