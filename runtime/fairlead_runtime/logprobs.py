"""Log-probabilities on their way from the sampler to a client.

Owns the light form that travels with a token through the engine and its conversion to vLLM's shape at the edge. Holds plain
Python numbers only: no tensor, no tokenizer.
"""

from collections.abc import Callable
from typing import NamedTuple

from fairlead_runtime.outputs import Logprob


class TokenLogprobs(NamedTuple):
    """What one generated token carries when its request asked for log-probabilities.

    ``top_ids`` and ``top_logprobs`` are the k likeliest, best first (empty for k = 0).
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def as_dict(self, decode: Callable[[int], str] | None = None) -> dict[int, Logprob]:
        """``{token id: Logprob}``, the chosen token first, then the k likeliest: k or k + 1 entries."""

        def text(token: int) -> str | None:
            return decode(token) if decode else None

        entries = {self.token: Logprob(self.logprob, self.rank, text(self.token))}
        for place, (token, logprob) in enumerate(zip(self.top_ids, self.top_logprobs, strict=True), start=1):
            if token != self.token:
                entries[token] = Logprob(logprob, place, text(token))
        return entries
