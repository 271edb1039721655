"""The report behind ``/debug/memory``: each term of the memory plan beside its measured size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_runtime.sizing.solve import MemoryPlan


@dataclass(frozen=True, slots=True)
class TermReport:
    """``measured`` and ``drift_percent`` (of the planned size) are None for a term nobody measured;
    ``note`` says why.
    """

    name: str
    planned: int
    measured: int | None
    drift_percent: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    plan: MemoryPlan
    terms: tuple[TermReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The body of ``/debug/memory``: sizes in bytes."""
        p = self.plan
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
    plan: MemoryPlan, facts: Mapping[str, int], notes: Mapping[str, str] | None = None
) -> MemoryReport:
    """The plan's terms beside the sizes measured, in bytes by term name; a name the plan lacks is
    added with 0.

    ``notes`` say why a term was not measured.
    """
    names = [*plan.terms, *(name for name in facts if name not in plan.terms)]
    told = notes or {}
    terms = (
        _term(name, plan.terms.get(name, 0), facts.get(name), told.get(name, "")) for name in names
    )
    return MemoryReport(plan, tuple(terms))


def _term(name: str, planned: int, found: int | None, note: str) -> TermReport:
    if found is None:
        return TermReport(name, planned, None, None, note or "not measured")
    drift = (
        round(100 * (found - planned) / planned, 1) if planned else (0.0 if found == 0 else None)
    )
    return TermReport(name, planned, found, drift)
