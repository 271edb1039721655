"""A mixture's experts on a product of ours: transformers' function, and the choice at start."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from fairlead_runtime.device.model import experts
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig
from support import tiny, triton_standin
from support.engine_rig import paged

WIDTH, INNER = 16, 24


@use_experts_implementation(has_gate=False, has_bias=True, has_post_expert_norm=True)
class Ungated(nn.Module):
    """Experts without a gate, with a bias and a norm behind them, which no tiny model has."""

    def __init__(self, _config: Any) -> None:
        super().__init__()
        self.num_experts = 5
        self.up_proj = nn.Parameter(torch.randn(5, INNER, WIDTH))
        self.up_proj_bias = nn.Parameter(torch.randn(5, INNER))
        self.down_proj = nn.Parameter(torch.randn(5, WIDTH, INNER))
        self.down_proj_bias = nn.Parameter(torch.randn(5, WIDTH))
        self.act_fn = nn.ReLU()
        self.post_expert_norm = nn.LayerNorm(WIDTH)

    def forward(self, *_: Any) -> Tensor:
        raise NotImplementedError


def experts_of(family: str) -> Any:
    model = tiny.build(family)
    return next(module for module in model.modules() if hasattr(module, "is_concatenated"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phimoe", "ungated"])
@pytest.mark.parametrize("tokens", [1, 30])
@torch.inference_mode()
def test_experts_compute_what_transformers_computes(family: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    module: Any = Ungated(None) if family == "ungated" else experts_of(family)
    width = WIDTH if family == "ungated" else tiny.HIDDEN
    hidden = torch.randn(tokens, width)
    # Distinct ones, of which the last gets no token.
    chosen = torch.rand(tokens, module.num_experts - 1).argsort(dim=1)[:, :2]
    shares = torch.rand(tokens, 2)
    experts.register(triton_standin.experts())
    results = [
        ALL_EXPERTS_FUNCTIONS[name](module, hidden, chosen, shares)
        for name in ("grouped_mm", experts.NAME)
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_each_size_and_layout_of_a_models_matrices_is_tried_once() -> None:
    shapes = [tuple(sample.weights.shape) for sample in experts.samples_of(tiny.build("mixtral"))]
    assert shapes == [(4, 64, 128), (4, 64, 64)]
    (up, bias), (down, _) = experts.samples_of(tiny.build("gpt_oss"))
    assert up.is_contiguous()  # stored with inputs first
    assert down.is_contiguous()
    assert bias is not None
    assert bias.shape == (4, 128)
    assert experts.samples_of(tiny.build("llama")) == []


def test_the_reference_keeps_transformers_experts() -> None:
    model = paged("mixtral")
    model.use_experts(triton_standin.experts())
    config = model.model.config
    assert config._experts_implementation == experts.NAME
    for asked, name in ((True, "eager"), (False, "grouped_mm")):
        with model.plain(experts=asked) as plain:
            assert plain.config._experts_implementation == name
        assert config._experts_implementation == experts.NAME


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_model_is_served_on_the_product_that_is_chosen(
    family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = 0
    ours = triton_standin.experts()

    def product(*given: Any) -> Tensor:
        nonlocal launched
        launched += 1
        return ours(*given)

    def choose(samples: list[Any], device: torch.device, kernels: str) -> tuple[Any, str]:
        assert (len(samples), device.type, kernels) == (2, "cpu", "torch")
        return product, "experts in Triton: a reason"

    if family == "mixtral":
        monkeypatch.setattr(selftest, "choose", choose)
    loaded = loading.load(tiny.save(tiny.build(family), tmp_path), config=EngineConfig())
    served, result = selftest.prepare_and_test(loaded, "torch")
    assert str(served.choice).endswith("; experts in Triton: a reason)") is (family == "mixtral")
    assert (launched > 0) is (family == "mixtral")
    assert result.delta < 1e-4
