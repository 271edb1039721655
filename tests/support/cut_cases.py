"""Rows with filters of every kind, and the comparison of what cuts them with ``cut_of``: on a CPU,
where Triton's kernel runs in its interpreter, and on a GPU.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.sampling import sample, sample_rows
from fairlead_kernels.sampling.sample_rows import FindCuts, RowParameters

# Temperature, min_p, top_k and top_p of a row each.
FILTERS = (
    (1.0, 0.0, 0, 1.0),  # nothing is cut
    (1.0, 0.0, 0, 0.9),
    (1.0, 0.0, 7, 1.0),
    (0.7, 0.05, 0, 1.0),
    (1.3, 0.02, 30, 0.95),
    (1.0, 0.5, 0, 0.999),  # the nucleus is one of what min-p keeps
    (1.0, 0.0, 2, 0.999),  # and of what top-k keeps
    (0.3, 0.0, 1, 0.5),
    (2.0, 0.0, 1 << 40, 1.0),  # more than there are
    (1.0, 1.0, 3, 1e-9),
    (1.0, 0.0, 0, 0.0),  # no mass is enough
    (0.0, 0.1, 5, 0.5),  # greedy: its cut is looked at by nobody
)


class CutCase(NamedTuple):
    """``logits`` [R, V] and the parameters of their rows, which are views of a table."""

    logits: Tensor
    rows: RowParameters

    @classmethod
    def make(cls, count: int, vocabulary: int, seed: int = 0, *, tied: bool = False) -> "CutCase":
        """``count`` rows with FILTERS in turns; many scores are equal where they are ``tied``."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(count, vocabulary, generator=generator) * 3
        if tied:
            logits = logits.round()
        logits[:, vocabulary // 2 + 1 :: 3] = -math.inf
        filters = [FILTERS[i % len(FILTERS)] for i in range(count)]
        temperature, min_p, top_k, top_p = zip(*filters, strict=True)
        table = torch.zeros(count, 8, dtype=torch.int64)
        of_32, of_64 = table.view(torch.float32), table.view(torch.float64)
        of_32[:, 0] = torch.tensor(temperature)
        of_32[:, 1] = torch.tensor(min_p, dtype=torch.float64).log()
        table[:, 1] = torch.tensor(top_k)
        of_64[:, 2] = torch.tensor(top_p, dtype=torch.float64)
        keys = torch.randint(-(2**62), 2**62, (count,), generator=generator)
        return cls(logits, RowParameters(of_32[:, 0], of_32[:, 1], table[:, 1], of_64[:, 2], keys))

    def to(self, device: torch.device) -> "CutCase":
        """The same there; the parameters are still views."""
        views = [torch.stack([x] * 3, dim=1).to(device)[:, 1] for x in self.rows]
        rows = RowParameters(*views)._replace(keys=self.rows.keys.to(device))
        return CutCase(self.logits.to(device), rows)

    def check(self, ours: FindCuts) -> None:
        """Compare the cuts of all scores that a draw has, but for the sign of a zero, and what is
        drawn.
        """
        checked = 0

        def compare(scores: Tensor, rows: RowParameters) -> Tensor:
            nonlocal checked
            checked += len(scores)
            got, want = ours(scores, rows), sample_rows.cut_of(scores, rows)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            return got

        hashes = sample.hash_tokens(self.logits.shape[1], self.logits.device)
        want = sample_rows.choose(self.logits, self.rows, hashes)
        got = sample_rows.choose(self.logits, self.rows, hashes, find_cuts=compare)
        assert torch.equal(got, want)
        assert checked == len(self.logits)
