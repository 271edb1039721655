"""From what a client means to what the engine takes: Submission → Request.

Owns the checks that hold for every way in (server, Python API, command line) and the resolution of seed,
max_tokens and end-of-sequence ids. Knows no queue and no HTTP.
"""

import itertools
import uuid
from collections.abc import Callable

from fairlead_runtime.outputs import Submission
from fairlead_runtime.request import Request, RequestError
from fairlead_runtime.scheduling.plan import Verdict, VerdictKind
from fairlead_runtime.seeds import resolve_seed


class Intake:
    """``judge(prompt_len, max_tokens)`` is the scheduler's verdict; ``seed`` the engine's own."""

    def __init__(
        self,
        judge: Callable[[int, int | None], Verdict],
        *,
        eos_ids: frozenset[int],
        vocab_size: int,
        seed: int,
    ) -> None:
        self._judge = judge
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._seed = seed
        self._arrivals = itertools.count()

    def request(self, submission: Submission) -> Request:
        """Raises RequestError, with the arithmetic when the request can never fit."""
        prompt, params = submission.prompt, submission.params
        if not prompt:
            raise RequestError("prompt", "is empty: send at least one token")
        self._within_vocabulary("prompt", prompt)
        self._within_vocabulary("stop_token_ids", params.stop_token_ids)
        verdict = self._judge(len(prompt), params.max_tokens)
        if verdict.kind is VerdictKind.NEVER:
            raise RequestError("prompt" if params.max_tokens is None else "max_tokens", verdict.message)
        return Request(
            id=submission.id or uuid.uuid4().hex,
            prompt=prompt,
            params=params,
            max_tokens=verdict.max_tokens,
            seed=resolve_seed(params.seed, self._seed, next(self._arrivals)),
            priority=submission.priority,
            tenant=submission.tenant,
            salt=submission.salt,
            eos_ids=self._eos_ids,
        )

    def _within_vocabulary(self, field: str, ids: tuple[int, ...]) -> None:
        """Ids index the embedding and the logits: outside of them the device would fail, not this request."""
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            raise RequestError(field, f"token ids must be from 0 to {self._vocab_size - 1}")
