"""The judge of a kernel's result: what rounding explains, in words what it does not."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fairlead_kernels.interface.not_available import FaultError
from fairlead_kernels.proofs.comparison import TOLERANCE, prove

CASES = [(kind, dtype) for kind, row in TOLERANCE.items() for dtype in row]
EXPECTED = torch.tensor([[0.0, 3.0], [-7.0, 1e-3]])


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("scale", [None, torch.ones(()), torch.tensor([7.0, 3.0])])
def test_a_result_may_be_as_far_away_as_the_table_says_and_no_further(
    kind: str, dtype: torch.dtype, scale: Tensor | None
) -> None:
    unit = 1 + EXPECTED.abs() if scale is None else scale
    first = torch.tensor([[0.0, 0.0], [1.01, 0.0]])
    for sign in (-1, 1):
        allowed = sign * TOLERANCE[kind][dtype] * unit.double()
        near, far = EXPECTED + 0.99 * allowed, EXPECTED + first * allowed
        prove("it", partial(torch.clone, near), EXPECTED, dtype, kind, scale)
        with pytest.raises(FaultError, match=r"^it differs from the reference by .* allowed"):
            prove("it", partial(torch.clone, far), EXPECTED, dtype, kind, scale)


def test_the_refusal_says_which_kernel_how_far_it_is_away_and_what_was_allowed() -> None:
    reason = "^torch's product differs from the reference by 0.5 of 0.01 allowed$"
    with pytest.raises(FaultError, match=reason):
        prove(
            "torch's product",
            lambda: torch.tensor([1.0, 2.0]),
            torch.tensor([1.0, 1.0]),
            torch.bfloat16,
            "operation",
        )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_one_number_that_is_none_is_refused(kind: str, dtype: torch.dtype, wrong: float) -> None:
    result = EXPECTED.clone()
    result[1, 1] = wrong
    for scale in (None, torch.ones(())):
        with pytest.raises(FaultError, match="differs from the reference by"):
            prove("it", lambda: result, EXPECTED, dtype, kind, scale)


def test_where_all_that_was_summed_is_zero_the_result_is_zero() -> None:
    zeros = torch.zeros(3, 4)
    prove("it", lambda: zeros, zeros, torch.float16, "int4", zeros.abs().amax(0))
    with pytest.raises(FaultError, match="differs from the reference by"):
        prove("it", lambda: zeros + 1e-9, zeros, torch.float16, "int4", zeros.abs().amax(0))


def test_a_kernel_that_fails_is_a_reason() -> None:
    def fail() -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    reason = "^it does not run here: RuntimeError: no kernel image is available$"
    with pytest.raises(FaultError, match=reason):
        prove("it", fail, EXPECTED, torch.float32, "sum")
