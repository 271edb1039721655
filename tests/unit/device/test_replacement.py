"""What takes the place of modules and weights, and the way back from it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError
from fairlead_runtime.device.conversion.replacement import Replacement, by_rows


def replaced() -> tuple[nn.Linear, Replacement]:
    """A module whose matrix is dropped and restored, and its replacement, which doubles."""
    module = nn.Linear(3, 3, bias=False).requires_grad_(False)
    loaded = module.weight.data.clone()

    def restore() -> None:
        module.weight.data = loaded

    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {module: by_rows(lambda x: 2 * x)}
    return module, Replacement(forwards, list(module.parameters()), restore=restore)


def test_applied_it_computes_in_the_place_of_the_weights() -> None:
    module, replacement = replaced()
    replacement.apply()
    x = torch.randn(2, 4, 3)
    assert torch.equal(module(x), 2 * x)
    assert module(x[:, :0]).shape == (2, 0, 3), "a step may have no tokens for an expert"
    assert module.weight.numel() == 0


def fails() -> bool:
    raise RuntimeError("the pass failed")


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    ("same", "error"), [(lambda: False, DoesNotFitError), (fails, RuntimeError)]
)
def test_after_a_proof_that_fails_the_module_is_as_it_was(
    same: Callable[[], bool], error: type[Exception], applied: bool
) -> None:
    module, replacement = replaced()
    x = torch.randn(2, 4, 3)
    expected: Tensor = module(x)
    if applied:
        replacement.apply()
    with pytest.raises(error):
        replacement.prove(same, "it computes something else")
    assert torch.equal(module(x), expected)


def test_a_matrix_is_given_back_before_it_is_dropped_and_a_vector_is_not() -> None:
    module = nn.Linear(3, 3).requires_grad_(False)
    shapes: list[torch.Size] = []
    parameters = list(module.parameters())
    Replacement({}, parameters, give_back=lambda x: shapes.append(x.shape)).apply()
    assert shapes == [(3, 3)]
    assert [x.numel() for x in parameters] == [0, 0]
