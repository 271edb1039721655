"""Separates the reasoning of models that write ``<think>…</think>`` before their answer.

White space next to the two marks belongs to neither. The answer goes to another parser.
Owns which tokens are of reasoning: each that shows some of it, or would if that were shown, and
each between the first of those and the answer, the closing mark among them.
"""

from collections.abc import Callable

from fairlead_runtime.api.tools.call_json import SPACE
from fairlead_runtime.api.tools.parts import Parser, Part, Parts
from fairlead_runtime.outputs import Output

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """``inside``: the text begins with reasoning even without its first mark, because the prompt
    ends with it. ``show``: whether reasoning is among the parts.
    """

    def __init__(self, answer: Parser, *, inside: bool, show: bool) -> None:
        self._answer = answer
        self._inside = inside
        self._show = show
        self._parts = Parts()
        self._passed = ""  # of the answer, read already: one feed to its parser, so one part
        self._pending = ""  # white space, and the beginning of a mark after it
        self._mark = ""
        self._empty = True  # no reasoning was read
        self._wrote = False  # some was, of the last piece of text
        # None: the answer has begun
        self._state: Callable[[str], None] | None = self._before

    def feed(self, text: str) -> list[Part]:
        self._piece(text)
        return self._take()

    def read(self, output: Output) -> tuple[list[Part], int]:
        """The parts of an output's text, and how many of its tokens are of reasoning."""
        thought = at = 0
        for length in output.lengths:
            thought += self._piece(output.text[at : at + length])
            at += length
        thought += self._piece(output.text[at:]) * (len(output.token_ids) - len(output.lengths))
        return self._take(), thought

    def _piece(self, text: str) -> bool:
        """Take the text of one token. Returns whether that is of reasoning."""
        place, self._wrote = 0, False
        while self._state is not None and (place := self._run(text, place)) < len(text):
            self._state(text[place])
            place += 1
        if self._state is None:
            self._passed += text[place:]
        return self._wrote or not (self._empty or self._state is None)

    def _take(self) -> list[Part]:
        """The parts of the pieces since the last one of these."""
        parts, passed = self._parts.take(), self._passed
        self._passed = ""
        return parts + self._answer.feed(passed) if passed else parts

    def _run(self, text: str, place: int) -> int:
        """Take the characters of reasoning from ``place`` on, up to one that may begin its end.
        Returns the place of that.
        """
        if self._state != self._reasoning or self._mark:
            return place
        end = text.find(END[0], place)
        run = text[place:] if end < 0 else text[place:end]
        written = run.rstrip(SPACE)
        if self._empty:
            written = written.lstrip(SPACE)
        if written:
            self._write(self._pending + written)
            self._pending = ""
        if not self._empty:
            self._pending += run[len(run.rstrip(SPACE)) :]
        return place + len(run)

    def finish(self) -> list[Part]:
        # The beginning of the mark that ends thoughts is none of them: a budget may have forced it.
        if self._state == self._before:
            self._pass(self._pending + self._mark)
        return [*self.feed(""), *self._answer.finish()]

    def _write(self, text: str) -> None:
        self._empty, self._wrote = False, True
        if self._show:
            self._parts.reasoning(text)

    def _pass(self, text: str) -> None:
        self._state = None
        self._passed = text

    def _before(self, c: str) -> None:
        """Before anything but white space."""
        if BEGIN.startswith(self._mark + c):
            self._mark += c
            if self._mark == BEGIN:
                self._pending, self._mark, self._state = "", "", self._reasoning
        elif c in SPACE and not self._mark:
            self._pending += c
        else:
            begun, self._pending, self._mark = self._pending + self._mark + c, "", ""
            if not self._inside:
                self._pass(begun)
                return
            self._state = self._reasoning
            for character in begun:
                self._reasoning(character)

    def _reasoning(self, c: str) -> None:
        if END.startswith(self._mark + c):
            self._mark += c
            if self._mark == END:
                self._state = self._after
            return
        if self._mark:
            self._write(self._pending + self._mark)
            self._pending = self._mark = ""
            self._reasoning(c)
        elif c not in SPACE:
            self._write(self._pending + c)
            self._pending = ""
        elif not self._empty:
            self._pending += c

    def _after(self, c: str) -> None:
        if c not in SPACE:
            self._pass(c)


def read(parser: Parser, output: Output) -> tuple[list[Part], int]:
    """The parts of an output of one choice, and how many of its tokens are of reasoning."""
    if isinstance(parser, ReasoningParser):
        parts, thought = parser.read(output)
    else:
        parts, thought = parser.feed(output.text), 0
    return (parts if output.finish_reason is None else parts + parser.finish()), thought
