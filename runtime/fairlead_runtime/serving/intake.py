"""Turns a client's Submission into an engine's Request.

Owns the checks common to server, Python API and command line, and the resolution of seed,
max_tokens and end-of-sequence ids. Knows no queue and no HTTP.
"""

import itertools
import uuid
from array import array
from collections.abc import Callable, Sequence

from fairlead_runtime.outputs import ModelFacts, Submission
from fairlead_runtime.request.seeds import resolve_seed
from fairlead_runtime.request.sequence import Request, RequestError, SamplingParams

# Log-probabilities of one prompt: the engine holds them until its first token, about 64 bytes each.
MAX_PROMPT_LOGPROBS = 1 << 19


class Intake:
    """``resolve_max_tokens(prompt_len, max_tokens)`` is that of the engine's Bounds."""

    def __init__(
        self, resolve_max_tokens: Callable[[int, int | None], int], facts: ModelFacts
    ) -> None:
        self._resolve_max_tokens = resolve_max_tokens
        self._facts = facts
        self._arrivals = itertools.count()

    def request(self, submission: Submission) -> Request:
        """Raises RequestError; for a request that can never fit, the message shows the
        arithmetic.
        """
        prompt, params = submission.prompt, submission.params
        if not prompt:
            raise RequestError("prompt", "is empty: send at least one token")
        # Before anything that takes longer with more tokens: the event loop waits for this.
        max_tokens = self._resolve_max_tokens(len(prompt), params.max_tokens)
        self._within_vocabulary("prompt", prompt)
        self._check_ids(params)
        if params.prompt_logprobs is not None:
            check_prompt_logprobs(len(prompt), params.prompt_logprobs)
        return Request(
            id=submission.id or uuid.uuid4().hex,
            prompt=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=resolve_seed(params.seed, self._facts.seed, next(self._arrivals)),
            priority=submission.priority,
            tenant=submission.tenant,
            salt=submission.salt,
            eos_ids=self._facts.eos_ids,
        )

    def _check_ids(self, params: SamplingParams) -> None:
        """All ids of the parameters are tokens, and they leave a token to choose."""
        bad_words = [word for word in params.bad_words if not isinstance(word, str)]
        if len(bad_words) < len(params.bad_words):
            raise TypeError("bad_words are texts: turn them into ids (chat.bad_word_ids) first")
        allowed = params.allowed_token_ids
        self._within_vocabulary("stop_token_ids", params.stop_token_ids)
        self._within_vocabulary("logit_bias", [*dict(params.logit_bias)])
        self._within_vocabulary("allowed_token_ids", allowed or ())
        self._within_vocabulary("bad_words", [*itertools.chain.from_iterable(bad_words)])
        if allowed is not None:
            remaining_ids = set(allowed).difference(word[0] for word in bad_words if len(word) == 1)
            if params.min_tokens:
                remaining_ids -= self._facts.eos_ids.union(params.stop_token_ids)
            if not remaining_ids:
                raise RequestError(
                    "allowed_token_ids", "bad_words and min_tokens forbid all of them: allow others"
                )

    def _within_vocabulary(self, field: str, ids: Sequence[int]) -> None:
        """Ids index the embedding and the logits: an id outside them would make the device fail,
        not just this request.
        """
        if ids:
            lowest, highest = _bounds(ids)
            if lowest < 0 or highest >= self._facts.vocab_size:
                last = self._facts.vocab_size - 1
                raise RequestError(field, f"token ids must be from 0 to {last}")


def _bounds(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the largest id. Of packed ids in 0.1 µs a thousand; Python takes 30."""
    if isinstance(ids, array) and ids.typecode == "i":
        # Imported here: `serve` opens its ports before it imports numpy with transformers.
        import numpy as np

        packed = np.frombuffer(ids, dtype=np.intc)
        return int(packed.min()), int(packed.max())
    return min(ids), max(ids)


def check_prompt_logprobs(prompt_len: int, count: int) -> None:
    """Raises RequestError, with the arithmetic, for more log-probabilities than are held at once.
    ``prompt_len``: of one prompt, or of all that one answer shows.
    """
    needed = prompt_len * (count + 1)
    if needed > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            "prompt_logprobs",
            f"{prompt_len} prompt tokens * ({count} + 1) = {needed} log-probabilities, more than "
            f"{MAX_PROMPT_LOGPROBS}: lower it, or send fewer or shorter prompts",
        )
