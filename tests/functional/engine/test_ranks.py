"""One model on two gloo processes, each with half of it and of the cache: the text is that of
transformers. All families that can be split: test_token_equality.py, in its long form.
"""

from typing import Any

import pytest

from fairlead_runtime.config import EngineConfig
from fairlead_runtime.sizing.terms import weights
from support import rank_pair
from support.engine_rig import Outcome, Rig, Setting, greedy, prompts, rig

AMPLE = Setting(chunk=16)
SCARCE = Setting(chunk=16, num_blocks=24, offload=True, sharing=False)


def run(engine: Rig, setting: Setting = AMPLE, **more: Any) -> Outcome:
    """Three prompts that share a beginning; their texts are compared."""
    requests = [greedy(str(i), p, 16, **more) for i, p in enumerate(prompts(3, (23, 41, 30), 16))]
    outcome = engine.run(setting, [(3 * i, request) for i, request in enumerate(requests)])
    for one in requests:
        for choice in range(one.params.n):
            assert outcome.texts[one.id, choice] == engine.reference(one.prompt, one.max_tokens)
    return outcome


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("starcoder2", {}),  # biases that are split, and biases that are not
        ("mixtral", {}),
        ("llama", {"num_key_value_heads": 1}),  # both ranks have the one head
        ("gemma", {"tie_word_embeddings": True}),
        ("qwen2", {"vocab_size": 307}),  # a whole head on both
    ],
)
def test_two_ranks_give_the_text_of_transformers(family: str, changes: dict[str, Any]) -> None:
    engine = rig(family, "ranks", **changes)
    stats = run(engine, n=3).stats
    assert stats is not None
    assert stats.prefix_hits > 0


def test_what_is_offloaded_comes_back_on_both_ranks() -> None:
    stats = run(rig("llama", "ranks"), SCARCE).stats
    assert stats is not None
    assert stats.offloads > 0


def test_log_probabilities_of_prompts_are_those_of_one_rank() -> None:
    """They come from passes that return more logits than rows."""
    one, two = (run(rig("llama", kernels), prompt_logprobs=2) for kernels in ("torch", "ranks"))
    assert one.prompts.keys() == two.prompts.keys() != set()
    for key, scores in one.prompts.items():
        for a, b in zip(scores, two.prompts[key], strict=True):
            assert (a.token, a.rank) == (b.token, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_each_rank_measures_what_is_planned() -> None:
    engine, pair = rig("llama", "ranks"), rank_pair.pair()
    planned = weights(rank_pair.shape_of(rig("llama").model.model), EngineConfig(), 2, "cpu")
    pair.hold(family="llama")
    for measured in (engine.model.weight_bytes, pair.weight_bytes()):
        assert measured == pytest.approx(planned, rel=0.02)
