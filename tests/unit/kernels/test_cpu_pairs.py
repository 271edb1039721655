"""Products of weights in bfloat16 by AVX-512 BF16: exact where floats are, the same bits beside
whatever other rows, and a row of x rounded once.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.cpu.cpu_products import BiasedWeight, CpuMlp, CpuProducts
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Packed
from support.full import LONG_FORM
from support.kernel_sets import PRODUCT_SETS

SETS = [name for name in PRODUCT_SETS if "+" in name and library.load(name).bfloat16]

_SKIPPED = pytest.mark.skip(reason="needs a processor with AVX-512 BF16 and the C++ kernels")
every_set = pytest.mark.parametrize(
    "instruction_set", SETS or [pytest.param("none", marks=_SKIPPED)]
)


def integers(rows: int, columns: int) -> Tensor:
    """Whose products and sums are floats without rounding."""
    return torch.randint(-8, 9, (rows, columns)).float()


def pack(ours: cpu_operations.CpuOperations, *weights: Tensor) -> Packed:
    weight = ours.pack(weights, dtype=torch.bfloat16, pairs=True)
    assert weight.data.shape[1:] == (-(-weight.columns // 2), 32, 2)
    return weight


@every_set
@settings(max_examples=400 if LONG_FORM else 60, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 40), st.integers(250, 270)),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    columns=st.one_of(st.integers(1, 70), st.integers(2040, 2052), st.integers(4090, 4100)),
    seed=st.integers(0, 2**31),
)
def test_a_product_of_pairs_is_exact_where_floats_are(
    instruction_set: str, tokens: int, rows: list[int], columns: int, seed: int
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    weights, x = [integers(count, columns) for count in rows], integers(tokens, columns)
    bias = integers(1, sum(rows))[0]
    packed = pack(ours, *weights)
    got = ours.linear(x, packed, bias)
    assert torch.equal(got, x @ torch.cat(weights).t() + bias)
    assert torch.equal(ours.unpack(packed, 0, sum(rows)), torch.cat(weights))
    values, places = ours.likeliest(x, packed, bias)
    assert torch.equal(values, got.max(dim=1).values)
    assert torch.equal(got.gather(1, places[:, None])[:, 0], values)


@every_set
def test_a_row_has_the_same_bits_beside_other_rows(instruction_set: str) -> None:
    torch.manual_seed(0)
    ours = cpu_operations.load(instruction_set)
    packed, x = pack(ours, torch.randn(70, 2100)), torch.randn(300, 2100).bfloat16().float()
    together = ours.linear(x, packed)
    for first, count in ((0, 1), (3, 2), (7, 14), (100, 15), (299, 1)):
        assert torch.equal(ours.linear(x[first : first + count], packed), together[first:][:count])


@every_set
def test_x_is_rounded_to_bfloat16_as_torch_rounds(instruction_set: str) -> None:
    torch.manual_seed(0)
    ours = cpu_operations.load(instruction_set)
    packed, x = pack(ours, torch.randn(64, 129)), torch.randn(20, 129)
    x[3, 5], x[4, 128] = float("nan"), float("inf")
    got, rounded = ours.linear(x, packed), ours.linear(x.bfloat16().float(), packed)
    torch.testing.assert_close(got, rounded, rtol=0, atol=0, equal_nan=True)
    assert got[3].isnan().all()
    assert not got[[*range(3), *range(5, 20)]].isnan().any()
    assert not torch.equal(got[:3], x[:3] @ ours.unpack(packed, 0, 64).t())


@every_set
def test_products_of_one_input_and_mlps_are_those_of_their_matrices(instruction_set: str) -> None:
    torch.manual_seed(0)
    ours = cpu_operations.load(instruction_set)
    gate, up, down = (
        BiasedWeight(pack(ours, torch.randn(n, k))) for n, k in ((50, 33), (50, 33), (7, 50))
    )
    x = torch.randn(40, 33)
    products = CpuProducts(ours.library, [gate, up])(x)
    alone = [ours.linear(x, part.weight) for part in (gate, up)]
    assert all(torch.equal(*pair) for pair in zip(products, alone, strict=True))
    gated = reference.gated(torch.cat(alone, dim=1), "silu")
    mlp = CpuMlp(ours.library, gate, up, "silu", down)
    # A number of the gated ones that lies between two of bfloat16 may be rounded to either.
    torch.testing.assert_close(mlp(x), ours.linear(gated, down.weight), rtol=0.01, atol=0.5)


@every_set
def test_weights_lie_in_pairs_only_where_that_is_asked_for(
    instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, weight = cpu_operations.load(instruction_set), torch.randn(5, 6)
    plain = ours.pack([weight], dtype=torch.bfloat16)
    in_float32 = ours.pack([weight], pairs=True)
    assert [x.data.shape[1:] for x in (plain, in_float32)] == [(6, 32)] * 2
    with pytest.raises(ValueError, match="several widths or types"):
        CpuProducts(ours.library, [BiasedWeight(plain), BiasedWeight(pack(ours, weight))])
    monkeypatch.setattr(ours.library, "bfloat16", False)
    other = ours.pack([weight], dtype=torch.bfloat16, pairs=True)
    assert torch.equal(other.data, plain.data)
