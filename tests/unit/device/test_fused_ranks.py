"""Which layers one rank of a split model fuses, by what the others say, without any other rank."""

import torch
from torch import Tensor

from fairlead_kernels import reference
from fairlead_runtime.device.fusion import fuse
from fairlead_runtime.device.group import Group
from support.engine_rig import paged
from support.rank_pair import split


class Other(Group):
    """A rank beside one that gives nothing to any sum, and says ``yes`` or no to each question."""

    def __init__(self, *, yes: bool) -> None:
        super().__init__(0, 2, "", lambda: None)
        self._yes = yes
        self.answers: list[bool] = []

    def sum(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x
        self.answers.append(bool(x))
        return x + self._yes

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)


def test_a_layer_is_fused_where_both_ranks_say_that_it_fits_and_gives_the_same() -> None:
    group = Other(yes=True)
    fused = fuse(split(paged("llama"), group), reference, group)
    assert str(fused) == "fused 3/3 layers"
    assert group.answers == [True] * 6


def test_a_layer_is_not_fused_where_the_other_rank_says_no() -> None:
    group = Other(yes=False)
    model = split(paged("llama"), group)
    before = model.weight_bytes
    fused = fuse(model, reference, group)
    assert str(fused) == "fused 0/3 layers (layer 0: it does not fit on another rank)"
    assert group.answers == [True] * 3
    assert (model.packed, model.weight_bytes) == ([], before)


def test_the_other_rank_hears_of_a_layer_that_does_not_fit_here() -> None:
    group = Other(yes=True)
    fused = fuse(split(paged("mixtral"), group), reference, group)
    assert fused.fused == 0
    assert group.answers == [False] * 3


def test_layers_whose_matrices_are_whole_get_no_sums() -> None:
    group = Other(yes=True)
    fused = fuse(paged("llama"), reference, group)
    assert str(fused) == "fused 0/3 layers (layer 0: not all of its matrices are split)"
