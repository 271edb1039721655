"""Calls that a grammar forces (``tool_choice`` required, or a named tool): JSON alone, the same for
every model. Anything else, which no grammar lets through, is content; the beginning of a call that
is cut before its arguments is neither.
"""

from fairlead_runtime.api.tools.call_json import SPACE, Value
from fairlead_runtime.api.tools.marked import ArrayParser, MarkedParser, NewId
from fairlead_runtime.api.tools.parts import Part


class _Forced(MarkedParser):
    def finish(self) -> list[Part]:
        self._pending.clear()
        return super().finish()


class RequiredParser(_Forced, ArrayParser):
    """A list of calls: ``[{"name": "f", "parameters": {…}}]``."""

    argument_keys = ("parameters",)

    def __init__(self, names: frozenset[str], new_id: NewId) -> None:
        super().__init__(names, new_id)
        self._expect("[", self._enter_list)


class NamedParser(_Forced):
    """The arguments of one tool: ``{…}``."""

    def __init__(self, name: str, new_id: NewId) -> None:
        super().__init__((name,), new_id)
        self._name = name
        self._value = Value("{")
        self._state = self._before_arguments

    def _before_arguments(self, c: str) -> None:
        if c == "{":
            self._begin_call(self._name)
            self._state = self._in_arguments
            self._parts.arguments(0, c)
        elif c in SPACE:
            self._pending.append(c)
        else:
            self._back_to_text(c)

    def _run(self, text: str, place: int) -> int:
        if self._state != self._in_arguments:
            return super()._run(text, place)
        end = self._value.run(text, place)
        self._parts.arguments(0, text[place:end])
        return end

    def _in_arguments(self, c: str) -> None:
        self._parts.arguments(0, c)
        if self._value.take(c):
            self._state = self._in_text
