"""The comparison of a kernel with its definition, once at start, where it will run.

Owns how far a result may be away from the definition's; each proof brings its own numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fairlead_kernels.interface.not_available import FaultError, brief

# The largest difference that rounding explains, by what is computed and its type. What right
# kernels reach, and where that was measured: docs/design/0015-rounding.md.
TOLERANCE = {
    # Attention and the products of experts. float32 on tensor cores is away by 0.0005.
    "sum": {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.05},
    # A layer's operations, rounded once: bfloat16 moves a value by 0.004 of itself.
    "operation": {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.01},
    # A package's products, which round weights to 16 bits, too: by 2^-11 and 2^-8 of themselves.
    "int4": {torch.float16: 0.005, torch.bfloat16: 0.02},
}
TINY = torch.finfo(torch.float32).tiny  # of a scale: what was summed may be all zeros


def prove(
    name: str,
    compute: Callable[[], Tensor],
    expected: Tensor,
    dtype: torch.dtype,
    kind: str,
    scale: Tensor | None = None,
) -> None:
    """Compare a result in ``dtype`` with the ``expected`` one. Their difference is a share of
    ``scale``, which says what was summed; None: of 1 and the expected value together. Raises
    FaultError with the reason where ``compute`` fails, or gives something else or NaN.
    """
    exact, allowed = expected.double(), TOLERANCE[kind][dtype]
    scale = 1 + exact.abs() if scale is None else scale.clamp(min=TINY)
    try:
        difference = float(((compute().to(exact) - exact).abs() / scale).max())
    except Exception as error:
        raise FaultError(f"{name} does not run here: {brief(error)}") from error
    if not difference <= allowed:
        raise FaultError(
            f"{name} differs from the reference by {difference:.2g} of {allowed:g} allowed"
        )
