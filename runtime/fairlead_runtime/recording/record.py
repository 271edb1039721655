"""The file of a run: requests, plans and sampled tokens, one JSON object per line.

    {"fairlead_record": 2, "limits": …, "groups": …, "identity": …}     the first line
    {"add": request, "sequences": ids}
    {"abort": [request id, choice]}
    {"fail": [sequence id, message, kind]}
    {"reset": units}                     the cached units without a reference were evicted
    {"plan": canonical plan, "free": n, "cached": n, "t": seconds}
    {"launch": step}                     the device has it; its update may come after the next plan
    {"recall": step}                     what was launched before this step is computed again
    {"update": step, "tokens": tokens, "left_out": ids, "errors": [[id, message, kind]],
     "ended": ids, "t": seconds}

``tokens`` are those of the plan's rows that sample, in order, without the rows that were left out,
failed, or were of sequences that had ended. The three lists behind them are absent where empty. Who
waits and which units a row holds follow from the lines before: a step writes what it changes, not
the queue. So does the order of those that wait, but not under ``fair``, whose turns are in no line.

Owns the format, its writer and its reader. A write error stops the recording, never the run.
"""

import dataclasses
import json
import logging
import os
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairlead_runtime.request.sequence import Failure, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import (
    Event,
    Finished,
    Limits,
    Plan,
    Result,
    Row,
    Token,
    Work,
)
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.groups import LayerGroup

VERSION = 2
log = logging.getLogger(__name__)

Line = dict[str, Any]


class RecordError(ValueError):
    """The file is not a recording, or this version cannot read it."""


