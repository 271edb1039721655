"""The values that flow through a step: Limits → Plan → Work → Result → events.

Owns their shapes and nothing else: no queue, no block pool, no decision is made here.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fairlead_runtime.config import EngineConfig, SchedulerType
from fairlead_runtime.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What one scheduler may use. ``num_blocks`` counts whole-model blocks, ``offload_units`` host
    units.

    A unit is ``block_size`` tokens in the layers of one layer group; a whole-model block is one
    unit per group.
    """

    policy: SchedulerType
    max_batch_tokens: int
    max_requests: int
    safety_margin: float
    block_size: int
    num_blocks: int
    max_model_len: int
    allow_block_sharing: bool = True
    offload_units: int = 0  # 0: preemption is by soft reset only

    @classmethod
    def of(
        cls, config: EngineConfig, *, num_blocks: int, max_model_len: int, offload_units: int = 0
    ) -> Self:
        """From the configuration and the three numbers that sizing resolved."""
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
        )

    @property
    def capacity(self) -> int:
        """Tokens of prompt plus output that one request may reach: what NEVER is measured against."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class VerdictKind(enum.StrEnum):
    OK = "ok"  # would start in the next step
    LATER = "later"  # waits for others
    NEVER = "never"  # cannot fit even alone: refuse it


class Verdict(NamedTuple):
    """The answer to "may this request come in"; ``max_tokens`` is resolved: an omitted one is
    clipped to fit.
    """

    kind: VerdictKind
    message: str
    max_tokens: int


class Row(NamedTuple):
    """One sequence's share of a step: computes ``tokens[start : start + count]``."""

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # a row's width; tuple.count is of no use on a row
    samples: bool  # start + count == len(tokens): the row's last token predicts a new one


class AdmissionSource(enum.StrEnum):
    """Where an admitted sequence's first computed tokens come from."""

    PREFIX = "prefix"  # the prefix cache, possibly nothing of it
    FORK = "fork"  # a sibling's prompt blocks, tail copied on write
    RESTORE = "restore"  # its own blocks, from host memory


class Admission(NamedTuple):
    sequence: Sequence
    source: AdmissionSource
    start: int  # tokens whose keys and values need no computing
    sibling: Sequence | None  # whose blocks a FORK shares


class Preemption(NamedTuple):
    sequence: Sequence
    offload: bool  # to host memory; else soft reset: recompute


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step will do, decided on counts alone: no block id is in it."""

    step: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()


@dataclass(slots=True)
class Work:
    """What the device must do for one committed plan, in this order: ``offload``, ``restore``,
    ``copies``, then the forward pass of ``rows``. Pairs are (from unit, to unit); a unit is a block
    id of one layer group.
    """

    step: int
    rows: list[Row] = field(default_factory=list)
    offload: list[tuple[int, int]] = field(default_factory=list)  # device unit → host unit
    restore: list[tuple[int, int]] = field(default_factory=list)  # host unit → device unit
    copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # device → device: copy-on-write tails

    def subset(self, rows: Iterable[Row]) -> "Work":
        """The same step with these rows only and without its copies, which run once however often
        rows rerun.
        """
        return Work(self.step, list(rows))


class Result(NamedTuple):
    """What the device answered for one sampling row; ``error`` fails that sequence only."""

    token: int
    logprobs: Any = None
    error: str | None = None


class Token(NamedTuple):
    """A new token, ``index`` counting from 0. ``finish`` is set on a sequence's last one, which is
    then also its one finish event: no Finished follows.
    """

    sequence: Sequence
    token: int
    index: int  # type: ignore[assignment]  # tuple.index is of no use on an event
    logprobs: Any
    finish: FinishReason | None


class Finished(NamedTuple):
    """The one finish event of a sequence that ended without a token: aborted or failed."""

    sequence: Sequence
    reason: FinishReason
    message: str = ""


Event = Token | Finished
