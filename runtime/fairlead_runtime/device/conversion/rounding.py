"""What rounding does to a computation: the judge of two results that should be the same but for it.

Owns the noise of a result, measured on the weights that are served. Transformers' own modules
compute it again and again, each time with all that they read changed at random by as much as
rounding changes it; another result may then differ by a few times of what came of that, by element
and by token. So an outlier may be as wrong as its own sums make it, and nothing beside it, where a
bound in units of all elements is too wide for most of them and too narrow for the outlier.

A product of K terms counts as √K roundings: its sum is rounded K times, in an order that differs
from kernel to kernel (N. Higham, T. Mary, "A new approach to probabilistic rounding error
analysis", 2019). The changes are drawn from a fixed seed: the same weights and the same tokens have
the same noise in every start.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fairlead_runtime.device.conversion.float32_view import has_weights

SAMPLES = 4
UNIT = 2.0**-23  # the share by which rounding changes what a module reads: twice float32's own
# How many times the noise a result may be away: a whole token's as a root mean square, a single
# element. On trained weights right kernels reach 4 and 19, a head scaled by 1.01 reaches 33 and 126
# (docs/design/0015-rounding.md).
TOKEN, ELEMENT = 12.0, 64.0
TINY = 1e-30  # where nothing moves a result, as zeros


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """The distance by which rounding moves each element of a result [T, N]."""

    size: Tensor

    @classmethod
    def of(
        cls, want: Tensor, again: Callable[["Changes"], Iterable[Tensor]], rounding: float = 0.0
    ) -> Self:
        """The noise of ``want`` [T, N], which ``again`` computes with the changes given, SAMPLES
        times, each with others: one after the other, or as a batch [SAMPLES, T, N], for which
        weights are read once. ``rounding``: that of the other result's products
        (``Packed.rounding``).
        """
        return cls.from_samples(want, again(Changes(want.device, rounding)))

    @classmethod
    def from_samples(cls, want: Tensor, samples: Iterable[Tensor]) -> Self:
        """The noise of ``want`` [T, N], of which these are changed ones."""
        exact = want.double()
        total, count = torch.zeros_like(exact), 0
        for sample in samples:
            total += (sample.double() - exact).square()
            count += 1
        moved = (total / count).sqrt()
        # A few samples of one element may all be small by chance: those beside it are not.
        moved = torch.maximum(moved, moved.median(dim=-1, keepdim=True).values)
        return cls(moved + UNIT * exact.abs())

    def explains(self, got: Tensor, want: Tensor) -> bool:
        """Whether rounding explains the difference of two results [T, N]."""
        if got.shape != want.shape:
            return False
        times = (got.double() - want.double()) / self.size.clamp(min=TINY)
        token = times.square().mean(dim=-1).sqrt()
        return bool((token <= TOKEN).all() and (times.abs() <= ELEMENT).all())

    def explains_at(self, places: Tensor, got: Tensor, want: Tensor) -> bool:
        """Whether it explains that of one element per token [T], at ``places`` int64 [T]."""
        size = self.size.gather(1, places[:, None])[:, 0].clamp(min=TINY)
        return bool(((got.double() - want.double()).abs() <= ELEMENT * size).all())


class Changes:
    """Random changes of tensors by about as much as rounding changes their elements; what products
    take also by ``rounding`` of its row's largest. ``leaves``, (n, T): the first n of a step's T
    tokens, along a tensor's first dimension of that size, stay as they are.
    """

    def __init__(
        self, device: torch.device, rounding: float = 0.0, leaves: tuple[int, int] | None = None
    ) -> None:
        self._rounding = rounding
        self._leaves = leaves
        self._generator = torch.Generator(device).manual_seed(0)

    def of(self, x: Any, terms: int = 1) -> Any:
        """The values with every element changed as ``terms`` roundings change a sum; with more than
        one term also as products round what they multiply. Integers stay as they are.
        """
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        changed = x * (1 + UNIT * terms**0.5 * self._draw(x)).to(x.dtype)
        if self._rounding and terms > 1:
            largest = x.abs().amax(dim=-1, keepdim=True)
            changed = changed + largest * (self._rounding * self._draw(x)).to(x.dtype)
        return changed

    def _draw(self, x: Tensor) -> Tensor:
        """Numbers from -1 to 1, as many as x has."""
        kind: Any = {"device": x.device, "dtype": torch.float32}
        drawn = 2 * torch.rand(x.shape, generator=self._generator, **kind) - 1
        if self._leaves is not None and self._leaves[1] in x.shape:
            count, tokens = self._leaves
            drawn.narrow(x.shape.index(tokens), 0, count).zero_()
        return drawn

    @contextmanager
    def inside(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside the ``with`` block each of these modules that has weights reads changed inputs;
        one that multiplies no fractions by them, as embeddings, or has none but buffers, as rotary
        embeddings, gives changed results.
        """

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self.of(x, _terms(module, x)) for x in inputs)

        def after(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
            if has_weights(module) and any(
                isinstance(x, Tensor) and x.is_floating_point() for x in inputs
            ):
                return out
            return tuple(map(self.of, out)) if isinstance(out, tuple) else self.of(out)

        with ExitStack() as hooks:
            for module in modules:
                if has_weights(module):
                    hooks.enter_context(module.register_forward_pre_hook(before))
                elif not any(True for _ in module.buffers(recurse=False)):
                    continue
                hooks.enter_context(module.register_forward_hook(after))
            yield


def _terms(module: nn.Module, x: Any) -> int:
    """How many terms each sum has in which this module takes x."""
    multiplies = any(p.dim() > 1 for p in module.parameters(recurse=False))
    return int(x.shape[-1]) if multiplies and isinstance(x, Tensor) else 1
