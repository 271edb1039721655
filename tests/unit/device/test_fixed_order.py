"""Torch's operations in an order of their own: a row's bits are the same alone and beside others,
and what is not known to keep them is refused.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from fairlead_runtime.device.model.fixed_order import PIECE, FixedOrder, OtherOrderError

# No multiple of a vector, more than a thread computes at a time in all rows.
WIDTH, ROWS = 203, 61
WEIGHT = torch.randn(37, WIDTH, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(37, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def masked(x: Tensor) -> Tensor:
    mask = x > 0
    mask &= x < 1
    mask |= x > 2
    return torch.where(mask, x, 0)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x + BIAS[0]),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "exp of a part": lambda x: x[..., 5:150].exp(),
    "cosines": lambda x: torch.stack([x.cos(), x.sin()], -1),
    "tanh behind rows with a weight": lambda x: torch.tanh(F.linear(x, WEIGHT, BIAS) / 30) * 30,
    "a norm": norm,
    "softmax": lambda x: x.softmax(-1),
    "a norm with a mean": lambda x: F.layer_norm(x, (WIDTH,)),
    "a weight before columns": lambda x: (WEIGHT @ x.transpose(1, 2)).transpose(1, 2),
    "a weight behind rows": lambda x: x @ WEIGHT.T,
    "a mask": masked,
    "power": lambda x: torch.pow(x.abs(), x.sigmoid()),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in COMPUTED),
        *((name, torch.bfloat16) for name in COMPUTED if "weight" not in name),
    ],
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, dtype: torch.dtype) -> None:
    compute = COMPUTED[name]
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    order = FixedOrder([WEIGHT, BIAS])
    with order:
        together = compute(x)
        rows = [compute(x[:, i : i + 1].clone()) for i in range(ROWS)]
        parts = [compute(x[:, :7]), compute(x[:, 7:])]
    assert torch.equal(torch.cat(rows, 1), together)
    assert torch.equal(torch.cat(parts, 1), together)
    torch.testing.assert_close(together, compute(x))


def test_a_piece_is_what_one_thread_computes_in_whole_vectors() -> None:
    """Also the last one, whose end is filled up, and a tensor without elements."""
    x = torch.randn(3 * PIECE + 1)
    with torch.inference_mode(), FixedOrder([]):
        whole = x.exp()
        assert torch.equal(whole[:PIECE], x[:PIECE].exp())
        assert torch.equal(whole[-1:], x[-1:].exp())
        assert x[:0].view(0, 4).exp().shape == (0, 4)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x @ x.transpose(1, 2), "matmul of two tensors that both depend on the step"),
        (lambda x: F.linear(x, x[0]), "linear with a weight that depends on the step"),
        (lambda x: x.sum(1), "sum over another dimension than the last"),
        (lambda x: x.sum(), "sum over another dimension than the last"),
        (lambda x: x.view(1, 1, -1).repeat(1, 1, 3).mean(-1), "mean of 37149 elements"),
        (lambda x: x.cumsum(1), "aten::cumsum"),
        (
            lambda x: x[0].index_put_((torch.zeros(1).long(),), x[0, :1], accumulate=True),
            "aten::index_put_ that adds up",
        ),
        (lambda x: F.conv1d(x, WEIGHT[:1, None, :1].expand(61, 61, 1)), "aten::convolution"),
        (
            lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
            "aten::_scaled_dot_product",
        ),
    ],
)
def test_what_may_have_another_order_is_refused_by_name(
    compute: Callable[[Tensor], Tensor], name: str
) -> None:
    x = torch.randn(1, ROWS, WIDTH)
    with torch.inference_mode(), FixedOrder([WEIGHT]), pytest.raises(OtherOrderError, match=name):
        compute(x)


def test_a_tensor_without_dimensions_does_not_change_the_type_of_others() -> None:
    x = torch.linspace(0.1, 3.0, 37).bfloat16()
    with torch.inference_mode():
        power = torch.tensor(1.5)
        want = torch.pow(x, power)
        with FixedOrder([]):
            out = torch.pow(x, power)
            alone = torch.pow(power, power)
    assert out.dtype == want.dtype == torch.bfloat16
    assert torch.equal(out, want)
    assert alone.shape == ()
