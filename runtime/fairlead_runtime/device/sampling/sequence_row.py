"""One row of the sequence table: its columns on the device, and how its tokens are chosen.

Owns the columns and how they follow from a sequence.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fairlead_runtime.device.sampling.host_sampler import GREEDY_BELOW
from fairlead_runtime.device.sampling.logit_edits import ALWAYS
from fairlead_runtime.device.sampling.sampling_mode import SamplingMode, holds_back_until, mode_of
from fairlead_runtime.request.seeds import MASK64, mix64
from fairlead_runtime.request.sequence import Sequence

# The columns of a row, each one int64:
#
# column        type in it      meaning
# TOKEN         int64           the last token
# LENGTH        int64           tokens of the sequence in its next step
# KEY           int64           of its draws: from the request's seed and the choice
# TOP_K         int64           the parameter
# TOP_P         float64         the parameter
# SCALE         2 float32       temperature, min_cut (the logarithm of min_p)
# PENALTIES, _  3 float32       repetition, frequency, presence; a fourth is not used
# FLAGS         int64           of its list of changes: ``logit_edits``
# UNTIL         int64           the length below which end and stop ids are held back
TOKEN, LENGTH, KEY, TOP_K, TOP_P, SCALE, PENALTIES, _, FLAGS, UNTIL = range(10)
COLUMNS = 10

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """What follows of a row from its sequence's parameters. ``state`` is the row on the device, but
    for token, length and flags. ``counts``: its list counts its tokens.

    ``mode``: how its tokens are chosen below the length ``min_tokens_until``, ``mode_after`` from
    there on.
    """

    state: Array
    mode: SamplingMode
    min_tokens_until: int
    mode_after: SamplingMode
    counts: bool

    @classmethod
    def of(cls, sequence: Sequence) -> Self:
        mode = mode_of(sequence, 0)
        return cls(
            _state(sequence),
            mode,
            min_tokens_until=holds_back_until(sequence),
            mode_after=mode_of(sequence, ALWAYS),
            counts=mode.changes and sequence.request.params.penalizes,
        )


def _state(sequence: Sequence) -> Array:
    """SequenceTable.state's row of this sequence, int64 [COLUMNS], but token, length and flags."""
    params = sequence.request.params
    state = np.zeros(COLUMNS, dtype=np.int64)
    key = mix64(mix64(sequence.request.seed & MASK64) ^ sequence.choice)
    state[KEY] = key - (1 << 64) if key >= 1 << 63 else key
    state[TOP_K] = params.top_k
    state.view(np.float64)[TOP_P] = params.top_p
    scale = state.view(np.float32).reshape(COLUMNS, 2)[SCALE]
    scale[0] = params.temperature if params.temperature >= GREEDY_BELOW else 0
    with np.errstate(divide="ignore"):  # log(0) = -inf is "off"
        scale[1] = np.log(np.float64(params.min_p))
    penalties = state.view(np.float32)[2 * PENALTIES :]
    penalties[0] = params.repetition_penalty
    penalties[1] = params.frequency_penalty
    penalties[2] = params.presence_penalty
    state[UNTIL] = holds_back_until(sequence)
    return state
