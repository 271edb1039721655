"""Calls as Mistral's models write them after ``[TOOL_CALLS]``: up to tokenizer v7 a list
``[{"name": "f", "arguments": {…}}]``; later, for each call, ``f[ARGS]{…}``, some with
``[CALL_ID]`` before ``[ARGS]``.
"""

import re

from fairlead_runtime.api.tools.call_json import SPACE, Value
from fairlead_runtime.api.tools.marked import ArrayParser

_HEAD = re.compile(r"\s*([^\s\[\]{}]+)(\[CALL_ID\][^\[\]{}]*)?(\[ARGS\])?\s*")
MAX_HEAD = 256  # characters between the marker and the arguments


class MistralParser(ArrayParser):
    marker = "[TOOL_CALLS]"
    _head = ""
    _value = Value("{")

    def _after_marker(self) -> None:
        self._head, self._state = "", self._in_head

    def _in_head(self, c: str) -> None:
        """Between the marker and a list, or the arguments of the named tool."""
        if c == "[" and not self._head.strip(SPACE):
            self._pending.append(c)
            self._enter_list()
        elif c != "{":
            self._pending.append(c)
            self._head += c
            if len(self._head) > MAX_HEAD:
                self._show_held()
                self._state = self._in_text
        else:
            head = _HEAD.fullmatch(self._head)
            if head is None or head[1] not in self._names:
                self._back_to_text(c)
                return
            self._begin_call(head[1])
            self._value, self._state = Value(c), self._in_arguments
            self._parts.arguments(self._calls - 1, c)

    def _run(self, text: str, place: int) -> int:
        if self._state != self._in_arguments:
            return super()._run(text, place)
        end = self._value.run(text, place)
        self._parts.arguments(self._calls - 1, text[place:end])
        return end

    def _in_arguments(self, c: str) -> None:
        self._parts.arguments(self._calls - 1, c)
        if self._value.take(c):
            self._state = self._in_text
