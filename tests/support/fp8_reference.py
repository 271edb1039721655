"""transformers with keys and values rounded to fp8, the reference of an fp8 cache.

Rounds by the format's definition (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, E4M3)
and not by torch's cast: a table of the numbers, and of two the nearer one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

# Sign, 4 bits of exponent, 3 of mantissa. The last code is NaN; there is no infinity.
CODES = [(exponent, mantissa) for exponent in range(16) for mantissa in range(8)][:-1]
NUMBERS = torch.tensor(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e, m in CODES], dtype=torch.float64
)
MIDDLES = (NUMBERS[1:] + NUMBERS[:-1]) / 2


def codes(x: Tensor) -> Tensor:
    """The code without its sign of the number that is nearest to each element's size, at most the
    largest; of two that are equally near the even one.
    """
    size, numbers = x.double().abs().clamp(max=448).contiguous(), NUMBERS.to(x.device)
    above = torch.searchsorted(numbers, size)
    below = (above - 1).clamp(min=0)
    down, up = size - numbers[below], numbers[above] - size
    return torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def nearest(x: Tensor) -> Tensor:
    """``x`` rounded, in its own type."""
    return NUMBERS.to(x.device)[codes(x)].copysign(x.double()).to(x.dtype)


class Fp8Cache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Attention reads rounded keys and values, of the tokens of a pass too. ``closest``: how near
    any of them lay to the middle of two numbers, where another order of sums gives the other one.
    ``config``: of a model some of whose layers keep states.
    """

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config)
        self.closest = float("inf")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for given in (key_states, value_states):
            size, middles = given.double().abs().flatten(), MIDDLES.to(given.device)
            at = torch.searchsorted(middles, size)
            sides = (at - 1).clamp(min=0), at.clamp(max=len(middles) - 1)
            near = min(float((size - middles[side]).abs().min()) for side in sides)
            self.closest = min(self.closest, near)
        kept: tuple[Tensor, Tensor] = super().update(
            nearest(key_states), nearest(value_states), layer_idx, *args, **kwargs
        )
        return kept


def greedy_text(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """``count`` greedy tokens of transformers' generate, one prompt alone."""
    generator: Any = model
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = generator.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=Fp8Cache(),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
