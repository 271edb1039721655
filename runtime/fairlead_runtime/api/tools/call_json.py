"""Reads one call as models write it: a JSON object with a name and an object of arguments.

Owns the decision whether text is a call, and the raw text of its arguments. A call is decided once
its name, one of the request's tools, and the first brace of its arguments are read; nothing before
that is shown, nothing after that is taken back. Reads each character once, and of long values only
those that may end them.
"""

import enum
import json
import re
from collections.abc import Callable, Container

SPACE = " \t\r\n"
_PLAIN = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


_IN_TEXT, _IN_VALUE = re.compile(r'["\\]'), re.compile(r'["\[\]{}]')


class Progress(enum.Enum):
    MORE = "the character belongs to the object, which goes on"
    ENDED = "the character ends the object"
    ENDED_BEFORE = "the call ended before the character, which is not the object's"
    NO_CALL = "the object is no call; the character is not read"


class Value:
    """The end of one JSON value: quotes and brackets are counted, nothing else is checked."""

    def __init__(self, first: str) -> None:
        self._text = first == '"'
        self._escaped = False
        self._depth = 1 if first in "[{" else 0

    def run(self, text: str, place: int) -> int:
        """The place of the next character from ``place`` on that ``take`` must see."""
        if self._escaped:
            return place
        match = (_IN_TEXT if self._text else _IN_VALUE).search(text, place)
        return len(text) if match is None else match.start()

    def take(self, c: str) -> bool:
        """Whether ``c`` ends a text, an object or a list. Numbers and words have no such end."""
        if self._text:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self._text = False
                return self._depth == 0
            return False
        if c == '"':
            self._text = True
        elif c in "[{":
            self._depth += 1
        elif c in "]}":
            self._depth -= 1
            return self._depth == 0
        return False


class CallReader:
    """One object. ``argument_keys``: the names under which its arguments may be."""

    def __init__(self, names: Container[str], argument_keys: Container[str]) -> None:
        self.name = ""  # of the call, once it is decided
        self._names = names
        self._argument_keys = argument_keys
        self._key = ""
        self._name = ""
        self._raw: list[str] = []  # of the key or value that is being read
        self._value: Value | None = None
        self._early: str | None = None  # whole arguments that came before the name
        self._arguments: list[str] = []  # decided, not taken yet
        self._state: Callable[[str], Progress] = self._before_object

    def take(self, c: str) -> Progress:
        return self._state(c)

    def run(self, text: str, place: int) -> int:
        """Take the characters from ``place`` on that belong to the value that is being read.
        Returns the place of the first that ``take`` must see.
        """
        if self._value is None or self._state not in (self._in_arguments, self._in_value):
            return place
        end = self._value.run(text, place)
        pieces = self._arguments if self.name and self._state == self._in_arguments else self._raw
        pieces.append(text[place:end])
        return end

    def arguments(self) -> str:
        """The text of the arguments since the last time; empty until the call is decided."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # -- one method per place in the object: each reads one character

    def _before_object(self, c: str) -> Progress:
        if c == "{":
            self._state = self._before_first_key
        return Progress.MORE if c == "{" or c in SPACE else Progress.NO_CALL

    def _before_first_key(self, c: str) -> Progress:
        return Progress.NO_CALL if c == "}" else self._before_key(c)

    def _before_key(self, c: str) -> Progress:
        if c == '"':
            self._value, self._raw, self._state = Value(c), [c], self._in_key
        elif c not in SPACE:
            return self._undecided()
        return Progress.MORE

    def _in_key(self, c: str) -> Progress:
        self._raw.append(c)
        if self._value is not None and self._value.take(c):
            self._key, self._state = _text("".join(self._raw)), self._before_colon
        return Progress.MORE

    def _before_colon(self, c: str) -> Progress:
        if c == ":":
            self._state = self._before_value
        elif c not in SPACE:
            return self._undecided()
        return Progress.MORE

    def _before_value(self, c: str) -> Progress:
        if c in SPACE:
            return Progress.MORE
        is_arguments = self._key in self._argument_keys
        if (is_arguments and c != "{") or (self._key == "name" and c != '"'):
            return self._undecided()
        self._raw = [c]
        if c in '"[{':
            self._value, self._state = Value(c), self._in_value
            if is_arguments and self._name and not self.name:
                self.name, self._arguments, self._state = self._name, [c], self._in_arguments
            return Progress.MORE
        self._state = self._in_word
        return Progress.MORE if c in _PLAIN else self._undecided()

    def _in_arguments(self, c: str) -> Progress:
        self._arguments.append(c)
        if self._value is not None and self._value.take(c):
            self._state = self._after_value
        return Progress.MORE

    def _in_value(self, c: str) -> Progress:
        self._raw.append(c)
        if self._value is None or not self._value.take(c):
            return Progress.MORE
        self._state = self._after_value
        raw = "".join(self._raw)
        if self._key == "name" and not self.name:
            self._name = _text(raw)
            if self._name not in self._names:
                self._name = ""
                self._state = self._never
            elif self._early is not None:
                self.name, self._arguments = self._name, [self._early]
        elif self._key in self._argument_keys and not self.name:
            self._early = raw
        return Progress.MORE

    def _in_word(self, c: str) -> Progress:
        return Progress.MORE if c in _PLAIN else self._after_value(c)

    def _after_value(self, c: str) -> Progress:
        if c == ",":
            self._state = self._before_key
        elif c == "}":
            return Progress.ENDED if self.name else Progress.NO_CALL
        elif c not in SPACE:
            return self._undecided()
        return Progress.MORE

    def _never(self, _c: str) -> Progress:
        return Progress.NO_CALL

    def _undecided(self) -> Progress:
        """The object is not as it should be: the end of a decided call, else no call."""
        return Progress.ENDED_BEFORE if self.name else Progress.NO_CALL


def _text(raw: str) -> str:
    """The text of a JSON string; "" for one that is none, which is no key and no tool."""
    try:
        return str(json.loads(raw))
    except ValueError:
        return ""
