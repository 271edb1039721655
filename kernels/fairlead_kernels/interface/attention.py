"""The interface of paged attention: ``plan`` once per step, ``run`` once per layer.

Owns the types that the engine and every backend share: the heads of a model, the ragged rows of a
step and what one layer's attention does to its scores. Knows no request, scheduler or kernel.

Terms: a *row* is one sequence's share of a step, ``count`` consecutive tokens of it. A *block*
holds ``block_size`` tokens of one layer; a row's *table* lists its blocks in order, so token ``p``
is in block ``table[p // block_size]`` at offset ``p % block_size``. A token's *slot* is ``block *
block_size + offset``.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from fairlead_kernels.formats.quantize import FP8

NULL = -1  # a table entry whose block was freed because the window has passed it


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a model, equal in all its layers.

    ``query`` heads share ``kv`` key-value heads evenly; ``dim`` is the width of a query and a key,
    ``value_dim`` that of a value; ``dtype`` is the model's type, and the cache's too unless
    ``fp8_cache``: then keys and values are kept as float8_e4m3fn, without a scale.
    """

    query: int
    kv: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    fp8_cache: bool = False

    def __post_init__(self) -> None:
        if self.kv < 1 or self.query % self.kv:
            raise ValueError(
                f"heads: {self.query} query heads cannot share {self.kv} key-value heads evenly"
            )

    @property
    def per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.query // self.kv

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of cached keys and values."""
        return FP8 if self.fp8_cache else self.dtype


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """The rows of one step, for the layers of one group.

    ``query_starts`` int32 [B+1]: row b owns the packed tokens query_starts[b]:query_starts[b+1],
    its newest ones. ``kv_lens`` int32 [B]: tokens of row b in the cache, this step's included, so
    its first query has position kv_lens[b] - count. ``tables`` int32 [B, W]: blocks, undefined
    before the first that the row's window sees and beyond its last. ``window``: position p sees the
    keys p-window+1..p; None: all up to p. ``group``: the index of the layer group; groups with one
    window have rows alike and blocks of their own. All these tensors are on the host, unless there
    are ``rows`` int64 [B]: then ``tables`` int32 [R, W] has the blocks of R sequences on the
    device, and these are, on the host, each row's place there. Only a DecodeAttention takes them.
    """

    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    tables: torch.Tensor
    block_size: int
    window: int | None
    group: int = 0
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The rows of a step of decodes alone, for the layers of one group: B rows of one query each,
    whose blocks are known to the device and not to the host.

    ``kv_lens`` int32 [B] on the host as in RaggedRows. On the device: ``lens`` int64 [B], the same;
    ``tables`` int32 [R, W], the blocks of R sequences as in RaggedRows; ``rows`` int64 [B], each
    row's place in ``tables``. ``window`` and ``group`` as in RaggedRows.
    """

    kv_lens: torch.Tensor
    lens: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    block_size: int
    window: int | None
    group: int = 0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties of a layer that a plan may depend on: a LayerSpec without its sinks' values."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


# The kinds of layers in each layer group of a model, in the order of the groups' indices.
GroupKinds = tuple[frozenset[LayerKind], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """The treatment of scores in one layer: ``softmax(softcap * tanh(scale * q·k / softcap))``.

    ``softcap`` None: no cap. ``sinks`` [query heads]: a score per head that takes its share of the
    softmax and contributes no value (gpt_oss); None: no sinks. ``window`` must be that of the plan.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def kind(self) -> LayerKind:
        return LayerKind(self.scale, self.window, self.softcap, self.sinks is not None)

    def check_window(self, planned: int | None) -> None:
        """Raise ValueError where ``planned``, the window of a plan, is another than the layer's."""
        if self.window != planned:
            raise ValueError(
                f"window: the layer has {self.window}, the plan was made for {planned}"
            )


class AttentionBackend(Protocol):
    """Paged attention over ragged rows. One object serves one model and holds scratch memory, so it
    runs one step at a time.
    """

    name: str

    def plan(self, ragged: RaggedRows) -> Any:
        """Compute on the host, once per step and group, whatever does not depend on the layer. May
        end the group's plan of the step before.
        """

    def run(
        self,
        plan: Any,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
    ) -> torch.Tensor:
        """Attention of one layer. This step's keys and values are already in the cache.

        query [T, query heads, dim]; key_cache [blocks, block_size, kv heads, dim]; value_cache
        likewise with value_dim, both in the cache's type. Returns [T, query heads, value_dim] in
        the query's dtype.
        """


@runtime_checkable
class DecodeAttention(AttentionBackend, Protocol):
    """A backend that can plan rows whose block tables are on the device: ``plan`` any, with their
    ``rows``, without a wait, and decodes ``plan_decodes``.

    ``fixed_nbytes``: device bytes of its plans at addresses that stay, beside the reserve.
    """

    @property
    def fixed_nbytes(self) -> int: ...

    def reserve(self, rows: int) -> int:
        """Make the memory now that steps of at most so many rows of one query need, and other steps
        with as many such rows; how many bytes of the device that is, plans beside.
        """

    def plan_decodes(self, decodes: DecodeRows, room: int = 0) -> Any:
        """Plan decodes from the lengths on the host alone: nothing waits for the device.

        With ``room``, a number of blocks that no such step of this group exceeds, ``run`` reads
        this plan and every later one for as many rows at the same addresses: a captured ``run``
        follows the newest of them, with the ``tables`` that it was captured with.
        """
