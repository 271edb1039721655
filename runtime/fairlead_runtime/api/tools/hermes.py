"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them:
``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``, once for each call.
"""

from fairlead_runtime.api.tools.marked import MarkedParser


class HermesParser(MarkedParser):
    marker = "<tool_call>"

    def _after_marker(self) -> None:
        self._read_object()

    def _after_call(self) -> None:
        self._expect("</tool_call>", self._after_end, closing=True)

    def _after_end(self) -> None:
        self._pending.clear()
        self._state = self._in_text
