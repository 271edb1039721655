"""The ways to choose a step's tokens on the device, and which one a sequence needs.

Owns the rule. A step takes the way that all its rows together need, and each way has graphs of its
own, so no step computes what none of its rows asks for.
"""

import enum
import functools
from collections.abc import Iterable
from typing import NamedTuple

from fairlead_runtime.device.sampling.host_sampler import GREEDY_BELOW
from fairlead_runtime.request.sequence import Sequence


class Draw(enum.IntEnum):
    """How tokens are drawn: each form includes those before it."""

    GREEDY = 0
    PLAIN = 1  # some rows draw, none filters
    FILTERED = 2
    GENERAL = 3  # not on the device: the general sampler makes the whole step's tokens


class Way(NamedTuple):
    """``changes``: some rows change their logits by lists on the device; ``logprobs``: some want
    log-probabilities; ``masked``: some take only what a mask allows that the host makes once the
    tokens before are known.
    """

    draw: Draw = Draw.GREEDY
    changes: bool = False
    logprobs: bool = False
    masked: bool = False


LEAST, GENERAL = Way(), Way(Draw.GENERAL)
# The captured way that takes most memory.
LARGEST = Way(Draw.FILTERED, changes=True, logprobs=True)


def joined(ways: Iterable[Way]) -> Way:
    """What rows need together that need these."""
    return functools.reduce(_beside, ways, LEAST)


def _beside(one: Way, other: Way) -> Way:
    draw = max(one.draw, other.draw)
    if draw is Draw.GENERAL:
        return GENERAL
    return Way(
        draw,
        one.changes or other.changes,
        one.logprobs or other.logprobs,
        one.masked or other.masked,
    )


def way_of(sequence: Sequence, length: int) -> Way:
    """How the token after the sequence's first ``length`` is chosen, where its list fits."""
    params = sequence.request.params
    changes = (
        params.penalizes
        or bool(params.logit_bias)
        or any(len(word) == 1 for word in params.bad_words)
        or params.allowed_token_ids is not None
        or length < holds_back_until(sequence)
    )
    draw = Draw.PLAIN
    if params.temperature < GREEDY_BELOW:
        draw = Draw.GREEDY
    elif params.top_k or params.top_p < 1 or params.min_p:
        draw = Draw.FILTERED
    return Way(draw, changes, params.logprobs is not None, is_masked(sequence))


def is_masked(sequence: Sequence) -> bool:
    """Whether what it may take depends on more of its tokens than the device looks at: its place in
    a grammar, or the last ones where a bad word has several.
    """
    words = sequence.request.params.bad_words
    return sequence.guide is not None or any(len(word) > 1 for word in words)


def holds_back_until(sequence: Sequence) -> int:
    """The length from which on end and stop ids are allowed; 0 where they always are, or the mask
    says so: a complete output may end earlier.
    """
    min_tokens = 0 if is_masked(sequence) else sequence.request.params.min_tokens
    return sequence.prompt_len + min_tokens if min_tokens else 0
