"""What a completions answer shows of its prompts: their text (``echo``) and log-probabilities."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.answers.logprob_bodies import FLOOR, PIECE_TOKENS
from fairlead_runtime.request.logprobs import PromptLogprobs
from fairlead_runtime.serving.detokenize import WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """The prompts of one request, each with ``n`` choices, whose indices follow each other.

    ``echo``: each prompt's text, empty unless the answer shows it. ``ids``: its token ids.
    ``top``: as many likeliest tokens as prompt_logprobs shows, None for no prompt_logprobs. The
    log-probabilities come with a prompt's first choice.
    """

    n: int = 1
    ids: tuple[Sequence[int], ...] = ()
    echo: tuple[str, ...] = ()
    token_text: Callable[[int], str] = str
    top: int | None = None
    _logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)

    def take(self, index: int, logprobs: PromptLogprobs | None) -> None:
        """Keep what came with choice ``index``."""
        if logprobs is not None:
            self._logprobs[index // self.n] = logprobs

    def text(self, index: int) -> str:
        """The text that goes before that of choice ``index``."""
        return self.echo[index // self.n] if self.echo else ""

    def begins_text(self, index: int, special: frozenset[int]) -> bool:
        """Whether the output of choice ``index`` has no text before it that a decoder looks at."""
        return bool(self.ids) and special.issuperset(self.ids[index // self.n][-WINDOW:])

    def tokens(self, index: int) -> tuple[Sequence[int], PromptLogprobs, str]:
        """The echoed token ids of choice ``index``, their log-probabilities, and the first token's
        text; nothing without echo.
        """
        place = index // self.n
        if not self.echo or place not in self._logprobs:
            return (), (), ""
        ids = self.ids[place]
        return ids, self._logprobs[place], self.token_text(ids[0])

    def json_member(self, index: int) -> Iterator[bytes]:
        """``,"prompt_logprobs":[…]`` in vLLM's shape and in pieces; null where the request does not
        ask for it.
        """
        if self.top is None:
            yield b',"prompt_logprobs":null'
            return
        entries = self._logprobs.get(index // self.n, ())
        yield b',"prompt_logprobs":['
        for at in range(0, len(entries), PIECE_TOKENS):
            bodies = [_body(entry, self.top) for entry in entries[at : at + PIECE_TOKENS]]
            yield b"," * bool(at) + orjson.dumps(bodies)[1:-1]
        yield b"]"


def _body(entries: Mapping[int, Any] | None, top: int) -> dict[str, Any] | None:
    """One prompt token: its own entry first, then the ``top`` likeliest."""
    if entries is None:
        return None
    return {
        str(token): {
            "logprob": max(entry.logprob, FLOOR),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for place, (token, entry) in enumerate(entries.items())
        if place == 0 or entry.rank <= top
    }


def echoed(
    prompts: Sequence[str | tuple[int, ...]], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Each prompt's text: as it was sent, or that of its token ids, special ones too."""
    size = len(tokenizer)
    return tuple(
        prompt
        if isinstance(prompt, str)
        # Ids outside the vocabulary are refused with the submission.
        else tokenizer.decode(
            [token for token in prompt if 0 <= token < size],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        for prompt in prompts
    )
