"""The tiny random models: equal by seed, unchanged by saving and loading, sensitive to errors."""

from pathlib import Path

import pytest
import torch

from fairlead_runtime.models import loading
from support import tiny
from support.byte_tokenizer import SPECIAL


def prompts(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(len(SPECIAL), tiny.VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.VARIANTS])
def test_a_family_is_small_varied_and_looks_at_its_whole_context(
    family: str, tmp_path: Path
) -> None:
    model = tiny.build(family)
    assert sum(p.numel() for p in model.parameters()) <= 500_000
    ids = prompts(3, 32)
    changed = ids.clone()
    changed[:, 1] = (changed[:, 1] + 7) % 200 + len(SPECIAL)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        other = model(changed, use_cache=False).logits
    # Ties would hide an engine's errors; 99 of 100 positions are far from one.
    top = logits.topk(2).values
    assert (top[..., 0] - top[..., 1]).quantile(0.01) > 1e-3
    # Three windows of 12 reach back 34 tokens, so even a model that only slides sees token 1 at the
    # end.
    assert (logits - other)[:, -1].abs().max() > 1e-3
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert len(set(greedy[:, 32:].flatten().tolist())) > 12
    loaded = loading.load(tiny.save(model, tmp_path / family))
    with torch.no_grad():
        again = loaded.model(ids, use_cache=False).logits
    assert torch.equal(again, logits)
    assert loaded.dtype == torch.float32
    assert loaded.eos_ids == {2}
    assert loaded.shape.parameters == sum(p.numel() for p in model.parameters())


def test_equal_arguments_give_equal_weights_and_others_do_not() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([p.flatten() for p in tiny.build("qwen3", seed=seed).parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_overrides_reach_the_configuration() -> None:
    model = tiny.build("mistral", sliding_window=8, num_hidden_layers=2)
    assert (model.config.sliding_window, model.config.num_hidden_layers) == (8, 2)


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gpt5.*llama"):
        tiny.build("gpt5")


def test_the_tokenizer_holds_every_byte_and_every_id_of_the_models() -> None:
    tokenizer = tiny.tokenizer()
    assert len(tokenizer) == tiny.VOCAB
    for text in ("the end", " \t\n", "žluťoučký 🙂 漢字", "".join(map(chr, range(256)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the")) < 3
