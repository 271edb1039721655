"""What the token ids of a recording say, by the tokenizer of its model.

Owns how a token looks in a line of text. Reads no file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_WORDS = 16  # of one row; in the middle of a longer one stands "..."
WIDEST = 14  # characters of one token


@dataclass(frozen=True, slots=True)
class Words:
    """``decode``: the tokenizer's own rule, from ids to text."""

    decode: Callable[[Sequence[int]], str]

    def word(self, token: int) -> str:
        """One token in quotes, without a line break or a character that cannot be printed."""
        text = repr(self.decode([token]))
        return text if len(text) <= WIDEST else f"{text[: WIDEST - 2]}…{text[-1]}"

    def words(self, ids: Sequence[int]) -> str:
        """The tokens one by one."""
        if len(ids) <= MOST_WORDS:
            return " ".join(map(self.word, ids))
        half = MOST_WORDS // 2
        return f"{self.words(ids[:half])} ... {self.words(ids[-half:])}"

    def text(self, ids: Sequence[int]) -> str:
        """All tokens as one text in quotes."""
        return repr(self.decode(ids))
