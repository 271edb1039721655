"""Cuts in one Triton kernel, in its interpreter: they are those of the dense form, bit for bit."""

import importlib
import importlib.util
import math
from typing import Any

import pytest
import torch

from fairlead_kernels.gpu import triton_cuts
from fairlead_kernels.gpu.triton_cuts import TritonCuts
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.sampling import sample, sample_rows
from fairlead_kernels.sampling.sample_rows import NOT_FINITE, RowParameters
from support.cut_cases import FILTERS, CutCase
from support.full import LONG_FORM

# The interpreter computes what is masked too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def interpreted(block: int) -> TritonCuts:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA build alone")
    kernels: Any = importlib.import_module("fairlead_kernels.gpu.triton_cut_kernels")
    return TritonCuts(kernels, block)


@pytest.mark.parametrize(
    ("vocabulary", "block", "tied"),
    [
        (1, 16, False),
        (90, 64, False),  # the last block is partial
        (64, 64, True),
        *([(150, 64, True), (1000, 128, False), (3000, 4096, True)] if LONG_FORM else []),
    ],
)
def test_cuts_and_draws_are_those_of_the_dense_form(
    vocabulary: int, block: int, *, tied: bool
) -> None:
    CutCase.make(len(FILTERS), vocabulary, seed=vocabulary, tied=tied).check(interpreted(block))


def rows_of(min_p: float, top_k: int, top_p: float) -> RowParameters:
    """Of one row."""
    return RowParameters(
        torch.ones(1),
        torch.tensor([min_p]).log(),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (rows_of(0.0, 0, 1.0), -math.inf),
        (rows_of(0.0, 2, 1.0), -1.0),
        (rows_of(0.0, 4, 1.0), -2.0),
        (rows_of(0.0, 6, 1.0), -math.inf),
        (rows_of(0.0, 0, 0.6), -1.0),  # of 1 + 2 / e + 2 / e² the first has half
        (rows_of(0.0, 0, 0.49), 0.0),
        (rows_of(0.3, 0, 0.999), -1.0),
        (rows_of(0.3, 5, 1.0), math.log(0.3)),
    ],
)
def test_the_cut_of_a_known_row(rows: RowParameters, cut: float) -> None:
    scores = torch.tensor([[-2.0, -1.0, 0.0, -math.inf, -2.0, -1.0]])
    assert interpreted(16)(scores, rows).tolist() == pytest.approx([cut])


def test_a_row_that_is_not_finite_gets_no_token_and_changes_no_other() -> None:
    ours, (logits, rows) = interpreted(32), CutCase.make(3, 30)
    hashes = sample.hash_tokens(30, logits.device)
    want = sample_rows.choose(logits, rows, hashes)
    logits[1, 7] = math.nan
    got = sample_rows.choose(logits, rows, hashes, find_cuts=ours)
    assert got.tolist() == [int(want[0]), NOT_FINITE, int(want[2])]


def test_what_the_kernel_cannot_read_is_refused_by_name() -> None:
    ours, (logits, rows) = TritonCuts(None), CutCase.make(3, 30)  # nothing is launched
    with pytest.raises(ValueError, match=r"^scores: .* in torch.float64, not .* torch.float32"):
        ours(logits.double(), rows)
    with pytest.raises(ValueError, match=r"^top_k: \(2,\) in torch.int64, not \(3,\)"):
        ours(logits, rows._replace(top_k=rows.top_k[:2]))
    with pytest.raises(ValueError, match=r"^top_p: .* in torch.float32, not .* torch.float64"):
        ours(logits, rows._replace(top_p=rows.top_p.float()))
    none = RowParameters(*(column[:0] for column in rows))
    assert ours(logits[:0], none).shape == (0,)


def test_without_triton_there_is_an_error_for_who_asks_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NotAvailableError, match="Triton is not installed"):
        triton_cuts.load()
