"""How many tokens the rows of a benchmark have, and the blocks that hold them."""

from typing import NamedTuple

STEP = 8192  # tokens of a step, of both sides
WARM = 4  # steps of decodes before those that are measured


def new_tokens(rows: int, context: int, steps: int) -> int:
    """Of a row that starts first: it decodes while the others are prefilled."""
    return steps + 2 * WARM + -(-rows * context // STEP) + 16


class Sizes(NamedTuple):
    """What one engine must hold: any of the ``cases`` of rows and context, and the tokens that
    ``steps`` measured decodes add.
    """

    cases: tuple[tuple[int, int], ...]
    steps: int

    @property
    def rows(self) -> int:
        return max(rows for rows, _ in self.cases)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(context + new_tokens(rows, context, self.steps) for rows, context in self.cases)

    def blocks(self, size: int) -> int:
        """Blocks of ``size`` tokens, with one to spare for each row."""
        return max(
            rows * (-(-(context + new_tokens(rows, context, self.steps)) // size) + 1)
            for rows, context in self.cases
        )
