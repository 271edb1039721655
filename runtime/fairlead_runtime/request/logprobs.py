"""Log-probabilities as clients see them, in vLLM's types.

Owns the compact form that the engine attaches to a token, and its conversion for clients. Holds
plain Python numbers only: no tensor, no tokenizer.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Logprob(NamedTuple):
    """A token's log-probability under the raw logits, its rank (1: the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Of each token of a prompt, by token id; the first token has none.
PromptLogprobs = tuple[Mapping[int, Logprob] | None, ...]


class TokenLogprobs(NamedTuple):
    """The log-probabilities of one generated token, if its request asked for them.

    ``top_ids`` and ``top_logprobs`` are the k likeliest, best first (empty for k = 0).
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def as_dict(self, decode: Callable[[int], str] | None = None) -> dict[int, Logprob]:
        """``{token id: Logprob}``: the chosen token, then the k likeliest (k or k + 1 entries)."""

        def text(token: int) -> str | None:
            return decode(token) if decode else None

        entries = {self.token: Logprob(self.logprob, self.rank, text(self.token))}
        for place, (token, logprob) in enumerate(
            zip(self.top_ids, self.top_logprobs, strict=True), start=1
        ):
            if token != self.token:
                entries[token] = Logprob(logprob, place, text(token))
        return entries
