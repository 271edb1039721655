"""The memory that operations of torch take."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Adds up the bytes of new tensors, whether they were freed since or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        known = {x.untyped_storage().data_ptr() for x in given}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.nbytes += out.nbytes
        return out
