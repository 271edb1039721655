"""The list of what is admitted of transformers' types is what the checks say."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from fairlead_runtime.models import families
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny_any
from support.full import LONG_FORM

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import census

STORED = census.stored()


def test_the_list_has_every_type_of_transformers() -> None:
    assert sorted(STORED) == census.types()


def test_the_plan_judges_every_type_as_listed() -> None:
    """A type that the pod alone refuses is tried by the plan: none is known."""
    assert census.changes(STORED, {name: census.planned(name) for name in STORED}) == []


def test_every_type_that_is_admitted_is_planned_from_its_configuration_alone() -> None:
    """One that a pod alone would try is sized in no plan."""
    admitted = [name for name, verdict in STORED.items() if verdict in census.ADMITTED]
    assert len(admitted) > 130
    assert [name for name in admitted if STORED[name] != census.PLANNED] == []
    for name in admitted:
        assert ModelShape.from_config(tiny(name)).parameters > 0, name


def test_the_pod_checks_every_type_that_is_planned_by_its_class_too() -> None:
    """When its weights are loaded: the plan must not promise them in vain."""
    planned = [name for name in STORED if STORED[name] == census.PLANNED]
    for name in planned if LONG_FORM else planned[::9]:  # each imports its model's code
        config = tiny(name)
        windows = families.check(CONFIG_MAPPING[name].from_dict(config))
        assert windows == ModelShape.from_config(config).windows, name


def tiny(name: str) -> dict[str, Any]:
    """A config.json of the type: of one that is judged, with small sizes."""
    more = tiny_any.settings_of(name) if name in SIZED else {}
    kinds = {"layer_types": ["conv"] * 32} if name == "lfm2_moe" else {}  # has no default
    config = census.config_of(name) | more | kinds
    text = config.get("text_config", {})
    if text.get("model_type") == "glm4v_text":  # its axes are those of half a head
        text["rope_parameters"] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return config


def test_the_report_counts_the_admitted_and_the_refused_by_reason() -> None:
    verdicts = {"a": "plan", "b": "tries", "c": "refused: why", "d": "refused: why"}
    assert census.report(verdicts).splitlines() == [
        "2 of 4 types are admitted: 1 planned from config.json, 1 tried",
        "   2 refused: why",
    ]


@pytest.mark.parametrize(
    ("found", "change"),
    [
        ({"a": "refused: why"}, ["a: plan -> refused: why"]),
        ({}, ["a: plan -> gone"]),
        ({"a": "plan", "b": "tries"}, ["b: new -> tries"]),
        ({"a": "plan"}, []),
    ],
)
def test_a_family_that_is_lost_is_named(found: dict[str, str], change: list[str]) -> None:
    assert census.changes({"a": "plan"}, found) == change
