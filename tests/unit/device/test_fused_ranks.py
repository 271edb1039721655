"""Which layers one rank of a split model fuses, by what the others say, without any other rank."""

import pytest
import torch
from torch import Tensor

from fairlead_kernels.interface import reference
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_runtime.device.conversion.fusion import fuse
from fairlead_runtime.device.model.rank_group import RankGroup
from support.engine_rig import paged
from support.rank_pair import shard


class Other(RankGroup):
    """A rank beside one that gives nothing to any sum, and says ``yes`` or no to each question, but
    for the one whether it takes a layer's MLP apart.
    """

    def __init__(self, *, yes: bool, apart: bool = True) -> None:
        super().__init__(0, 2, "", lambda: None)
        self._yes, self._apart = yes, apart
        self.answers: list[bool] = []

    def sum(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x
        self.answers.append(bool(x))
        return x + self._yes

    def same_everywhere(self, mine: bool) -> bool:
        return mine is self._apart

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)


def test_a_layer_is_fused_where_both_ranks_say_that_it_fits_and_gives_the_same() -> None:
    ranks = Other(yes=True)
    fused = fuse(shard(paged("llama"), ranks), reference, ranks)
    assert str(fused) == "fused 3/3 layers"
    assert ranks.answers == [True] * 6


def test_a_layer_is_not_fused_where_the_other_rank_says_no() -> None:
    ranks = Other(yes=False)
    model = shard(paged("llama"), ranks)
    before = model.weight_bytes
    fused = fuse(model, reference, ranks)
    assert str(fused) == "fused 0/3 layers (layer 0: it does not fit on another rank)"
    assert ranks.answers == [True] * 3
    assert (model.packed, model.weight_bytes) == ([], before)


def test_the_other_rank_hears_of_a_layer_that_does_not_fit_here() -> None:
    ranks = Other(yes=True)
    fused = fuse(shard(paged("mixtral"), ranks), reference, ranks)
    assert fused.fused == 0
    assert ranks.answers == [False] * 3


@pytest.mark.parametrize(("family", "apart"), [("llama", True), ("mixtral", False)])
def test_a_layer_is_fused_around_an_own_mlp_where_the_other_rank_does_so_too(
    family: str, apart: bool
) -> None:
    ranks = Other(yes=True, apart=apart)
    fused = fuse(shard(paged(family), ranks), TorchOperations(), ranks)
    assert (fused.fused, fused.around_mlp) == ((3, 0) if apart else (0, 3))
    ranks = Other(yes=True, apart=not apart)
    model = shard(paged(family), ranks)
    before = model.weight_bytes
    fused = fuse(model, TorchOperations(), ranks)
    assert str(fused) == "fused 0/3 layers (layer 0: it does not fit on another rank)"
    assert (model.packed, model.weight_bytes) == ([], before)
    assert ranks.answers == [True] * 3


@pytest.mark.parametrize(("answers", "alike"), [((1, 1), True), ((0, 0), True), ((1, 0), False)])
def test_ranks_are_alike_where_all_say_yes_or_all_say_no(
    answers: tuple[int, int], alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RankGroup(0, 2, "", lambda: None)
    monkeypatch.setattr(ranks, "sum", lambda x: x + answers[1])
    assert ranks.same_everywhere(bool(answers[0])) is alike


def test_layers_whose_matrices_are_whole_get_no_sums() -> None:
    ranks = Other(yes=True)
    fused = fuse(paged("llama"), reference, ranks)
    assert str(fused) == "fused 0/3 layers (layer 0: not all of its matrices are split)"
