"""Base of the parsers of calls: text until a marker, then what may be calls.

Owns which white space and which beginnings of markers are held back, and the numbers and ids of
calls. A subclass says what may follow a marker. What is held back and turns out to be no call is
content, with its marker; nothing is read twice.
"""

from collections.abc import Callable, Container

from fairlead_runtime.api.tools.call_json import SPACE, CallReader, Progress
from fairlead_runtime.api.tools.parts import CallBegun, Part, Parts

NewId = Callable[[], str]


class MarkedParser:
    """``names``: the tools. A marker's first character occurs in it only once, so that a beginning
    that does not go on holds no other beginning.
    """

    marker = ""
    argument_keys: Container[str] = ("arguments",)
    separators = SPACE  # that mean nothing between and after calls

    def __init__(self, names: Container[str], new_id: NewId) -> None:
        self._names = names
        self._new_id = new_id
        self._parts = Parts()
        self._calls = 0
        self._pending: list[str] = []  # content, unless a call comes of it
        self._reader = CallReader(names, self.argument_keys)
        self._expected = ""
        self._read = 0  # characters of what is expected
        self._then: Callable[[], None] = self._after_marker
        self._closing = False  # whether the end of a call is expected
        self._state: Callable[[str], None] = self._in_text

    def feed(self, text: str) -> list[Part]:
        place = 0
        while (place := self._run(text, place)) < len(text):
            self._state(text[place])
            place += 1
        return self._parts.take()

    def _run(self, text: str, place: int) -> int:
        """Take the characters from ``place`` on that the state takes alike. Returns the place of
        the first one that it must see by itself.
        """
        if self._state == self._in_text:
            end = text.find(self.marker[0], place) if self.marker else -1
            end = len(text) if end < 0 else end
            self._add_text(text[place:end])
            return end
        if self._state == self._in_object:
            end = self._reader.run(text, place)
            self._add_to_object(text[place:end])
            return end
        return place

    def finish(self) -> list[Part]:
        nothing = self._calls and not "".join(self._pending).strip(self.separators)
        if not self._closing and not nothing:
            self._show_held()
        return self._parts.take()

    # -- text

    def _in_text(self, c: str) -> None:
        """White space, or the beginning of a marker, may precede a call."""
        if c == self.marker[:1]:
            self._expect(self.marker, self._after_marker)
            self._in_expected(c)
        else:
            self._add_text(c)

    def _add_text(self, run: str) -> None:
        """Text without the beginning of a marker."""
        shown = run.rstrip(SPACE)
        if shown:
            self._show_held()
            self._parts.content(shown)
        if len(shown) < len(run):
            self._pending.append(run[len(shown) :])

    def _expect(self, marker: str, then: Callable[[], None], *, closing: bool = False) -> None:
        """Read ``marker``, after white space, then call ``then``. Other text is content."""
        self._expected, self._read, self._then, self._closing = marker, 0, then, closing
        self._state = self._in_expected

    def _in_expected(self, c: str) -> None:
        if c == self._expected[self._read]:
            self._pending.append(c)
            self._read += 1
            if self._read == len(self._expected):
                self._closing = False
                self._then()
        elif c in SPACE and not self._read:
            self._pending.append(c)
        else:
            self._closing = False
            self._back_to_text(c)

    def _after_marker(self) -> None:
        """Set the state for what follows the marker."""
        raise NotImplementedError

    def _back_to_text(self, c: str) -> None:
        """What is held back is no call; ``c`` comes after it."""
        self._show_held()
        self._state = self._in_text
        self._in_text(c)

    def _show_held(self) -> None:
        self._parts.content("".join(self._pending))
        self._pending.clear()

    # -- calls

    def _read_object(self) -> None:
        self._reader = CallReader(self._names, self.argument_keys)
        self._state = self._in_object

    def _in_object(self, c: str) -> None:
        decided = self._reader.name
        progress = self._reader.take(c)
        if progress is Progress.NO_CALL:
            self._back_to_text(c)
            return
        if self._reader.name and not decided:
            self._begin_call(self._reader.name)
        self._add_to_object(c)
        if progress is not Progress.MORE:
            self._after_call()
            if progress is Progress.ENDED_BEFORE:
                self._state(c)

    def _add_to_object(self, text: str) -> None:
        """Show what the reader has taken, once it has decided that this is a call."""
        if self._reader.name:
            self._parts.arguments(self._calls - 1, self._reader.arguments())
        elif text:
            self._pending.append(text)

    def _begin_call(self, name: str) -> None:
        """What is held back belongs to a call."""
        self._pending.clear()
        self._parts.call(CallBegun(self._calls, self._new_id(), name))
        self._calls += 1

    def _after_call(self) -> None:
        """Set the state for what follows a call."""
        raise NotImplementedError


class ArrayParser(MarkedParser):
    """Reads a JSON list of calls, once a subclass has entered it."""

    separators = SPACE + ","
    _in_list = 0  # calls of this list

    def _enter_list(self) -> None:
        self._in_list, self._state = 0, self._between_calls

    def _between_calls(self, c: str) -> None:
        if c == "{":
            self._read_object()
            self._state(c)
        elif c in SPACE or (c == "," and self._in_list):
            self._pending.append(c)
        elif c == "]" and self._in_list:
            self._pending.clear()
            self._state = self._in_text
        else:
            self._back_to_text(c)

    def _after_call(self) -> None:
        self._in_list += 1
        self._state = self._between_calls
