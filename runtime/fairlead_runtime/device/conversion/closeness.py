"""Whether two results come from the same function, one recorded and one computed.

Owns how much they may differ. It compares torch with torch, one operation of a recognized part at a
time, to tell functions apart; whether other kernels compute that part is ``rounding``'s to say.
"""

from torch import Tensor

# Two results of float32 are equal within this share of their size; other functions differ by more.
CLOSE = 1e-4
ROUNDING = 1e-6  # of the larger part of a sum


def close(got: Tensor, want: Tensor, residual: Tensor | None = None) -> bool:
    """Whether both come from the same function; with ``residual``, whether ``got`` is the sum of
    the others. A small ``want`` beside a large residual must be as exact as it is alone.
    """
    if got.shape != want.shape:
        return False
    difference, slack = got.double() - want.double(), 0.0
    if residual is not None:
        difference = difference - residual.double()
        slack = ROUNDING * float(residual.abs().max())
    largest = CLOSE * float(want.double().square().mean().sqrt()) + slack
    return bool(difference.abs().max() <= largest)


def factor_of(total: Tensor, residual: Tensor, branch: Tensor) -> float | None:
    """The number f with ``total = residual + f * branch``, to six digits; None if there is none."""
    if not total.shape == residual.shape == branch.shape:
        return None
    x = branch.double()
    share = ((total.double() - residual.double()) * x).sum() / x.square().sum()
    factor = float(f"{float(share):.6g}")
    return factor if close(total, factor * branch, residual) else None


def same_rows(got: Tensor, want: Tensor) -> bool:
    """Whether both have the same rows, ``want`` [T, N]."""
    return got.numel() == want.numel() and close(got.reshape(want.shape), want)
