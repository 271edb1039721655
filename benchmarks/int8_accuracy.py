"""How far int8 weights move a model's logits, alone and with rounded activations.

Plain transformers in float32 on the CPU: as it is; with the weights of the layers' matrices rounded
to int8 times a scale per row; and with their inputs rounded too: to two digits of base 256 times a
scale per token, as the C++ kernels do with VNNI, to int8 times a scale per token, and times one for
each GROUP elements of a token. Against the plain model, and against the one with int8 weights
alone. Differences of logits in units of a token's spread (its logits' standard
deviation), and how often the likeliest token stays. The models of cpu_kernels.py: the demo model
reads its own text, the random one random tokens.

    .venv/bin/python -m benchmarks.int8_accuracy [--model demo|135m] [--tokens 512]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu_kernels import SHAPE
from benchmarks.models import VOCABULARY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fairlead_runtime
from fairlead_kernels.formats.quantize import quantize

DEMO = Path(fairlead_runtime.__file__).parent / "demo"
TEXT = Path(__file__).parents[1] / "scripts/demo_text.txt"
CHUNK = 128  # tokens that are read together
GROUP = 32
LARGEST_DIGITS = 127 * 256 + 127
Rounding = Callable[[Tensor], Tensor]


def to_int8(rows: Tensor) -> Tensor:
    return quantize(rows).dequantize()


def to_int8_in_groups(rows: Tensor) -> Tensor:
    return quantize(rows.reshape(-1, GROUP)).dequantize().view_as(rows)


def to_digits(rows: Tensor) -> Tensor:
    scales = rows.abs().amax(dim=1, keepdim=True).div_(LARGEST_DIGITS)
    return (rows / scales).round_().mul_(scales)


ROUNDINGS: dict[str, Rounding] = {
    "activations in two digits": to_digits,
    "int8 activations": to_int8,
    f"int8 activations in groups of {GROUP}": to_int8_in_groups,
}


def rounding_inputs(
    rounding: Rounding,
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def rounded(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        return (rounding(x.reshape(-1, x.shape[-1])).view_as(x),)

    return rounded


def logits_of(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(input_ids=chunk[None]).logits[0] for chunk in torch.split(ids, CHUNK)])


def report(name: str, got: Tensor, want: Tensor) -> None:
    apart = (got - want) / want.std(dim=1, keepdim=True)
    rms = apart.square().mean(dim=1).sqrt()
    same = float((got.argmax(dim=1) == want.argmax(dim=1)).float().mean())
    print(
        f"{name}: rms {float(rms.mean()):.2g}, worst token's rms {float(rms.max()):.2g}, "
        f"largest {float(apart.abs().max()):.2g}, same likeliest token {100 * same:.1f} %"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "135m"), default="demo")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    model: Any
    if options.model == "demo":
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        text = TEXT.read_text()[: 8 * options.tokens]
        ids = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt").input_ids[0]
        ids = ids[: options.tokens]
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        ids = torch.randint(3, VOCABULARY, (options.tokens,))
    model.eval()
    want = logits_of(model, ids)
    matrices = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    print(f"{options.model}: {len(ids)} tokens, {len(matrices)} matrices")
    for matrix in matrices:
        matrix.weight.data = quantize(matrix.weight.data).dequantize()
    rounded = logits_of(model, ids)
    report("int8 weights", rounded, want)
    for name, rounding in ROUNDINGS.items():
        hook = rounding_inputs(rounding)
        hooks = [matrix.register_forward_pre_hook(hook) for matrix in matrices]
        got = logits_of(model, ids)
        report(f"int8 weights, {name}", got, want)
        report(f"int8 weights, {name}, from int8 weights", got, rounded)
        for placed in hooks:
            placed.remove()


if __name__ == "__main__":
    main()
