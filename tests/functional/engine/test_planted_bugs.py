"""The whole-run property catches planted bugs, one at a time, in a copy of the source."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import plant_bugs

# Each bug is caught within this many seeds; the script tries more by default.
SEEDS = 40


def test_the_property_holds_on_a_copy_without_a_bug() -> None:
    nothing = plant_bugs.Bug("nothing", plant_bugs.POOL, "class BlockPool", "class BlockPool")
    verdict = plant_bugs.hunt(nothing, 5)
    assert not verdict.caught, verdict.how


@pytest.fixture(scope="module")
def verdicts() -> dict[str, plant_bugs.Verdict]:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda bug: plant_bugs.hunt(bug, SEEDS), plant_bugs.BUGS)
        return {verdict.bug.name: verdict for verdict in found}


@pytest.mark.parametrize("name", [bug.name for bug in plant_bugs.BUGS])
def test_a_planted_bug_is_caught(name: str, verdicts: dict[str, plant_bugs.Verdict]) -> None:
    assert verdicts[name].caught, f"{name}: {SEEDS} seeds passed"
