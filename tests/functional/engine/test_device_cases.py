"""The cases that tests/gpu/test_models_on_gpu.py runs on a GPU, on a CPU: their checks pass for the
engine, and fail for what they must find.
"""

from pathlib import Path

import pytest
import torch

from support import device_cases, tiny
from support.device_cases import Case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tiny.save(tiny.build("gemma2"), tmp_path_factory.mktemp("gemma2")), CPU, 12)


@pytest.fixture(scope="module")
def found(case: Case) -> list[list[int]]:
    return device_cases.texts(case.results(dtype="float32"))


def test_greedy_text_equals_transformers(case: Case, found: list[list[int]]) -> None:
    device_cases.check_equal(case, found)


def test_one_other_token_is_found(case: Case, found: list[list[int]]) -> None:
    wrong = [list(text) for text in found]
    wrong[3][5] = (wrong[3][5] + 1) % tiny.VOCAB
    with pytest.raises(AssertionError, match="token 5 is another"):
        device_cases.check_equal(case, wrong)


def test_bfloat16_is_close_and_other_weights_are_not(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = device_cases.check_close(case, torch.bfloat16)
    assert far > 1e-4  # it is not the reference itself
    other = Case(tiny.save(tiny.build("gemma2", seed=1), tmp_path), CPU, 12)
    monkeypatch.setattr(Case, "reference", lambda _case: reference(other))
    with pytest.raises(AssertionError):
        device_cases.check_close(case, torch.bfloat16)


reference = Case.reference


def test_deterministic_text_is_the_same_in_a_crowd(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama").bfloat16(), tmp_path)
    assert device_cases.check_deterministic(folder, CPU, "bfloat16") > 0


def test_a_published_int8_checkpoint_gives_the_text_of_its_matrices(tmp_path: Path) -> None:
    device_cases.check_published("llama", CPU, tmp_path, "int")


def test_text_that_the_reference_finds_likely_is_told_from_other_text(
    case: Case, tmp_path: Path
) -> None:
    device_cases.check_rounded(case, case)
    other = Case(tiny.save(tiny.build("gemma2", seed=1), tmp_path), CPU, 12)
    with pytest.raises(AssertionError):
        device_cases.check_rounded(case, other)
