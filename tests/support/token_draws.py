"""Other random tokens than every start of a model compares on."""

from typing import Any

import numpy as np
import pytest
import torch

from fairlead_runtime.device.conversion import recognize_ends
from fairlead_runtime.device.model.paged_model import PagedModel
from support.full import LONG_FORM

DRAWS = range(10 if LONG_FORM else 1)


def draw(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let starts compare on the tokens of this draw, here and in processes forked later."""
    positions_of, seeded = recognize_ends.random_tokens, np.random.default_rng

    def random_tokens(model: PagedModel, *, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed + 1000 * number)
        ids = torch.randint(model.vocabulary, (recognize_ends.TOKENS,), generator=generator)
        return ids.to(model.device), positions_of(model, seed=seed)[1]

    monkeypatch.setattr(recognize_ends, "random_tokens", random_tokens)
    monkeypatch.setattr(np.random, "default_rng", lambda seed=0: seeded(seed + 1000 * number))
