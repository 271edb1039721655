"""Launched steps with masks: what they wait for, and whose masks they ask for."""

from typing import Any

import numpy as np
import pytest
import torch

from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.sample_rows import NOTHING_LEFT
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.logits_processors import LogitChanges
from fairlead_runtime.device.sampling.mask_upload import MaskPacket
from fairlead_runtime.grammar.guides import Guides, Masks, PendingMasks
from fairlead_runtime.request.sequence import Failure, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Finished, Token
from support.engine_rig import Setting, greedy, rig
from support.in_flight import InFlight
from support.tiny_guides import EOS, GUIDES

SETTING = Setting(block_size=4, chunk=64, num_blocks=100, max_requests=4)


class World(InFlight):
    """``seen`` is what happens in its steps; ``failed`` why sequences get no mask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *asked: Request) -> None:
        super().__init__(rig("llama", "resident"), SETTING, *asked, guides=GUIDES)
        self.seen: list[Any] = []
        self.failed: dict[int, Failure] = {}
        masks, run, seen = Guides.masks, PagedModel.run, self.seen

        def ask(guides: Guides, sequences: list[Sequence]) -> PendingMasks:
            seen.append({(s.request.id, s.generated) for s in sequences})
            pending = masks(guides, sequences)
            pending._masks = Masks(pending.result().words, self.failed)
            return pending

        def forward(*arguments: Any) -> Any:
            seen.append("pass")
            return run(*arguments)

        monkeypatch.setattr(Guides, "masks", ask)
        monkeypatch.setattr(PagedModel, "run", forward)

    def collect(self) -> list[Any]:
        self.seen.append("tokens")
        return super().collect()


def guided(name: str, tokens: int = 9) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, structured_outputs={"regex": "[a-z]{30}"}
    )
    return Request(name, (5, 6, 7), params, tokens, eos_ids=EOS)


def test_the_pass_of_a_step_is_queued_before_the_tokens_that_its_masks_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, guided("a"), greedy("b", (9, 8, 7, 6), 9))
    assert world.launch() is not None
    assert world.launch() is not None
    for step in range(1, 4):
        assert world.seen[-1] == "pass"
        world.seen.clear()
        world.collect()
        assert world.launch() is not None
        # The masks of the step in flight, from all tokens before; then the next pass.
        assert [one for one in world.seen if one != "pass"] == ["tokens", {("a", step)}]
    world.seen.clear()
    world.collect()
    world.collect()
    assert world.seen == ["tokens", "tokens", {("a", 4)}]


def test_a_row_without_its_mask_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, guided("a"), greedy("b", (9, 8, 7, 6), 4), guided("c"))
    events: list[Any] = []
    assert world.launch() is not None
    assert world.launch() is not None
    events += world.collect()
    late = world.failed[0] = Failure("late")
    assert world.launch() is not None
    events += world.collect()
    world.failed.clear()
    events += world.finish()
    texts: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            texts.setdefault(event.sequence.request.id, []).append(event.token)
    failures = [e for e in events if isinstance(e, Finished)]
    assert [(e.sequence.request.id, e.failure) for e in failures] == [("a", late)]
    assert texts["a"] == texts["c"][:1]
    assert len(texts["c"]) == 9
    assert texts["b"] == rig("llama", "resident").reference((9, 8, 7, 6), 4)


def test_no_mask_is_made_for_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, guided("a"), guided("b"))
    assert world.launch() is not None
    assert world.launch() is not None
    world.collect()
    world.scheduler.abort("a", None)
    world.seen.clear()
    world.collect()
    assert world.seen == ["tokens", {("b", 1)}]


@pytest.mark.parametrize("width", [70, 96])
def test_masks_are_those_of_the_general_sampler(width: int) -> None:
    rng = np.random.default_rng(width)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"bad_words": ((3, 4), (5, 4, 6), (5,), (4, 200))},
        {"min_tokens": 9, "stop_token_ids": (11, 12, 500), "bad_words": ((4, 7),)},
    )
    packet = MaskPacket(width, torch.device("cpu"))
    hashes = torch.zeros(width, dtype=torch.int32)
    for _ in range(40):
        sequences, words = [], {}
        for number in range(6):
            params = SamplingParams(temperature=0.0, **kinds[rng.integers(3)])
            request = Request("r", (1, 2), params, 99)
            tokens = [1, 2, *rng.integers(3, 6, rng.integers(0, 5)).tolist()]
            sequence = Sequence(number, request, 0, tokens)
            if rng.integers(2):
                size = -(-width // 32) - (number == 3)  # one ends before the vocabulary
                words[number] = rng.integers(-(1 << 31), 1 << 31, size).astype(np.int32)
                words[number] &= 0 if number == 4 else -1
                sequence.guide = type("Guide", (), {"at_end": bool(rng.integers(2))})()
            sequences.append(sequence)
        logits = torch.from_numpy(rng.standard_normal((6, width)).astype(np.float32))
        wanted, changes = logits.clone(), LogitChanges.of(sequences, words)
        if changes is not None:
            wanted[torch.from_numpy(changes.rows)] = changes.apply(logits)
        best = wanted.argmax(1).masked_fill(wanted.amax(1) == -torch.inf, NOTHING_LEFT)
        sent = packet.send(sequences, words)
        assert torch.equal(sample_rows.choose(logits, None, hashes, masks=sent), best)
