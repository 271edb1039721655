"""``deterministic`` on an NVIDIA GPU: the kernels whose sums have one order, compared with the
reference and with themselves in other steps, and the canary over whole models. Run with `make gpu`;
without a GPU it fails.
"""

from pathlib import Path

import pytest
import torch

from fairlead_kernels.choice.backend import fixed_kernels
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerKind
from fairlead_kernels.interface.layer import LayerOperations
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from support import device_cases, tiny
from support.gpu_device import DEVICE

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operations(dtype: torch.dtype) -> LayerOperations:
    heads, kinds = Heads(8, 2, 128, 128, dtype), (frozenset({LayerKind(0.1)}),)
    found = fixed_kernels(heads, kinds, DEVICE, "auto").operations
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_a_token_is_the_same_beside_any_others(dtype: torch.dtype) -> None:
    ours = operations(dtype)
    torch.manual_seed(0)
    weight = torch.randn(1000, 4096, device=DEVICE) / 64
    packed = ours.pack([weight], dtype=dtype)
    x = torch.randn(700, 4096, device=DEVICE).to(dtype)
    whole = ours.linear(x, packed)
    want = reference.linear(x[:8].double().cpu(), reference.pack([weight.cpu()], dtype=dtype), None)
    torch.testing.assert_close(whole[:8].double().cpu(), want, rtol=0.02, atol=0.02)
    for part in (slice(699, 700), slice(5, 7), slice(3, 19), slice(100, 229)):
        assert torch.equal(ours.linear(x[part], packed), whole[part]), part


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_is_the_same_in_a_crowd(dtype: torch.dtype, tmp_path: Path) -> None:
    """With chunks and preemption, through the whole engine."""
    folder = tiny.save(tiny.build("gemma2").to(dtype), tmp_path)
    name = str(dtype).removeprefix("torch.")
    assert device_cases.check_deterministic(folder, DEVICE, name) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3_longrope"])
def test_a_model_passes_the_canary(
    family: str, cache: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = loading.load(tiny.save(tiny.build(family).to(dtype), tmp_path), device=DEVICE)
    served, result = selftest.prepare_and_test(loaded, fp8_cache=cache == "fp8", deterministic=True)
    assert served.choice.attention.name == "triton in order"
    assert result.canary is not None
    print(f"{family} in {dtype}: {result}")
