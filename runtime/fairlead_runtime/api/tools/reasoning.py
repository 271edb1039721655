"""Separates the reasoning of models that write ``<think>…</think>`` before their answer.

White space next to the two marks belongs to neither. The answer goes to another parser.
"""

from collections.abc import Callable

from fairlead_runtime.api.tools.call_json import SPACE
from fairlead_runtime.api.tools.parts import Parser, Part, Parts

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
        # None: the answer has begun
        self._state: Callable[[str], None] | None = self._before

    def feed(self, text: str) -> list[Part]:
        place = 0
        while self._state is not None and (place := self._run(text, place)) < len(text):
            self._state(text[place])
            place += 1
        parts = self._parts.take()
        if self._state is None and (rest := self._passed + text[place:]):
            self._passed = ""
            parts += self._answer.feed(rest)
        return parts

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
        self._empty = False
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
