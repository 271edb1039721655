"""How far int8 weights move a model's logits, alone and with int8 activations.

Plain transformers in float32 on the CPU, three times: as it is; with the weights of the layers'
matrices rounded to int8 times a scale per row; and with their inputs rounded too, to int8 times a
scale per token. Differences of logits in units of a token's spread (its logits' standard
deviation), and how often the likeliest token stays. The models of cpu_kernels.py: the demo model
reads its own text, the random one random tokens.

    .venv/bin/python -m benchmarks.int8_accuracy [--model demo|135m] [--tokens 512]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu_kernels import SHAPE
from benchmarks.models import VOCABULARY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fairlead_runtime
from fairlead_kernels.quantize import quantize

DEMO = Path(fairlead_runtime.__file__).parent / "demo"
TEXT = Path(__file__).parents[1] / "scripts/demo_text.txt"
CHUNK = 128  # tokens that are read together


def rounded_input(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,) = inputs
    return (quantize(x.reshape(-1, x.shape[-1])).dequantize().view_as(x),)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(input_ids=chunk[None]).logits[0] for chunk in torch.split(ids, CHUNK)])


def report(name: str, got: Tensor, want: Tensor) -> None:
    apart = (got - want) / want.std(dim=1, keepdim=True)
    rms = apart.square().mean(dim=1).sqrt()
    same = float((got.argmax(dim=1) == want.argmax(dim=1)).float().mean())
    print(
        f"{name}: rms {float(rms.mean()):.4f}, worst token's rms {float(rms.max()):.4f}, "
        f"largest {float(apart.abs().max()):.3f}, same likeliest token {100 * same:.1f} %"
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
    report("int8 weights", logits_of(model, ids), want)
    for matrix in matrices:
        matrix.register_forward_pre_hook(rounded_input)
    report("int8 weights and activations", logits_of(model, ids), want)


if __name__ == "__main__":
    main()
