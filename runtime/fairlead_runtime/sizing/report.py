"""The report behind ``/debug/memory``: each term of the memory plan beside its measured size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairlead_runtime.settings.engine_config import flag_of
from fairlead_runtime.sizing.solve import MemoryPlan


@dataclass(frozen=True, slots=True)
class TermReport:
    """Sizes in bytes. ``measured`` and ``drift_percent`` (of the planned size) are None for a term
    that was not measured; ``note`` says why, or what is to be said of a measured one.
    """

    name: str
    planned: int
    measured: int | None
    drift_percent: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``host_terms``: of the pod's host memory beside accelerators; on a CPU those are among
    ``terms``.
    """

    memory_plan: MemoryPlan
    terms: tuple[TermReport, ...]
    host_terms: tuple[TermReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The body of ``/debug/memory``: sizes in bytes."""
        p = self.memory_plan
        held = p.state_bytes_per_sequence
        return {
            "totalBytes": p.total,
            "budgetBytes": p.budget,
            "numBlocks": p.num_blocks,
            "blockSize": p.block_size,
            "blockBytes": p.block_bytes,
            "kvBytesPerToken": p.kv_bytes_per_token,
            **({"stateBytesPerSequence": held} if held else {}),
            "weightsBytes": p.weights_bytes,
            "concurrentTokens": p.concurrent_tokens,
            "fullLengthSequences": p.full_length_sequences,
            "maxModelLen": p.max_model_len,
            "fits": p.fits,
            "message": p.message,
            "formula": p.formula,
            "bounds": {
                name: {"most": bound.most, "reason": bound.text(flag_of)}
                for name, bound in p.traffic.bounds().items()
            },
            "terms": [_body(term) for term in self.terms],
            "hostTerms": [_body(term) for term in self.host_terms],
        }


def _body(term: TermReport) -> dict[str, Any]:
    return {
        "name": term.name,
        "plannedBytes": term.planned,
        "measuredBytes": term.measured,
        "driftPercent": term.drift_percent,
        "note": term.note,
    }


def memory_report(
    memory_plan: MemoryPlan,
    measured: Mapping[str, int],
    notes: Mapping[str, str] | None = None,
    pinned: tuple[int, str] | None = None,
    remarks: Mapping[str, str] | None = None,
) -> MemoryReport:
    """Each planned term beside its measured size, in bytes by term name; a measured term that the
    memory plan lacks counts as planned with 0.

    ``notes`` say why a term was not measured, ``remarks`` what is to be said of one that was.
    ``pinned``: beside accelerators, the bytes of host memory for offloading that are there in all
    ranks, and what is to be said of them.
    """
    planned, notes, remarks = memory_plan.terms, notes or {}, remarks or {}
    names = [*planned, *(name for name in measured if name not in planned)]
    terms = (
        _term(name, planned.get(name, 0), measured.get(name), notes.get(name, "")) for name in names
    )
    terms = (replace(term, note=remarks.get(term.name, term.note)) for term in terms)
    host: list[TermReport] = []
    if pinned is not None:
        size, note = pinned
        host = [
            replace(_term(name, planned, size, ""), note=note)
            if name == "offload"
            else _term(name, planned, None, notes.get(name, ""))
            for name, planned in memory_plan.host.items()
        ]
    return MemoryReport(memory_plan, tuple(terms), tuple(host))


def _term(name: str, planned: int, measured: int | None, note: str) -> TermReport:
    if measured is None:
        return TermReport(name, planned, None, None, note or "not measured")
    drift = 0.0 if measured == planned else None
    if planned:
        drift = round(100 * (measured - planned) / planned, 1)
    return TermReport(name, planned, measured, drift)
