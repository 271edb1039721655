"""What takes the place of modules of a model and of their weights: proven, then applied.

Owns the way back. Proof may come before or after ``apply``: where it fails, the model is as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """New ``forwards`` of modules, and the ``weights`` that nobody reads once they are there.

    ``give_back`` lets the system have the memory of a matrix before it is dropped. ``restore``
    gives the modules back what packing has taken of their weights.
    """

    forwards: Mapping[nn.Module, Callable[..., Tensor]] = field(default_factory=dict)
    weights: Sequence[nn.Parameter] = ()
    give_back: Callable[[Tensor], None] | None = None
    restore: Callable[[], None] | None = None

    def prove(self, same: Callable[[], bool], reason: str) -> None:
        """Undo, and raise DoesNotFitError with this reason, where ``same`` is false. Undo where it
        raises, too.
        """
        proven = False
        try:
            proven = same()
        finally:
            if not proven:
                self.undo()
        if not proven:
            raise DoesNotFitError(reason)

    def apply(self) -> None:
        for module, forward in self.forwards.items():
            vars(module)["forward"] = forward
        for weight in self.weights:
            if self.give_back is not None and weight.dim() > 1:
                self.give_back(weight.data)
            weight.data = weight.new_empty(0)

    def undo(self) -> None:
        for module in self.forwards:
            vars(module).pop("forward", None)
        if self.restore is not None:
            self.restore()


def by_rows(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A module's ``forward`` [..., K] → [..., N] by what computes [T, K] → [T, N], T = 0 too."""

    def forward(x: Tensor) -> Tensor:
        rows = compute(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], rows.shape[-1])

    return forward
