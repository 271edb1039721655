"""The place of each token of a completion in its choice's text.

That text is the prompt as the client sent it, marks that are special tokens included, where the
answer echoes it, and then the output without special tokens.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

MAX_ADDED = 4  # special tokens that a tokenizer may put before a text
GAP = 16  # bytes of a text that may belong to no token, such as blanks that a tokenizer drops


def prompt_offsets(
    text: str, ids: Sequence[int], special: Collection[int], piece: Callable[[int], bytes]
) -> Iterator[int]:
    """Where each token of a prompt begins in its shown ``text``, in characters. ``piece``: the
    bytes of the token at a place. A special token takes room only where the text shows it.
    """
    data, at, offset = text.encode(), 0, 0
    added = _added(data, ids, special, piece)
    for place, token in enumerate(ids):
        begin = end = at
        if place >= added:
            begin, end = _place(data, at, piece(place), special=token in special)
        offset += characters(data[at:begin])
        yield offset
        offset += characters(data[begin:end])
        at = end


def characters(piece: bytes) -> int:
    """How many characters begin within it."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


class OutputOffsets:
    """Where the tokens of one output begin, one after the other. ``first_text``: the text of a
    token that begins a text, for an output that has none before it: some decoders drop its space.
    """

    def __init__(
        self,
        offset: int,
        special: Collection[int],
        first_text: Callable[[int], str] | None = None,
    ) -> None:
        self._offset = offset
        self._special = special
        self._first_text = first_text

    def place(self, token: int, piece: bytes) -> int:
        """The offset of the next token, of these bytes."""
        offset = self._offset
        if token not in self._special:
            self._offset += characters(piece)
            if self._first_text is not None and piece[:1] == b" ":
                self._offset -= not self._first_text(token).startswith(" ")
            self._first_text = None
        return offset


def _added(
    data: bytes, ids: Sequence[int], special: Collection[int], piece: Callable[[int], bytes]
) -> int:
    """How many special tokens at the beginning the tokenizer added to a text that may begin with
    the same ones.
    """
    run = next((place for place, token in enumerate(ids) if token not in special), len(ids))
    marks = [piece(place) for place in range(run)]
    counts = range(min(run, MAX_ADDED) + 1)
    return next((count for count in counts if data.startswith(b"".join(marks[count:]))), 0)


def _place(data: bytes, at: int, piece: bytes, *, special: bool) -> tuple[int, int]:
    """Where a token that follows the byte ``at`` begins and ends."""
    if data.startswith(piece, at):
        return at, at + len(piece)
    if special:
        return at, at
    if piece[:1] == b" " and data.startswith(piece[1:], at):  # the tokenizer put the space there
        return at, at + len(piece) - 1
    begin = max(at, data.find(piece, at, at + GAP + len(piece)))
    return begin, min(begin + len(piece), len(data))
