"""The token ids that an answer shows beside its text (``return_token_ids``), in vLLM's places."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Members of JSON objects, each with a comma before it; empty unless ``enabled``.

    ``prompts``: the ids of each prompt, which has ``n`` choices, whose indices follow each other.
    """

    enabled: bool = False
    n: int = 1
    prompts: tuple[Sequence[int], ...] = ()
    _pending: dict[int, list[int]] = field(default_factory=dict)
    _places_shown: set[int] = field(default_factory=set)

    def add(self, index: int, ids: Sequence[int]) -> None:
        """Keep the ids that choice ``index`` generated for its next event."""
        if self.enabled:
            self._pending.setdefault(index, []).extend(ids)

    def generated(self, index: int) -> bytes:
        """The ids of choice ``index`` since the last call."""
        if not self.enabled:
            return b""
        return b',"token_ids":' + orjson.dumps(self._pending.pop(index, []))

    def prompt(self, index: int) -> bytes:
        """The ids of the prompt of choice ``index``, at the first call for that prompt."""
        place = index // self.n
        if not self.enabled or place in self._places_shown:
            return b""
        self._places_shown.add(place)
        return b',"prompt_token_ids":' + orjson.dumps(list(self.prompts[place]))
