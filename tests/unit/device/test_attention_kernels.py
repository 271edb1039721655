"""The torch backend against the reference, over ragged rows, windows, caps, sinks and scattered
blocks.
"""

from typing import Any

import pytest
import torch

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.cache_write import write
from fairlead_kernels.plain import strips, torch_attention
from fairlead_kernels.plain.copy_blocks import copy_blocks
from fairlead_kernels.plain.torch_attention import Scratch, TorchAttention
from fairlead_kernels.plain.torch_plan import Keys
from support.attention_cases import Case, make_case

CPU = torch.device("cpu")


def backend_and_reference(case: Case, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    backend = TorchAttention(case.heads, CPU)
    got = backend.run(backend.plan(case.ragged), case.query, case.key_cache, case.value_cache, spec)
    return got, reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)


MIXED = [(0, 7), (12, 1), (3, 1), (9, 5), (30, 1), (0, 1), (31, 1), (16, 8)]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("extras", ["none", "softcap", "sinks", "both"])
def test_mixed_rows_match_the_definition(block_size: int, window: int | None, extras: str) -> None:
    spec = LayerSpec(
        scale=0.3,
        window=window,
        softcap=2.0 if extras in {"softcap", "both"} else None,
        sinks=torch.randn(4) if extras in {"sinks", "both"} else None,
    )
    got, want = backend_and_reference(make_case(MIXED, block_size=block_size, window=window), spec)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 4, 8, 8, torch.float32),
        Heads(8, 1, 16, 16, torch.float32),
        Heads(6, 2, 24, 8, torch.float32),
    ],
)
def test_every_head_layout_matches_the_definition(heads: Heads) -> None:
    got, want = backend_and_reference(make_case(MIXED, heads=heads), LayerSpec(scale=0.2))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_consecutive_blocks_are_read_in_place_and_match() -> None:
    case = make_case([(0, 9), (40, 1), (8, 4)], contiguous=True)
    plan = TorchAttention(case.heads, CPU).plan(case.ragged)
    assert all(p.keys.start is not None for p in plan.prefills)
    assert all(d.keys.start is not None for d in plan.decodes)
    got, want = backend_and_reference(case, LayerSpec(scale=0.3))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding() -> None:
    got, want = backend_and_reference(
        make_case(MIXED, heads=Heads(4, 2, 8, 8, torch.bfloat16)), LayerSpec(scale=0.3)
    )
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    alone, _ = backend_and_reference(make_case([(30, 1)]), LayerSpec(scale=0.3))
    case = make_case([(30, 1), (5, 1), (28, 1), (60, 1), (0, 12)])
    together, _ = backend_and_reference(case, LayerSpec(scale=0.3))
    assert torch.isfinite(together).all()
    again = make_case([(30, 1)])
    # The first row draws the same random keys in both cases; its query differs, so it is set.
    case.query[0] = again.query[0]
    together, _ = backend_and_reference(case, LayerSpec(scale=0.3))
    assert not torch.equal(case.ragged.tables[0, :8], again.ragged.tables[0, :8])
    torch.testing.assert_close(together[0], alone[0], atol=1e-6, rtol=0)
    reference_row = reference.attend(
        case.ragged, case.query, case.key_cache, case.value_cache, LayerSpec(scale=0.3)
    )
    torch.testing.assert_close(together, reference_row, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_long_rows_in_strips_match_the_definition(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(strips, "STRIP", 16)
    case = make_case([(0, 50), (21, 37), (3, 1)], window=window)
    got, want = backend_and_reference(case, LayerSpec(scale=0.3, window=window, softcap=softcap))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_explicit_scores_of_many_keys_are_made_in_lower_strips(
    monkeypatch: pytest.MonkeyPatch, sinks: bool
) -> None:
    case = make_case([(21, 37)])
    monkeypatch.setattr(strips, "SCORES", 7 * case.heads.query * 58)
    heights: list[int] = []
    explicit = torch_attention._explicit

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        heights.append(query.shape[2])
        return explicit(query, *rest)

    monkeypatch.setattr(torch_attention, "_explicit", noted)
    values = torch.randn(case.heads.query) if sinks else None
    got, want = backend_and_reference(case, LayerSpec(scale=0.3, sinks=values))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    assert heights == ([7, 7, 7, 7, 7, 2] if sinks else [])


def test_a_later_layer_of_a_step_sees_the_masks_of_its_own_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strips, "STRIP", 16)
    case, spec = make_case([(5, 50)]), LayerSpec(scale=0.3)
    backend = TorchAttention(case.heads, CPU)
    plan = backend.plan(case.ragged)
    first, second = (
        backend.run(plan, case.query, case.key_cache, case.value_cache, spec) for _ in range(2)
    )
    assert torch.equal(first, second)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    torch.testing.assert_close(second, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [8, 9, 10])
def test_a_window_about_as_long_as_its_prompt_matches_the_definition(window: int) -> None:
    case = make_case([(0, 9)], window=window, contiguous=True)
    got, want = backend_and_reference(case, LayerSpec(scale=0.3, window=window))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_many_decodes_are_cut_into_bounded_gathers() -> None:
    rows = [(length, 1) for length in range(1, 200, 3)]
    case = make_case(rows)
    backend = TorchAttention(case.heads, CPU)
    backend._gather_tokens = 256
    plan = backend.plan(case.ragged)
    assert sum(d.tokens.shape[0] for d in plan.decodes) == len(rows)
    assert all(
        d.tokens.shape[0] == 1 or d.tokens.shape[0] * d.keys.length <= 256 for d in plan.decodes
    )
    got = backend.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(scale=0.3))
    want = reference.attend(
        case.ragged, case.query, case.key_cache, case.value_cache, LayerSpec(scale=0.3)
    )
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_a_layer_with_another_window_than_the_plan_is_refused() -> None:
    case = make_case([(0, 4)], window=2)
    backend = TorchAttention(case.heads, CPU)
    with pytest.raises(ValueError, match="window"):
        backend.run(
            backend.plan(case.ragged),
            case.query,
            case.key_cache,
            case.value_cache,
            LayerSpec(scale=1.0),
        )


