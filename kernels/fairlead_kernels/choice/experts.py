"""The products of a mixture's experts on GPUs: what they are, and whose a model gets.

Owns the choice, which is made by trying: each candidate multiplies by the model's own weights, is
compared with the reference, and torch's is watched for a wait. docs/design/0009 has the reasons.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fairlead_kernels.gpu import triton_experts
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.not_available import NotAvailableError, fall_back
from fairlead_kernels.proofs.comparison import prove

# Of the tokens that a product is tried on: more for the last expert than a tile has, and some
# without any.
MANY = 70
# Of the outputs so many, the last ones, are compared.
COMPARED = 64


class ExpertProduct(Protocol):
    """The product of each token and the weights of its expert."""

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ends: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply: ``x`` [S, K], sorted by expert, ``weights`` [E, K, N] with any strides,
        ``expert_ends`` int32 [E], where each expert's tokens end, the last S, and ``bias`` [E, N] →
        [S, N]. All but ``expert_ends`` have one type, and nothing of that is read on the host.
        """
        ...


class Matrices(NamedTuple):
    """The ``weights`` [E, K, N] and ``bias`` [E, N] of one product of a model."""

    weights: Tensor
    bias: Tensor | None


def choose(
    samples: Sequence[Matrices], device: torch.device, kernels: str = "auto"
) -> tuple[ExpertProduct | None, str]:
    """The product for a model with matrices like these, and the choice in words. None: the one that
    its code calls, torch's or ``looped_product``. Triton's on GPUs where torch's waits for the
    device or fails, and Triton's does not; ``kernels`` as in ``backend.pick``.
    """
    if not samples or device.type != "cuda" or kernels == "torch":
        return None, ""
    try:
        for sample in samples:
            prove_product(torch_product, sample, "torch's product")
            _prove_no_wait(sample)
    except NotAvailableError as error:
        reason = str(error)
    else:
        return None, "experts in torch"
    try:
        triton_product = triton_experts.load()
        for sample in samples:
            prove_product(triton_product, sample, "Triton's product")
    except NotAvailableError as error:
        return None, f"experts in torch, though {reason}: {fall_back(error)}"
    return triton_product, f"experts in Triton: {reason}"


def torch_product(
    x: Tensor, weights: Tensor, expert_ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``ExpertProduct`` as transformers' code has it, which rounds before it adds the bias. Where
    torch has no kernel for the type and the GPU it reads ``expert_ends`` on the host.
    """
    out = torch.nn.functional.grouped_mm(x, weights, offs=expert_ends)
    if bias is not None:
        places = torch.arange(len(x), device=x.device, dtype=expert_ends.dtype)
        out += bias[torch.searchsorted(expert_ends, places, right=True)]
    return out


def looped_product(
    x: Tensor, weights: Tensor, expert_ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``ExpertProduct`` of one expert after the other, of any widths. It reads ``expert_ends`` on
    the host.
    """
    out = x.new_empty(len(x), weights.shape[2])
    begin = 0
    for expert, end in enumerate(expert_ends.tolist()):
        if end > begin:
            torch.mm(x[begin:end], weights[expert], out=out[begin:end])
            if bias is not None:
                out[begin:end] += bias[expert]
        begin = end
    return out


def groups_in_torch(sample: Matrices, device: torch.device) -> bool:
    """Whether torch's grouped product takes matrices like these on this device: it refuses rows
    that are no multiple of 16 bytes. Tried on the first expert alone.
    """
    weights = sample.weights[:1].to(device)
    x, expert_ends = _tokens(weights)
    try:
        torch_product(x, weights, expert_ends)
    except RuntimeError:
        return False
    return True


def prove_product(product: ExpertProduct, sample: Matrices, name: str) -> None:
    """Compare with the reference for a few tokens. May compile, which takes seconds. Raises
    NotAvailableError with the reason where it does not run or computes something else.
    """
    x, expert_ends = _tokens(sample.weights)
    bias = None if sample.bias is None else sample.bias[:, -COMPARED:]
    expected = reference.expert_product(x, sample.weights[..., -COMPARED:], expert_ends, bias)

    def compute() -> Tensor:
        return product(x, sample.weights, expert_ends, sample.bias)[:, -COMPARED:]

    prove(name, compute, expected, x.dtype, "sum", expected.abs().max())


def _prove_no_wait(sample: Matrices) -> None:
    x, expert_ends = _tokens(sample.weights)
    try:
        with _waits_raise():
            torch_product(x, sample.weights, expert_ends)
    except RuntimeError as error:
        raise NotAvailableError("torch's product waits for the device") from error


@contextmanager
def _waits_raise() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _tokens(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Two tokens for the first expert, one for the middle one, MANY for the last; their ends."""
    experts, columns, _ = weights.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MANY + 3, columns, generator=generator) / columns**0.5
    expert_ends = torch.full((experts,), 2, dtype=torch.int32)
    expert_ends[experts // 2 :] = 3
    expert_ends[-1] = MANY + 3
    return x.to(weights.device, weights.dtype), expert_ends.to(weights.device)
