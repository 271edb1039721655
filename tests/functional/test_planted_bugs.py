"""The whole-run property is only worth what it catches: planted bugs, one at a time, in a copy."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plant_bugs

# Each bug shows itself within this many seeds; the script alone tries more.
SEEDS = 40


def test_every_planted_bug_still_matches_the_source() -> None:
    assert plant_bugs.stale() == []
    assert len(plant_bugs.BUGS) >= 24
    assert len({bug.name for bug in plant_bugs.BUGS}) == len(plant_bugs.BUGS)


def test_the_property_holds_on_a_copy_without_a_bug() -> None:
    nothing = plant_bugs.Bug("nothing", plant_bugs.POOL, "class BlockPool", "class BlockPool")
    verdict = plant_bugs.hunt(nothing, 5)
    assert not verdict.caught, verdict.how


@pytest.mark.parametrize("bug", plant_bugs.BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_a_planted_bug_is_caught(bug: plant_bugs.Bug) -> None:
    verdict = plant_bugs.hunt(bug, SEEDS)
    assert verdict.caught, f"{bug.name}: {SEEDS} seeds passed"
