"""The list of what is admitted of transformers' types is what the checks say."""

import sys
from pathlib import Path

import pytest

from support.full import LONG_FORM

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import census

STORED = census.stored()


def test_the_list_has_every_type_of_transformers() -> None:
    assert sorted(STORED) == census.types()


def test_the_plan_judges_every_type_as_listed() -> None:
    """A type that the pod alone refuses is tried by the plan: none is known."""
    assert census.changes(STORED, {name: census.planned(name) for name in STORED}) == []


def test_the_pod_judges_every_type_that_the_plan_leaves_to_it_as_listed() -> None:
    left = [name for name in STORED if census.planned(name) == census.TRIED]
    for name in left if LONG_FORM else left[::9]:  # each imports its model's code
        assert census.served(name) == STORED[name]


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
