"""A stand-in of CUDA graphs that records a step's operations and replays them on a CPU.

A tape of every operation between tensors, with the very tensors that it read and wrote: a replay
reads no variable of Python, so a number, a shape or a tensor that the step took from the host stays
what it was, as in a graph. Kernels that are no operation of torch, those of the stand-in of
flashinfer's wrappers, are taped as launches, and read what they find at their addresses.

It is stricter than CUDA, where CUDA would compute garbage:

- a tensor that the step did not make must be among those that ``kept`` names: others may be freed;
- an operation that waits for the device, or whose shape depends on data, cannot be recorded;
- what the step made is filled with NaN (or -7) before each replay, and after the record, which
  leaves every other tensor as it was: nothing that was computed once can be read again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support import flashinfer_standin

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "item",
    "unique2",
    "_unique2",
    "_grouped_mm",  # but in bfloat16 on the GPUs that torch has a kernel for
}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def name_of(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operation, on a device, waits for it: for a number, or for a result's shape."""
    name = name_of(func)
    masks = tensors(args[1]) if name in ("index", "index_put_", "_index_put_impl_") else []
    return name in WAITS or any(x.dtype is torch.bool for x in masks)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that the operation changes."""
    values = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors(values, kwargs.get("out"))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """``kept``: tensors that live as long as the graph; None: all do."""

    def __init__(self, kept: Iterable[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self._kept = None if kept is None else {storage(x) for x in kept}
        self._own: dict[int, Tensor] = {}  # by storage, a tensor over all that the step made
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # changed tensors, as they were
        self._replays: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        given = tensors(args, kwargs)
        if waits(func, args):
            raise RuntimeError(f"capture: {name} waits for the device")
        for x in given:
            self._check(name, x)
        if func._schema.is_mutable:
            self._remember(written(func, args, kwargs))
        out = func(*args, **kwargs)
        inputs = {storage(x) for x in given}
        made = [x for x in tensors(out) if storage(x) not in inputs]
        self._own |= {storage(x): x for x in made}
        if func._schema.is_mutable:
            self._replays.append(lambda: func(*args, **kwargs))
        elif made and name not in EMPTY:
            self._replays.append(lambda: self._again(func, args, kwargs, out))
        return out

    def _check(self, name: str, x: Tensor) -> None:
        known = self._kept is None or storage(x) in self._own or storage(x) in self._kept
        if not known and x.dim() and x.numel():  # a scalar becomes an argument of the kernel
            raise RuntimeError(f"capture: {name} reads a tensor {tuple(x.shape)} that nobody keeps")

    def _remember(self, changed: list[Tensor]) -> None:
        """Those that are not the step's own, before the record changes them."""
        for x in changed:
            if storage(x) not in self._own and storage(x) not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._before[storage(x)] = whole, whole.clone()

    @staticmethod
    def _again(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    def launch(self, kernel: Callable[[], None], given: Iterable[Tensor]) -> None:
        """Tape a kernel that reads and writes these tensors."""
        for x in given:
            self._check("a kernel", x)
        with torch.utils._python_dispatch._disable_current_modes():
            kernel()
        self._replays.append(kernel)

    def restore(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        self._spoil()

    def _spoil(self) -> None:
        for x in self._own.values():
            if x.dtype.is_floating_point:
                x.fill_(torch.nan)
            elif x.dtype is not torch.bool:
                x.fill_(-7)

    @torch.inference_mode()
    def replay(self) -> None:
        if not self._replays:
            raise RuntimeError("replay: the graph was reset")
        self._spoil()
        for again in self._replays:
            again()

    def reset(self) -> None:
        self._replays.clear()


class TapeRecorder:
    """``graphs.Recorder`` on a CPU. Without ``kept`` any tensor may be read. ``records`` counts."""

    def __init__(self, kept: Callable[[], Iterable[Tensor]] | None = None) -> None:
        self.nbytes = 0
        self.records = 0
        self._kept = kept

    @torch.inference_mode()
    def record(self, step: Callable[[], object]) -> Tape:
        tape = Tape(None if self._kept is None else self._kept())
        flashinfer_standin.TAPE.append(tape)
        try:
            with tape:
                step()
        finally:
            flashinfer_standin.TAPE.pop()
        tape.restore()
        self.records += 1
        self.nbytes += sum(x.nbytes for x in tape._own.values())
        return tape
