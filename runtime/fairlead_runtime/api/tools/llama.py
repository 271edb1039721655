"""Calls as Llama 3.1 to 3.3 write them: the whole answer is ``{"name": "f", "parameters": {…}}``,
several of them parted by semicolons, each perhaps after ``<|python_tag|>``.
"""

from fairlead_runtime.api.tools.call_json import SPACE
from fairlead_runtime.api.tools.marked import MarkedParser, NewId


class LlamaParser(MarkedParser):
    """An answer that begins with anything but a call is content to its end."""

    marker = "<|python_tag|>"
    argument_keys = ("parameters", "arguments")
    separators = SPACE + ";"

    def __init__(self, names: frozenset[str], new_id: NewId) -> None:
        super().__init__(names, new_id)
        self._state = self._before_call

    def _before_call(self, c: str) -> None:
        if c == "{":
            self._read_object()
            self._state(c)
        elif c == self.marker[0]:
            self._expect(self.marker, self._after_marker)
            self._state(c)
        elif c in SPACE or (c == ";" and self._calls):
            self._pending.append(c)
        else:
            self._back_to_text(c)

    def _run(self, text: str, place: int) -> int:
        if self._state != self._in_text:
            return super()._run(text, place)
        self._parts.content(text[place:])
        return len(text)

    def _in_text(self, c: str) -> None:
        self._parts.content(c)

    def _after_marker(self) -> None:
        self._state = self._before_call

    def _after_call(self) -> None:
        self._state = self._before_call
