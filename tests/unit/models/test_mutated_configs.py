"""Whole configurations with one or two settings changed: plan and pod agree, transformers builds
and runs what they take, and its modules have the parameters that the plan counts.
"""

import sys
from pathlib import Path

import pytest

from fairlead_runtime.sizing.families import field_types
from support import mutated_configs
from support.full import LONG_FORM

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import make_field_types

SEEDS = range(1, 41) if LONG_FORM else range(1)  # of each family


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.full] * bool(number % 2))
        for number, family in enumerate(mutated_configs.SERVED)
        if LONG_FORM or family in mutated_configs.ALONE
    ],
)
def test_what_plan_and_pod_take_transformers_builds_with_its_parameters(
    family: str, tmp_path: Path
) -> None:
    assert not list(mutated_configs.disagreements(SEEDS, tmp_path, [family]))


def test_types_of_settings_are_those_that_classes_declare() -> None:
    assert Path(str(field_types.__file__)).read_text() == make_field_types.text()