def test_heads_that_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="5 query heads"):
        Heads(5, 2, 8, 8, torch.float32)


def test_the_backend_choice_names_its_reason() -> None:
    assert "plain torch" in str(pick(Heads(4, 2, 8, 8, torch.float32), (), CPU, "torch"))


def test_written_keys_land_in_their_slots_and_nowhere_else() -> None:
    torch.manual_seed(0)
    caches = [torch.zeros(6, 4, 2, 8) for _ in range(4)]
    key, value = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = torch.tensor([21, 0, 7, 8, 15])
    write(caches[0], caches[1], slots, key, value)
    reference.write(caches[2], caches[3], slots, key, value)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert int((caches[0].abs().sum((2, 3)) > 0).sum()) == 5


def test_keys_and_values_are_written_in_the_caches_dtype() -> None:
    caches = [torch.zeros(2, 4, 1, 2, dtype=torch.bfloat16) for _ in range(2)]
    key, value = torch.full((1, 1, 2), 1.3), torch.full((1, 1, 2), 2.7)
    write(caches[0], caches[1], torch.tensor([6]), key, value)
    for cache, written in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, 2], written[0].bfloat16())


def test_scratch_memory_takes_the_dtype_of_each_cache() -> None:
    scratch = Scratch()
    keys = Keys(start=None, length=2, slots=torch.tensor([5, 2]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        cache = torch.arange(16.0).view(4, 2, 1, 2).to(dtype)
        got = scratch.read(cache, keys)
        assert got.dtype == dtype
        assert torch.equal(got, cache.view(8, 1, 2)[[5, 2]])


def test_scratch_memory_grows_for_a_longer_read_and_is_kept_for_a_shorter_one() -> None:
    scratch = Scratch()
    cache = torch.arange(32.0).view(8, 2, 1, 2)
    places = []
    for count in (2, 12, 3):
        slots = torch.arange(count).flip(0)
        got = scratch.read(cache, Keys(start=None, length=count, slots=slots))
        assert torch.equal(got, cache.view(16, 1, 2)[slots])
        places.append(got.data_ptr())
    assert places[1] == places[2]


def test_copies_read_every_source_before_they_write() -> None:
    cache = torch.arange(5.0)[None, :, None].repeat(2, 1, 3)
    copy_blocks(cache, cache, [(0, 1), (1, 2), (4, 0)], dim=1)
    assert cache[0, :, 0].tolist() == [4.0, 0.0, 1.0, 3.0, 4.0]
    assert torch.equal(cache[0], cache[1])


def test_copies_between_memories_go_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.randn(2, 9, 3), torch.zeros(2, 9, 3)
    monkeypatch.setattr("fairlead_kernels.plain.copy_blocks.STAGING_BYTES", 2 * source.nbytes // 9)
    pairs = [(i, 8 - i) for i in range(9)]
    sizes: list[int] = []
    select = torch.Tensor.index_select

    def record_size(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        sizes.append(len(index))
        return select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", record_size)
    copy_blocks(source, target, pairs, dim=1)
    assert torch.equal(target, source.flip(1))
    assert sizes == [2, 2, 2, 2, 1]
    sizes.clear()
    monkeypatch.setattr("fairlead_kernels.plain.copy_blocks.STAGING_BYTES", 1)
    copy_blocks(source, target, pairs[:2], dim=1)
    assert sizes == [1, 1], "at least one block at a time"
