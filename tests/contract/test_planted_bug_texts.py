"""Each planted bug replaces exactly one place in the source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plant_bugs


def test_the_text_of_every_planted_bug_occurs_exactly_once_in_its_file() -> None:
    assert plant_bugs.mismatches() == []


def test_the_planted_bugs_are_many_and_have_names_of_their_own() -> None:
    assert len(plant_bugs.BUGS) >= 24
    assert len({bug.name for bug in plant_bugs.BUGS}) == len(plant_bugs.BUGS)
