"""A run as a file: what came in, what was decided, what was sampled, one JSON line each.

{"fairlead_record": 1, "limits": …, "groups": …, "identity": …}     first {"add": request,
"sequences": ids}   {"abort": [id, choice]}   {"fail": [sequence id, message]} {"plan": canonical
plan, "held": units by row, "free": n, "cached": n, "waiting": ids, "t": seconds} {"update": step,
"ran": ids, "tokens": [[sequence id, token]], "errors": [[id, message]], "ended": ids, "t": …}

Owns the format and its two directions. A file that cannot be written any more stops the recording,
never the run.
"""

import dataclasses
import json
import logging
import os
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairlead_runtime.request import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Event, Finished, Limits, Plan, Result, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.groups import LayerGroup

VERSION = 1
log = logging.getLogger(__name__)

Line = dict[str, Any]


class RecordError(ValueError):
    """A file that is no recording, or one that this version cannot read."""


def encode(value: object) -> str:
    """The one JSON spelling of a value: no spaces, keys as given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def canonical(plan: Plan) -> str:
    """A plan as JSON. Equal plans of equal runs give equal bytes."""
    return encode(
        {
            "step": plan.step,
            "rows": [[r.sequence.id, r.start, r.count, int(r.samples)] for r in plan.rows],
            "admitted": [
                [a.sequence.id, a.source.value, a.start, a.sibling.id if a.sibling else None]
                for a in plan.admitted
            ],
            "preempted": [[p.sequence.id, int(p.offload)] for p in plan.preempted],
        }
    )


class RecordedScheduler(Scheduler):
    """A Scheduler that writes down what it is given and what it decides.

    The file is made anew, readable by its owner only: it holds prompts as token ids. ``clock``
    (seconds) times the steps for a picture; replay ignores it. Raises OSError when the file cannot
    be made.
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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # Line buffering: a process that is killed leaves every step but the one it was in.
        self._file: Any = os.fdopen(descriptor, "w", buffering=1, encoding="ascii")
        shape = [{"window": g.window, "layers": list(g.layers)} for g in groups]
        header = {"fairlead_record": VERSION, "limits": dataclasses.asdict(limits), "groups": shape}
        self._write(encode(header | {"identity": identity.hex()}))

    def add(self, request: Request) -> tuple[Sequence, ...]:
        sequences = super().add(request)
        self._write(encode({"add": _request_line(request), "sequences": [s.id for s in sequences]}))
        return sequences

    def abort(self, request_id: str, choice: int | None = None) -> list[Finished]:
        ended = super().abort(request_id, choice)
        if ended:
            self._write(encode({"abort": [request_id, choice]}))
        return ended

    def fail(self, sequence_id: int, message: str) -> list[Finished]:
        ended = super().fail(sequence_id, message)
        if ended:
            self._write(encode({"fail": [sequence_id, message]}))
        return ended

    def commit(self, plan: Plan) -> Work:
        work = super().commit(plan)
        cache = self.state.cache
        state = {
            "held": [cache.units_held(row.sequence) for row in plan.rows],
            "free": len(cache.pool.free),
            "cached": len(cache.pool.cached),
            "waiting": [s.id for s in self.waiting],
        }
        self._write(f'{{"plan":{canonical(plan)},{encode(state | self._time())[1:]}')
        return work

    def update(self, work: Work, results: Mapping[int, Result]) -> list[Event]:
        ran = [row.sequence.id for row in work.rows if row.sequence.tables]
        events = super().update(work, results)
        answers = [(i, results[i]) for i in ran if i in results]
        line: Line = {"update": work.step, "ran": ran}
        line["tokens"] = [[i, r.token] for i, r in answers if r.error is None]
        line["errors"] = [[i, r.error] for i, r in answers if r.error is not None]
        line["ended"] = [
            e.sequence.id for e in events if isinstance(e, Finished) or e.finish is not None
        ]
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
    """A file read back. ``cut`` is known after ``lines`` is exhausted: its last line was not whole."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False
        try:
            with self.path.open(encoding="utf-8") as file:
                header = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise RecordError(f"{path}: cannot be read as a recording ({error})") from error
        version = header.get("fairlead_record") if isinstance(header, dict) else None
        if version != VERSION:
            raise RecordError(
                f"{path}: its first line names format {version}; this program reads {VERSION}"
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
        """Everything after the first line. A last line that breaks off is left out; another one
        raises.
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
                    raise RecordError(f"{self.path}: line {number} is no object")
                yield line


def _request_line(request: Request) -> Line:
    return {
        "id": request.id,
        "prompt": request.prompt,
        "params": dataclasses.asdict(request.params),
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "priority": request.priority,
        "tenant": request.tenant,
        "salt": request.salt.hex(),
        "eos_ids": sorted(request.eos_ids),
    }


def request_of(line: Line) -> Request:
    """The request that ``_request_line`` wrote."""
    fields = dict(line)
    fields["prompt"] = tuple(line["prompt"])
    fields["params"] = SamplingParams(**line["params"])
    fields["salt"] = bytes.fromhex(line["salt"])
    fields["eos_ids"] = frozenset(line["eos_ids"])
    return Request(**fields)
