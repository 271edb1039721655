"""A prompt of at most so many tokens (``truncate_prompt_tokens``), as in vLLM."""

from collections.abc import Sequence
from typing import NamedTuple

from fairlead_runtime.front.errors import invalid

FIELD = "truncate_prompt_tokens"


def not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for as many tokens as fit")
    return value


class Truncation(NamedTuple):
    """``most`` tokens, -1: as many as fit, None: all. ``keeps_end``: of a longer prompt its last
    ones, else its first.
    """

    most: int | None = None
    keeps_end: bool = True

    def of(self, ids: Sequence[int], longest: int, output: int = 0) -> Sequence[int]:
        """The ids to keep. ``longest``: tokens of a request, of which ``output`` are not the
        prompt's. Raises ApiError for more than a request may have.
        """
        if self.most is None:
            return ids
        if self.most > longest:
            raise invalid(FIELD, f"is above the {longest} tokens of this model: lower it")
        most = max(1, longest - output) if self.most < 0 else self.most
        return ids if len(ids) <= most else ids[-most:] if self.keeps_end else ids[:most]


WHOLE = Truncation()
