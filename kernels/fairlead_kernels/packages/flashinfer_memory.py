"""Memory that flashinfer's wrappers take of a GPU, for the backend that makes them and for the plan
that counts them. Pure: no tensor, no GPU.
"""

# The package's advice for a workspace. It holds the parts of split rows: at most two tiles for each
# of a GPU's multiprocessors, 128 rows of float32 each, which is 35 MB at 132 of them and a dim of
# 256. Plans at fixed addresses may need more: `split_bytes`.
WORKSPACE_BYTES = 128 << 20
# What each wrapper allocates itself for its plan, and as much pinned host memory.
PLAN_BYTES = 8 << 20


def split_bytes(
    query: int, kv: int, dim: int, rows: int, processors: int = 0, *, older: bool = False
) -> int:
    """Bytes that a plan of ``rows`` decodes at fixed addresses takes of a workspace: the parts of
    split rows, for the most tiles that such a step could have.

    ``query`` and ``kv`` heads of ``dim`` elements, on a GPU with so many multiprocessors, ``older``
    than compute capability 8.0 or not. Without ``processors`` it is what rows alone make of it,
    which is more from some dozens on. Counted as in the package's ``PrefillSplitQOKVIndptr`` and
    ``FA2DetermineCtaTileQ``.
    """
    per_kv = query // kv
    if per_kv > 64 and dim < 256:
        tile = 128
    else:
        tile = 64 if per_kv > 16 or older else 16
    tiles = max(2 * processors // kv, -(-rows * per_kv // tile) + rows - 1)
    parts = -(-tiles * tile // per_kv)
    return sum(-(-query * parts * size * 4 // 16) * 16 for size in (dim, 1))
