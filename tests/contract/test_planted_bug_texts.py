"""Each planted bug replaces one text of one definition, which occurs in it exactly once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plant_bugs
import plant_package_bugs
from planted import anchor, forked


def test_the_text_of_every_planted_bug_occurs_exactly_once_in_its_place() -> None:
    assert anchor.mismatches(plant_bugs.BUGS) == []


def test_the_planted_bugs_are_many_and_have_names_of_their_own() -> None:
    assert len(plant_bugs.BUGS) >= 24
    assert len({bug.name for bug in plant_bugs.BUGS}) == len(plant_bugs.BUGS)


def test_the_same_holds_for_the_bugs_of_the_packages_and_their_tests_exist() -> None:
    assert plant_package_bugs.mismatches() == []
    assert len({bug.name for bug in plant_package_bugs.BUGS}) == len(plant_package_bugs.BUGS)


def test_at_most_one_in_twenty_of_them_may_pass_and_has_its_reason() -> None:
    bugs = plant_package_bugs.BUGS
    missed = [bug for bug in bugs if bug.missed]
    assert 20 * len(missed) <= len(bugs)
    packages = {bug.file.partition("/")[0] for bug in bugs}
    # Beside the packages: what runs on a GPU before anybody looks.
    assert packages == {*forked.PACKAGES, "benchmarks", "scripts", "tests"}
