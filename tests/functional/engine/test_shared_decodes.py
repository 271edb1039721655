"""Requests that begin with the same blocks decode together as each would alone: the C++ kernels
read those keys once for all of them.
"""

from collections import Counter
from typing import Any

import pytest

from fairlead_kernels.cpu.cpu_attention import CpuAttention, CpuPlan, sizes_of
from support.engine_rig import MAX_LEN, Setting, greedy, prompts, rig

ROWS_OF_A_TASK = 6  # its place: csrc/attention.h
LENGTHS, SHARED, NEW = (190, 201, 185, 210, 196, 188), 177, 30
FAMILIES = ("llama", "qwen2", "gpt2", "gpt_neox", "gemma2", "mistral", "phi3")
# The window of these layers' tiny models is shorter than any prompt here.
WINDOWED = {"mistral"}


@pytest.fixture
def sharers(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Tasks of all steps, by the number of rows that share them."""
    found: Counter[int] = Counter()
    plan = CpuAttention.plan

    def planned(self: CpuAttention, ragged: Any) -> CpuPlan:
        made = plan(self, ragged)
        found.update(made.cut(sizes_of(self.heads)).tasks[:, ROWS_OF_A_TASK].tolist())
        return made

    monkeypatch.setattr(CpuAttention, "plan", planned)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_text_does_not_depend_on_who_shares_its_prefix(
    family: str, block_size: int, sharers: Counter[int]
) -> None:
    engine = rig(family, "cpu")
    setting = Setting(block_size, 64, -(-MAX_LEN // block_size) * 16, False, True)
    arrivals = [
        # Of two sets of prompts, whose rows lie side by side, the first computes what others find.
        (0 if at == 0 else 12, greedy(f"{seed}.{at}", prompt, NEW + 5 * (at % 3), 1))
        for seed in (1, 2)
        for at, prompt in enumerate(prompts(seed, LENGTHS, SHARED))
    ]
    outcome = engine.run(setting, arrivals)
    assert outcome.stats is not None
    assert outcome.stats.prefix_hits > 0
    for _, request in arrivals:
        want = engine.reference(request.prompt, request.max_tokens)
        assert outcome.texts[request.id, 0] == want, request.id
    assert (max(sharers) >= len(LENGTHS) - 1) == (family not in WINDOWED)
