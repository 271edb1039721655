"""Run one step's work so that a failing row takes no other with it.

Owns the bisection of a batch whose forward pass raised. Touches no scheduler state and does no
bookkeeping: it returns who computed and who cannot. Rerunning a row is safe because keys and values
are written to the same slots with the same values and a draw depends on the request alone, never on
the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fairlead_runtime.scheduling.plan import Result, Row, Work


class Executor(Protocol):
    """What the engine needs of the device."""

    def copy(self, work: Work) -> None:
        """Offload, restore and copy-on-write copies of the step, once and in this order."""
        ...

    def execute(self, work: Work) -> Mapping[int, Result]:
        """The forward pass of ``work.rows``; a Result per sampling row, by sequence id."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """``ran``: the work of the rows that computed; ``failed``: what each other row raised when it
    ran alone.
    """

    ran: Work
    results: Mapping[int, Result]
    failed: tuple[tuple[Row, Exception], ...]


def run_isolated(executor: Executor, work: Work) -> Outcome:
    """Execute ``work``; when that raises, halve it until the rows that fail alone are found.

    A fault that only the whole batch provokes (memory, most often) ends with every half computed
    and nobody failed. k culprits among B rows cost at most 2k·log2(B) + 1 further passes. Copies
    must be done already.
    """
    results: dict[int, Result] = {}
    failed: list[tuple[Row, Exception]] = []
    ran: list[Row] = []
    pending: list[list[Row]] = [work.rows]
    while pending:
        rows = pending.pop()
        part = work if rows is work.rows else work.subset(rows)
        try:
            results.update(executor.execute(part))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the other requests
            if len(rows) == 1:
                failed.append((rows[0], error))
                continue
            middle = len(rows) // 2
            pending += [rows[middle:], rows[:middle]]
        else:
            ran += rows
    return Outcome(work if not failed else work.subset(ran), results, tuple(failed))
