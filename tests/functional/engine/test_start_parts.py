"""What a start tells while it lasts: its parts in their order, the layers and the bytes of each."""

from itertools import groupby
from pathlib import Path

import pytest
import torch

from fairlead_runtime.build.build_engine import build
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models.model_error import SelfTestError
from fairlead_runtime.settings.engine_config import EngineConfig
from support import tiny

Told = list[tuple[str, int, int]]
LAYERS, PROMPTS = 3, 3


def told_by(folder: Path, **settings: object) -> Told:
    told: Told = []
    path = tiny.save(tiny.build("llama"), folder)
    config = EngineConfig.from_mapping({"num_blocks": 32, **settings})
    build(path, config, report=lambda *told_now: told.append(_padded(*told_now))).close()
    return told


def _padded(part: str, done: int = 0, total: int = 0) -> tuple[str, int, int]:
    return part, done, total


def test_a_start_tells_its_parts_their_layers_and_bytes(tmp_path: Path) -> None:
    told = told_by(tmp_path)
    order = [part for part, _ in groupby(part for part, _, _ in told)]
    assert order == [
        "weights",
        "kernels",
        "self_test",
        "kernels",
        "self_test",
        "profile",
        "cache",
    ]
    fused = [(done, total) for part, done, total in told if part == "kernels" and total]
    assert fused == [(layer, LAYERS) for layer in range(LAYERS)]
    assert told.count(("kernels", 0, 0)) == 2, "again before a package compiles products"
    tested = [done for part, done, total in told if part == "self_test" and total]
    assert sorted(set(tested)) == list(range(LAYERS * PROMPTS + 1))
    assert tested == sorted(tested), "no pass begins anew"
    read = [(done, total) for part, done, total in told if part == "weights" and total]
    assert read == sorted(read)
    assert read[-1][0] == read[-1][1], "all bytes were read"


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_no_more_layers_are_tested_than_there_are(
    settings: dict[str, object], tmp_path: Path
) -> None:
    told = told_by(tmp_path, **settings)
    assert all(done <= total for _, done, total in told if total)
    assert {part for part, _, _ in told} == {"weights", "kernels", "self_test", "profile", "cache"}


def passes_of(told: Told) -> set[int]:
    """How many passes of transformers a start told of, each time that it began them."""
    return {total // LAYERS for part, _, total in told if part == "self_test" and total}


def test_what_rounding_does_to_a_model_is_measured_where_the_start_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passes_of(told_by(tmp_path / "half", dtype="bfloat16")) == {2 * PROMPTS}
    assert passes_of(told_by(tmp_path / "plain")) == {PROMPTS}
    monkeypatch.setitem(selftest.TOLERANCE, torch.float32, 1e-9)
    told = told_by(tmp_path / "moved")
    assert passes_of(told) == {PROMPTS, 2 * PROMPTS}, "it is loaded once more"
    assert [part for part, _ in groupby(part for part, _, _ in told)].count("weights") == 2
    monkeypatch.setattr(selftest, "REFERENCE_FACTOR", 1e-9)
    with pytest.raises(SelfTestError, match="alone moves them by"):
        told_by(tmp_path / "refused")
