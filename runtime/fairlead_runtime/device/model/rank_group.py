"""The ranks that compute one model together: what they exchange, over torch.distributed.

Owns the process group of this process: NCCL on GPUs, gloo on a CPU. Every rank must make the same
calls in the same order. Nothing here listens on an address that other machines reach, and nothing
waits for a message between two steps, so an idle engine meets no timeout.
"""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not listed

# Of one sum. A rank that has ended is noticed by its leader; one that is slow must only be slow.
PATIENCE = timedelta(hours=1)


def is_taken() -> bool:
    """Whether this process has its process group already: torch.distributed has one for each."""
    return bool(dist.is_initialized())


class RankGroup:
    """``rank`` of ``size``, as one process sees them. ``store`` is the path of an empty file that
    all ranks can open; ``ready`` returns once every rank is about to meet the others.
    """

    def __init__(self, rank: int, size: int, store: str, ready: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._ready = ready
        self._device = torch.device("cpu")
        self._connected = False

    def connect(self, device: torch.device) -> None:
        """Connect the ranks, which compute on ``device``; once, before the first sum."""
        self._ready()
        self._device = device
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(self._store, self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )
        self._connected = True

    def abort(self) -> None:
        """Let no sum on a GPU wait for a rank that has ended. gloo sees the end of its sockets."""
        if self._connected and (world := dist.group.WORLD) is not None:
            world.abort()

    def close(self) -> None:
        """Forget the others, which may have ended. Ranks that have not met leave alone the process
        group that somebody else made in this process.
        """
        self.abort()  # NCCL's own end is one more thing that ranks do together
        if self._connected and dist.is_initialized():
            dist.destroy_process_group()
        self._connected = False

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, which may be changed."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_true(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        return self._count(mine) == self.size

    def same_everywhere(self, mine: bool) -> bool:
        """Whether every rank says the same."""
        return self._count(mine) in (0, self.size)

    def _count(self, mine: bool) -> int:
        """How many ranks say yes."""
        return int(self.sum(torch.tensor(int(mine), device=self._device)))

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x`` on every rank, written into that of the others."""
        dist.broadcast(x, src=0)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Join, on rank 0, every rank's ``x`` side by side along the last dimension, elsewhere
        ``x``.
        """
        if not x.numel():  # no logits in this step
            return x.new_empty(*x.shape[:-1], x.shape[-1] * self.size)
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, shards, dst=0)
        return x if shards is None else torch.cat(shards, dim=-1)
