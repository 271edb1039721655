"""Windows beside the masks of transformers' own code, at positions that no prompt reaches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fairlead_runtime.device.model import paged_attention
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof import selftest, windows
from fairlead_runtime.models import families, loading
from fairlead_runtime.models.model_error import SelfTestError
from support import tiny

LENGTH = 2048
WINDOW = 512  # wider than any prompt of the self-test
EVERY = (*tiny.FAMILIES, *tiny.SIZED, *tiny.UNLISTED, *tiny.VARIANTS)
WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3")


def paged(family: str, **overrides: Any) -> PagedModel:
    model = tiny.build(family, **overrides)
    return PagedModel(model, families.check(model.config))


@pytest.mark.parametrize("family", EVERY)
def test_every_family_has_windows_that_its_masks_agree_with(family: str) -> None:
    model = paged(family)
    assert list(model.rules) == list(range(len(model.windows)))
    assert None not in model.rules.values()
    windows.check(model, LENGTH)


@pytest.mark.parametrize("wrong", [WINDOW - 1, WINDOW + 1, None])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_wide_window_of_any_layer_that_is_wrong_is_refused(
    family: str, wrong: int | None
) -> None:
    model = paged(family, sliding_window=WINDOW)
    right = model.windows
    windows.check(model, LENGTH)
    for layer, window in enumerate(right):
        model.windows = (*right[:layer], wrong if window else WINDOW, *right[layer + 1 :])
        does = "hides" if window is None or wrong == WINDOW - 1 else "shows"
        with pytest.raises(SelfTestError, match=rf"layer {layer} of '{family}', .* {does} token"):
            windows.check(model, LENGTH)


def test_a_refusal_names_layer_window_and_the_first_token_that_differs() -> None:
    model = paged("mistral", sliding_window=WINDOW)
    model.windows = (WINDOW, WINDOW + 1, WINDOW)
    with pytest.raises(SelfTestError) as refused:
        windows.check(model, LENGTH)
    assert str(refused.value) == (
        "self-test: layer 1 of 'mistral', with window 513, shows token 0 to token 512, which "
        "transformers' mask does not; this model would generate wrong text"
    )


@pytest.mark.parametrize("wrong", [WINDOW - 1, WINDOW + 1, None])
def test_a_window_that_no_request_reaches_changes_nothing(wrong: int | None) -> None:
    model = paged("mistral", sliding_window=WINDOW)
    model.windows = (wrong,) * len(model.windows)
    windows.check(model, WINDOW - 1)
    with pytest.raises(SelfTestError):
        windows.check(model, WINDOW + 1)


def in_chunks(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key // WINDOW == query // WINDOW)


def but_for_an_edge(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    seen = (key <= query) & (key > query - WINDOW)
    return seen & ~((query == WINDOW) & (key == 3))


@pytest.mark.parametrize("rule", [in_chunks, but_for_an_edge])
def test_a_mask_of_another_form_is_refused(rule: Callable[..., Tensor]) -> None:
    """Also one that shows the last token all that a window shows it."""
    model = paged("mistral", sliding_window=WINDOW)
    model.rules[2] = rule
    with pytest.raises(SelfTestError, match=r"layer 2 of 'mistral'"):
        windows.check(model, 4 * WINDOW)


def test_a_layer_whose_code_masks_another_way_is_left_to_the_self_test() -> None:
    model = paged("mistral", sliding_window=WINDOW)
    model.rules = dict.fromkeys(model.rules)
    model.windows = (WINDOW + 1,) * len(model.windows)
    windows.check(model, LENGTH)


def test_a_start_refuses_a_wide_window_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny.build("mistral", sliding_window=WINDOW), tmp_path / "model")
    fuse: Any = selftest._fused

    def fuse_with_another(model: PagedModel, *arguments: Any, **settings: Any) -> Any:
        model.windows = tuple(window and window + 1 for window in model.windows)
        return fuse(model, *arguments, **settings)

    monkeypatch.setattr(selftest, "_fused", fuse_with_another)
    with pytest.raises(SelfTestError, match=r"with window 513, shows token 0 to token 512"):
        selftest.prepare_and_test(loading.load(folder))


def test_a_probe_leaves_no_mask_to_what_serves() -> None:
    model = paged("gemma3_text")
    configs: list[Any] = [getattr(module, "config", None) for module in model.model.modules()]
    names = {config._attn_implementation for config in configs if config is not None}
    assert names == {paged_attention.NAME}