def encode(value: object) -> str:
    """The canonical JSON of a value: no spaces, keys in the given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def canonical(plan: Plan) -> str:
    """The canonical JSON of a plan. Equal plans of equal runs give equal bytes."""
    # As texts the rows, of which a step has many, take half the time.
    rows = ",".join(
        [f"[{s.id},{start},{count},{samples:d}]" for s, start, count, samples in plan.rows]
    )
    changes = encode(
        {
            "admitted": [
                [a.sequence.id, a.source.value, a.start, a.sibling.id if a.sibling else None]
                for a in plan.admitted
            ],
            "preempted": [[p.sequence.id, int(p.offload)] for p in plan.preempted],
        }
    )
    return f'{{"step":{plan.step},"rows":[{rows}],{changes[1:]}'


class RecordedScheduler(Scheduler):
    """A Scheduler that records its requests, plans and results.

    An existing file is overwritten. Only its owner can read the file: it holds prompts as token
    ids. ``clock`` (seconds) times the steps for the trace; replay ignores it. Raises OSError when
    the file cannot be created.
    """

    def __init__(
        self,
        limits: Limits,
        groups: abc.Sequence[LayerGroup],
        identity: bytes = b"",
        *,
        path: str | Path,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(limits, groups, identity)
        self._clock = clock
        self._planned: dict[int, tuple[Row, ...]] = {}  # of the steps without an update
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # Line buffering: the file of a killed process has every step except the one it was in.
        self._file: Any = os.fdopen(descriptor, "w", buffering=1, encoding="ascii")
        shape = [{"window": g.window, "layers": list(g.layers)} for g in groups]
        header = {"fairlead_record": VERSION, "limits": dataclasses.asdict(limits), "groups": shape}
        self._write(encode(header | {"identity": identity.hex()}))

    def add(self, request: Request, hashes: bytearray | None = None) -> tuple[Sequence, ...]:
        sequences = super().add(request, hashes)
        self._write(encode({"add": _request_line(request), "sequences": [s.id for s in sequences]}))
        return sequences

    def abort(self, request_id: str, choice: int | None = None) -> list[Finished]:
        ended = super().abort(request_id, choice)
        if ended:
            self._write(encode({"abort": [request_id, choice]}))
        return ended

    def fail(self, sequence_id: int, failure: Failure) -> list[Finished]:
        ended = super().fail(sequence_id, failure)
        if ended:
            self._write(encode({"fail": [sequence_id, *failure]}))
        return ended

    def reset_cache(self) -> int:
        evicted = super().reset_cache()
        self._write(encode({"reset": evicted}))
        return evicted

    def commit(self, plan: Plan) -> Work:
        work = super().commit(plan)
        self._planned[plan.step] = plan.rows
        pool = self.state.cache.pool
        state = {"free": len(pool.free), "cached": len(pool.cached)}
        self._write(f'{{"plan":{canonical(plan)},{encode(state | self._time())[1:]}')
        return work

    def launch(self, work: Work) -> None:
        super().launch(work)
        self._write(encode({"launch": work.step}))

    def recall(self) -> None:
        super().recall()
        self._write(encode({"recall": self.state.step}))

    def update(self, work: Work, results: Mapping[int, Result]) -> list[Event]:
        ran = [row.sequence.id for row in work.rows if row.sequence.holds_units]
        events = super().update(work, results)
        planned = self._planned.pop(work.step, ())
        changes = {
            "left_out": []
            if len(ran) == len(planned)
            else sorted({row.sequence.id for row in planned} - {*ran}),
            "errors": [
                [e.sequence.id, *e.failure] for e in events if isinstance(e, Finished) and e.failure
            ],
            "ended": [
                e.sequence.id for e in events if isinstance(e, Finished) or e.finish is not None
            ],
        }
        line: Line = {"update": work.step, "tokens": [e.token for e in events if type(e) is Token]}
        line |= {name: ids for name, ids in changes.items() if ids}
        self._write(encode(line | self._time()))
        return events

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _time(self) -> Line:
        return {} if self._clock is None else {"t": round(self._clock(), 6)}

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:
            log.warning("recording stopped: %s", error)
            self._file = None


class Recording:
    """A recording on disk. After ``lines`` ends, ``truncated`` says if its last line is cut."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False
        try:
            with self.path.open(encoding="utf-8") as file:
                header = json.loads(file.readline())
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            made = "is no recording, which `fairlead serve --record FILE` writes"
            raise RecordError(f"{path}: {made}") from error
        version = header.get("fairlead_record") if isinstance(header, dict) else None
        if version != VERSION:
            raise RecordError(
                f"{path}: its first line has format {version}; this version reads format "
                f"{VERSION}: read it with the version of Fairlead that wrote it"
            )
        try:
            self.limits = Limits(**header["limits"])
            self.groups = tuple(
                LayerGroup(i, g["window"], tuple(g["layers"]))
                for i, g in enumerate(header["groups"])
            )
            self.identity = bytes.fromhex(header["identity"])
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: its first line is damaged ({error!r})") from error

    def lines(self) -> Iterator[Line]:
        """All lines after the first. A last line without its end is left out; any other damaged
        line raises RecordError.
        """
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.readline()
            for number, text in enumerate(file, start=2):
                if not text.endswith("\n"):
                    self.truncated = True
                    return
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise RecordError(f"{self.path}: line {number} is damaged ({error})") from error
                if not isinstance(line, dict):
                    raise RecordError(f"{self.path}: line {number} is not a JSON object")
                yield line


def _request_line(request: Request) -> Line:
    return {
        "id": request.id,
        "prompt": list(request.prompt),
        "params": dataclasses.asdict(request.params),
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "priority": request.priority,
        "tenant": request.tenant,
        "salt": request.salt.hex(),
        "eos_ids": sorted(request.eos_ids),
    }


def request_of(line: Line) -> Request:
    """The request of a line that ``_request_line`` wrote."""
    fields = dict(line)
    fields["params"] = SamplingParams(**line["params"])
    fields["salt"] = bytes.fromhex(line["salt"])
    fields["eos_ids"] = frozenset(line["eos_ids"])
    return Request(**fields)
