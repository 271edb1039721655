"""Greedy texts of models whose layers keep a state of fixed size are transformers' ``generate``,
whatever happens beside and before them: chunks, prefix hits, choices, preemption both ways, steps
that fail and are repeated.
"""

from typing import Any

import pytest

from support import tiny_states
from support.engine_rig import NEW, Rig, Setting, greedy, prompts, rig

LENGTHS, SHARED = (17, 41, 26, 53, 34), 24


def compare(engine: Rig, setting: Setting, seed: int) -> Any:
    """Run five prompts, some with two choices, and compare each text; what happened is returned."""
    arrivals = [
        (due, greedy(str(i), prompt, NEW, 1 + i % 2))
        for i, (due, prompt) in enumerate(
            zip((0, 0, 4, 5, 9), prompts(seed, LENGTHS, SHARED), strict=True)
        )
    ]
    outcome = engine.run(setting, arrivals)
    for _, request in arrivals:
        want = engine.reference(request.prompt, NEW)
        for choice in range(request.params.n):
            assert outcome.texts[request.id, choice] == want
    return outcome.stats


@pytest.mark.parametrize("family", tiny_states.FAMILIES)
def test_greedy_text_equals_transformers_in_too_little_memory(family: str) -> None:
    setting = Setting(block_size=4, chunk=16, num_blocks=28)
    stats = compare(rig(family), setting, seed=7)
    # States alone do not grow.
    assert stats.preemptions > 0 or not rig(family).groups, "no request was preempted"
    assert stats.prefix_hits > 0, "no prompt began with a snapshot"
