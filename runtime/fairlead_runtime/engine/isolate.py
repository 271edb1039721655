"""Run one step's work so that a failing row does not fail the others.

Owns the bisection of a batch whose forward pass raised. Touches no scheduler state: it returns
which rows ran and which failed. Running a row again is safe because it writes the same keys and
values to the same slots, and its random draws depend on the request alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fairlead_runtime.scheduling.plan import DeviceLostError, Result, Row, Work


class Executor(Protocol):
    """The operations of a device that the engine needs."""

    def copy(self, work: Work) -> None:
        """Offload, restore and copy-on-write copies of the step, once and in this order. Raises
        DeviceLostError, as ``execute`` does, when the device has ended.
        """
        ...

    def execute(self, work: Work) -> Mapping[int, Result]:
        """The forward pass of ``work.rows``; a Result per sampling row, by sequence id."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """``ran``: the work of the rows that succeeded. ``failed``: the other rows, each with what it
    raised alone.
    """

    ran: Work
    results: Mapping[int, Result]
    failed: tuple[tuple[Row, Exception], ...]


def run_isolated(executor: Executor, work: Work) -> Outcome:
    """Execute ``work``. When that raises, halve it until only single rows fail.

    If only the whole batch fails (most often for lack of memory), every half succeeds and no row
    fails. k failing rows of B cost at most 2k·log2(B) + 1 further passes. The step's copies must be
    done already. Raises DeviceLostError, after which nothing can run.
    """
    results: dict[int, Result] = {}
    failed: list[tuple[Row, Exception]] = []
    ran: list[Row] = []
    pending: list[list[Row]] = [work.rows]
    while pending:
        rows = pending.pop()
        subset = work if rows is work.rows else work.subset(rows)
        try:
            results.update(executor.execute(subset))
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - no error may end the other requests
            if len(rows) == 1:
                failed.append((rows[0], error))
                continue
            middle = len(rows) // 2
            pending += [rows[middle:], rows[:middle]]
        else:
            ran += rows
    return Outcome(work if not failed else work.subset(ran), results, tuple(failed))
