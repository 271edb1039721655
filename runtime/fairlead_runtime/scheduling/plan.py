"""The values that flow through a step: Limits → Plan → Work → Result → events.

Owns their types. Holds no queue and no block pool, and makes no decision.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fairlead_runtime.cache.paged import Hit
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import FINAL, Failure, FinishReason, Sequence
from fairlead_runtime.settings.engine_config import EngineConfig, SchedulerType


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of one scheduler.

    ``num_blocks`` counts whole-model blocks, ``offload_units`` counts units in host memory.
    A unit is ``block_size`` tokens in the layers of one layer group; a whole-model block is one
    unit per group. ``prefill_beside_decodes``: the tokens that prompts may take in a step which
    also decodes, more where more sequences wait for them than decode; ``prefill_first`` ignores it.
    """

    policy: SchedulerType
    max_batch_tokens: int
    max_requests: int
    safety_margin: float
    block_size: int
    num_blocks: int
    max_model_len: int
    allow_block_sharing: bool = True
    offload_units: int = 0  # 0: a preempted sequence is always recomputed
    prefill_beside_decodes: int = 0  # 0: no bound but max_batch_tokens
    # Of a model with states: the units of one version, how many versions a running sequence has
    # (two, or three where a step may be in flight), and the tokens that the cache holds of one
    # sequence beside them; None: num_blocks * block_size.
    state_units: int = 0
    state_versions: int = 2
    cache_tokens: int | None = None
    shares_answers: bool = True  # False: blocks and snapshots of prompts alone are found again

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        offload_units: int = 0,
        prefill_beside_decodes: int = 0,
        state_units: int = 0,
        state_versions: int = 2,
        cache_tokens: int | None = None,
        shares_answers: bool = True,
    ) -> Self:
        """The limits of a configuration, of the numbers that sizing solved and of the device's
        bound on prompts.
        """
        return cls(
            policy=config.scheduler_type,
            max_batch_tokens=config.max_batch_tokens,
            max_requests=config.max_requests,
            safety_margin=config.safety_margin,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            allow_block_sharing=config.allow_block_sharing,
            offload_units=offload_units,
            prefill_beside_decodes=prefill_beside_decodes,
            state_units=state_units,
            state_versions=state_versions,
            cache_tokens=cache_tokens,
            shares_answers=shares_answers,
        )

    @property
    def capacity(self) -> int:
        """The most tokens, prompt plus output, of one request; a longer one is refused."""
        tokens = self.cache_tokens
        held = self.num_blocks * self.block_size if tokens is None else tokens
        return min(self.max_model_len, held)


class Row(NamedTuple):
    """One sequence's part of a step: it computes ``tokens[start : start + count]``. Of a step
    planned while another is in flight the device alone knows these tokens.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # replaces tuple.count, which a row does not need
    samples: bool  # start + count == len(tokens): the last token predicts a new one


class AdmissionSource(enum.StrEnum):
    """The origin of an admitted sequence's first computed tokens."""

    PREFIX = "prefix"  # the prefix cache; the hit may be empty
    FORK = "fork"  # the prompt blocks of a sibling; the partial last block is copied
    RESTORE = "restore"  # its own blocks, from host memory


class Admission(NamedTuple):
    sequence: Sequence
    source: AdmissionSource
    start: int  # tokens whose keys and values are in the cache already
    sibling: Sequence | None  # the sequence whose blocks a FORK shares
    hit: Hit | None = None  # of a PREFIX


class Preemption(NamedTuple):
    sequence: Sequence
    offload: bool  # move its blocks to host memory; else drop them and recompute


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step. They are made on counts; a plan names no block id but those of
    its hits, which commit looks up again where the cache has changed since.
    """

    step: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    # those with reservations, in the policy's order: the first that was never preempted and cannot
    # start for want of blocks, whose reservation grows from its first such step, and preempted ones
    blocked: tuple[Sequence, ...] = ()
    # what the cache has of sequences that go on waiting
    looks: tuple[tuple[Sequence, Hit], ...] = ()


@dataclass(slots=True)
class Work:
    """The device's work for one committed plan, in this order: ``offload``, ``restore``,
    ``copies``, then the forward pass of ``rows``. Pairs are (from unit, to unit); a unit is a block
    id of one layer group.
    """

    step: int
    rows: list[Row] = field(default_factory=list)
    offload: list[tuple[int, int]] = field(default_factory=list)  # device unit → host unit
    restore: list[tuple[int, int]] = field(default_factory=list)  # host unit → device unit
    # device unit → device unit: the partial last blocks of forks
    copies: list[tuple[int, int]] = field(default_factory=list)

    def subset(self, rows: Iterable[Row]) -> "Work":
        """The step with these rows only and without copies: a rerun must not repeat them."""
        return Work(self.step, list(rows))

    def living(self) -> "Work":
        """The step without the rows of sequences that ended since its commit: dead rows, which
        nobody sees.
        """
        if FINAL.isdisjoint([row.sequence.status for row in self.rows]):
            return self
        return self.subset(row for row in self.rows if row.sequence.status not in FINAL)


class Result(NamedTuple):
    """The device's result for a row that samples or scores its prompt; ``failure`` ends
    that sequence only. ``token`` counts only where the row samples. ``prompt``: log-probabilities
    of the prompt's tokens after those that are scored already.
    """

    token: int
    logprobs: Any = None
    failure: Failure | None = None
    prompt: tuple[TokenLogprobs, ...] = ()


class DeviceLostError(Exception):
    """The device can run no further step: its context has failed, or one of the processes that
    share the model has ended.
    """


class Token(NamedTuple):
    """A new token; ``index`` counts from 0. ``finish`` is set on a sequence's last token, which is
    also its only finish event: no Finished follows. ``prompt``, with the first token of a choice
    that scored it: the log-probabilities of the prompt's tokens from the second on.
    """

    sequence: Sequence
    token: int
    index: int  # type: ignore[assignment]  # replaces tuple.index, which an event does not need
    logprobs: Any
    finish: FinishReason | None
    prompt: tuple[TokenLogprobs, ...] = ()


class Finished(NamedTuple):
    """The only finish event of a sequence that was aborted or failed."""

    sequence: Sequence
    reason: FinishReason
    failure: Failure | None = None


Event = Token | Finished
