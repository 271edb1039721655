"""The modes in which a step's tokens are chosen on the device, and which one a sequence needs.

Owns the rule. A step takes the mode that all its rows together need, and each mode has graphs of
its own, so no step computes what none of its rows asks for.
"""

import enum
import functools
from collections.abc import Iterable
from typing import NamedTuple

from fairlead_runtime.device.sampling.host_sampler import GREEDY_BELOW
from fairlead_runtime.request.sequence import Sequence


class DrawKind(enum.IntEnum):
    """How tokens are drawn: each kind includes those before it."""

    GREEDY = 0
    PLAIN = 1  # some rows draw, none filters
    FILTERED = 2
    GENERAL = 3  # not on the device: the general sampler makes the whole step's tokens


class SamplingMode(NamedTuple):
    """``changes``: some rows change their logits by lists on the device; ``logprobs``: some want
    log-probabilities; ``masked``: some take only what a mask allows that the host makes once the
    tokens before are known.
    """

    draw: DrawKind = DrawKind.GREEDY
    changes: bool = False
    logprobs: bool = False
    masked: bool = False


GREEDY, GENERAL = SamplingMode(), SamplingMode(DrawKind.GENERAL)
# The captured mode that takes most memory.
HEAVIEST = SamplingMode(DrawKind.FILTERED, changes=True, logprobs=True)


def merge(modes: Iterable[SamplingMode]) -> SamplingMode:
    """The mode of a step whose rows need these."""
    return functools.reduce(_merge_two, modes, GREEDY)


def _merge_two(first: SamplingMode, second: SamplingMode) -> SamplingMode:
    draw = max(first.draw, second.draw)
    if draw is DrawKind.GENERAL:
        return GENERAL
    return SamplingMode(
        draw,
        first.changes or second.changes,
        first.logprobs or second.logprobs,
        first.masked or second.masked,
    )


def mode_of(sequence: Sequence, length: int) -> SamplingMode:
    """How the token after the sequence's first ``length`` is chosen, where its list fits."""
    params = sequence.request.params
    changes = (
        params.penalizes
        or bool(params.logit_bias)
        or any(len(word) == 1 for word in params.bad_words)
        or params.allowed_token_ids is not None
        or length < holds_back_until(sequence)
    )
    draw = DrawKind.PLAIN
    if params.temperature < GREEDY_BELOW:
        draw = DrawKind.GREEDY
    elif params.top_k or params.top_p < 1 or params.min_p:
        draw = DrawKind.FILTERED
    return SamplingMode(draw, changes, params.logprobs is not None, is_masked(sequence))


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
