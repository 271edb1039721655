"""The report behind ``/debug/memory``: each term of the memory plan beside its measured size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_runtime.sizing.solve import MemoryPlan


@dataclass(frozen=True, slots=True)
class TermReport:
    """Sizes in bytes. ``measured`` and ``drift_percent`` (of the planned size) are None for a term
    that was not measured; ``note`` says why.
    """

    name: str
    planned: int
    measured: int | None
    drift_percent: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    memory_plan: MemoryPlan
    terms: tuple[TermReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The body of ``/debug/memory``: sizes in bytes."""
        p = self.memory_plan
        return {
            "totalBytes": p.total,
            "budgetBytes": p.budget,
            "numBlocks": p.num_blocks,
            "blockSize": p.block_size,
            "blockBytes": p.block_bytes,
            "kvBytesPerToken": p.kv_bytes_per_token,
            "weightsBytes": p.weights_bytes,
            "concurrentTokens": p.concurrent_tokens,
            "fullLengthSequences": p.full_length_sequences,
            "maxModelLen": p.max_model_len,
            "fits": p.fits,
            "message": p.message,
            "formula": p.formula,
            "terms": [
                {
                    "name": t.name,
                    "plannedBytes": t.planned,
                    "measuredBytes": t.measured,
                    "driftPercent": t.drift_percent,
                    "note": t.note,
                }
                for t in self.terms
            ],
        }


def memory_report(
    memory_plan: MemoryPlan, measured: Mapping[str, int], notes: Mapping[str, str] | None = None
) -> MemoryReport:
    """Each planned term beside its measured size, in bytes by term name; a measured term that the
    memory plan lacks counts as planned with 0.

    ``notes`` say why a term was not measured.
    """
    planned, notes = memory_plan.terms, notes or {}
    names = [*planned, *(name for name in measured if name not in planned)]
    terms = (
        _term(name, planned.get(name, 0), measured.get(name), notes.get(name, "")) for name in names
    )
    return MemoryReport(memory_plan, tuple(terms))


def _term(name: str, planned: int, measured: int | None, note: str) -> TermReport:
    if measured is None:
        return TermReport(name, planned, None, None, note or "not measured")
    drift = 0.0 if measured == planned else None
    if planned:
        drift = round(100 * (measured - planned) / planned, 1)
    return TermReport(name, planned, measured, drift)
