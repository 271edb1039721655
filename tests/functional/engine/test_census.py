"""Every type of transformers that the engine admits gives the text of its ``generate``, as a tiny
random model.

The types are those of ``scripts/census.json``; families that the matrix or the tests of judged ones
or of states run, and models of several parts, are left to these.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.device.model.paged_model import prepare
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig
from support import tiny, tiny_any, tiny_states
from support.engine_rig import NEW, Rig, compare_greedy_texts, prompts

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import census

ELSEWHERE = {*tiny.FAMILIES, *tiny.SIZED, *tiny.UNLISTED, *tiny_states.FAMILIES}
ADMITTED = {name for name, verdict in census.stored().items() if verdict in census.ADMITTED}
HERE = sorted(name for name in ADMITTED - ELSEWHERE if "text_config" not in census.config_of(name))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] * bool(number % 8))
        for number, kind in enumerate(HERE)
    ],
)
def test_an_admitted_type_gives_the_text_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(family: str, **settings: Any) -> Any:
        return tiny_any.build(family, **settings)

    monkeypatch.setattr(tiny, "build", build)
    engine, seed = Rig(kind), HERE.index(kind)
    prompt, other = prompts(seed, (41, 41), 0)
    assert engine.reference((*other[:20], *prompt[20:]), NEW) != engine.reference(prompt, NEW)
    compare_greedy_texts(engine, seed)
    # A pod takes it from its files, with the sizes of its plan.
    tiny.save(tiny_any.build(kind), tmp_path)
    loaded = loading.load(tmp_path, config=EngineConfig(kernels="torch"))
    assert loaded.shape.parameters == sum(x.numel() for x in loaded.model.parameters())
    prepare(loaded)


def test_the_types_of_the_census_are_tried() -> None:
    assert len(HERE) > 30
