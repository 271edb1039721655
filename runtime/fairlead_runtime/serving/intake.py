"""Turns a client's Submission into an engine's Request.

Owns the checks common to server, Python API and command line, and the resolution of seed,
max_tokens and end-of-sequence ids. Knows no queue and no HTTP.
"""

import itertools
import uuid
from collections.abc import Callable

from fairlead_runtime.outputs import ModelFacts, Submission
from fairlead_runtime.request import Request, RequestError
from fairlead_runtime.seeds import resolve_seed


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
        self._within_vocabulary("prompt", prompt)
        self._within_vocabulary("stop_token_ids", params.stop_token_ids)
        max_tokens = self._resolve_max_tokens(len(prompt), params.max_tokens)
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

    def _within_vocabulary(self, field: str, ids: tuple[int, ...]) -> None:
        """Ids index the embedding and the logits: an id outside them would make the device fail,
        not just this request.
        """
        if ids and (min(ids) < 0 or max(ids) >= self._facts.vocab_size):
            raise RequestError(field, f"token ids must be from 0 to {self._facts.vocab_size - 1}")
