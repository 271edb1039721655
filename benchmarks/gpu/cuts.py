"""The forms of what finds the cuts of sampled rows, and how long each takes by itself."""

from collections.abc import Callable, Mapping

import torch
from benchmarks.gpu.bounds import least

from fairlead_kernels.gpu import triton_cuts
from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.sample_rows import FindCuts, RowParameters

FORMS: Mapping[str, Callable[[], FindCuts]] = {
    "torch": lambda: sample_rows.cut_of,
    "triton": triton_cuts.load,
}
TOP_P = 0.9


def form(name: str) -> FindCuts:
    """The form of that name. Raises NotAvailableError where it cannot be used here."""
    if name not in FORMS:
        raise ValueError(f"cuts: {name!r} is none of {', '.join(FORMS)}")
    return FORMS[name]()


def milliseconds(name: str, rows: int, vocabulary: int, device: torch.device) -> float:
    """Of the cuts of ``rows`` rows of random scores by top-p, the fastest of three runs."""
    find_cuts = form(name)
    logits = torch.randn(rows, vocabulary, device=device) * 4
    scores = logits - logits.max(dim=-1, keepdim=True).values
    integers = torch.zeros(rows, dtype=torch.int64, device=device)
    parameters = RowParameters(
        temperature=torch.ones(rows, device=device),
        min_cut=torch.full((rows,), -torch.inf, device=device),
        top_k=integers,
        top_p=torch.full((rows,), TOP_P, dtype=torch.float64, device=device),
        keys=integers,
    )
    return least(lambda: find_cuts(scores, parameters), device, 3) * 1e3
