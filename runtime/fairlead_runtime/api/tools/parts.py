"""The parts that a parser makes of a choice's text, and the interface of parsers.

The parts of a choice concatenate: their pieces may be split anywhere, their order and content not.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of one of the request's tools. ``index`` counts the choice's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class Parser(Protocol):
    """Reads one choice's text. Raises for no text."""

    def feed(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]: ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Parts:
    """Collects parts; joins neighbours of one kind."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: type[Content | Reasoning | CallArguments] = Content
        self._index = 0
        self._pieces: list[str] = []  # of the part that still grows

    def content(self, text: str) -> None:
        self._grow(Content, 0, text)

    def reasoning(self, text: str) -> None:
        self._grow(Reasoning, 0, text)

    def arguments(self, index: int, text: str) -> None:
        self._grow(CallArguments, index, text)

    def call(self, call: CallBegun) -> None:
        self._close()
        self._parts.append(call)

    def take(self) -> list[Part]:
        """The parts since the last ``take``."""
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _grow(
        self,
        kind: type[Content] | type[Reasoning] | type[CallArguments],
        index: int,
        text: str,
    ) -> None:
        if (kind, index) != (self._kind, self._index):
            self._close()
            self._kind, self._index = kind, index
        if text:
            self._pieces.append(text)

    def _close(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind is CallArguments:
            self._parts.append(CallArguments(self._index, text))
        else:
            self._parts.append(Content(text) if self._kind is Content else Reasoning(text))
