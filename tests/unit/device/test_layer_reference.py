"""The reference of a decoder layer's operations against transformers' and torch's own."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as partial_rope
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Activation, LayerOperations, Norm

OPERATIONS: LayerOperations = reference  # mypy checks every signature here
TOKENS, QUERY, KV, DIM = 7, 4, 2, 8


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_packed_product_is_the_products_of_its_parts_side_by_side() -> None:
    weights = [torch.randn(rows, 24) for rows in (16, 5, 9)]
    x, bias = torch.randn(TOKENS, 24), torch.randn(30)
    packed = reference.pack(weights)
    assert (packed.rows, packed.columns, packed.nbytes) == (30, 24, 30 * 24 * 4)
    want = torch.cat([F.linear(x, weight) for weight in weights], dim=1)
    check(reference.linear(x, packed), want)
    check(reference.linear(x, packed, bias), want + bias)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_adds_the_residual_first_and_returns_the_sum(
    offset: float, with_residual: bool
) -> None:
    x, residual = torch.randn(TOKENS, 24), torch.randn(TOKENS, 24)
    module = GemmaRMSNorm(24, eps=1e-3) if offset else LlamaRMSNorm(24, eps=1e-3)
    module.weight.data.copy_(torch.randn(24))
    total = x + residual if with_residual else x
    norm = Norm(module.weight.data, 1e-3, offset)
    normed, kept = reference.norm(x, norm, residual if with_residual else None)
    check(normed, module(total).detach())
    assert torch.equal(kept, total)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_centered_norm_is_torchs_layer_norm(offset: float, biased: bool) -> None:
    x, weight = torch.randn(TOKENS, 24) + 3, torch.randn(24)
    bias = torch.randn(24) if biased else None
    normed, kept = reference.norm(x, Norm(weight, 1e-3, offset, bias, centered=True))
    check(normed, F.layer_norm(x, (24,), weight + offset, bias, eps=1e-3))
    assert torch.equal(kept, x)


@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_rotates_queries_and_keys_as_transformers_does_and_fills_the_slots(
    rotated: int, normed: bool
) -> None:
    qkv = torch.randn(TOKENS, (QUERY + 2 * KV) * DIM)
    angles = torch.randn(TOKENS, rotated // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (Norm(torch.randn(DIM), 1e-6) for _ in range(2))
    slots = torch.tensor([17, 0, 5, 6, 23, 11, 12])
    keys, values = (torch.zeros(6, 4, KV, DIM) for _ in range(2))
    norms = (q_norm, k_norm) if normed else (None, None)
    got = reference.rope_write(qkv, cos, sin, slots, keys, values, *norms)
    heads = qkv.view(TOKENS, -1, DIM)
    query, key, value = heads[:, :QUERY], heads[:, QUERY : QUERY + KV], heads[:, QUERY + KV :]
    if normed:
        query = F.rms_norm(query, (DIM,), q_norm.weight, 1e-6)
        key = F.rms_norm(key, (DIM,), k_norm.weight, 1e-6)
    rope = apply_rotary_pos_emb if rotated == DIM else partial_rope
    query, key = rope(query, key, cos, sin, 1)
    check(got, query)
    for cache, written in ((keys, key), (values, value)):
        flat = cache.view(-1, KV, DIM)
        check(flat[slots], written)
        assert int((flat.abs().sum((1, 2)) > 0).sum()) == TOKENS


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("gelu_tanh", "gelu_new"),
        ("relu", "relu"),
        ("relu2", "relu2"),
    ],
)
def test_the_first_half_is_activated_and_multiplies_the_second(
    activation: Activation, name: str
) -> None:
    gate, up = torch.randn(TOKENS, 12), torch.randn(TOKENS, 12)
    got = reference.gated(torch.cat([gate, up], dim=1), activation)
    check(got, ACT2FN[name](gate) * up)
    check(reference.activate(gate, activation), ACT2FN[name](gate))


def test_half_precision_comes_back_in_its_own_type() -> None:
    x = torch.randn(TOKENS, 24, dtype=torch.bfloat16)
    packed = reference.pack([torch.randn(8, 24, dtype=torch.bfloat16)])
    keys, values = (torch.zeros(2, 4, 1, 8) for _ in range(2))
    angles = torch.zeros(TOKENS, 8)
    normed, kept = reference.norm(x, Norm(torch.ones(24, dtype=torch.bfloat16), 1e-6), x)
    query = reference.rope_write(x, angles.cos(), angles.sin(), torch.arange(TOKENS), keys, values)
    parts = (reference.linear(x, packed), normed, kept, query, reference.gated(x, "silu"))
    assert {part.dtype for part in parts} == {torch.bfloat16}
