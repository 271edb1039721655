"""The Makefile's targets: what `make generate` runs, and the names in pages and workflows."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
PAGES = sorted(chain(ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md")))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def recipe(target: str) -> str:
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return str(found)


def test_one_command_runs_every_script_that_can_check_what_it_writes() -> None:
    scripts = (ROOT / "scripts").glob("*.py")
    checking = {path.name for path in scripts if '"--check"' in path.read_text()}
    assert len(checking) > 3
    assert set(re.findall(r"scripts/(\w+\.py)", recipe("generate"))) == checking


def test_the_same_command_copies_the_custom_resource_definition_into_the_chart() -> None:
    (crd,) = (ROOT / "crds").iterdir()
    assert f"cp crds/{crd.name} charts/fairlead/crds/" in recipe("generate")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_target_that_a_page_names_exists(page: Path) -> None:
    assert set(re.findall(r"`make ([a-z][a-z0-9-]*)", page.read_text())) <= TARGETS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist(workflow: Path) -> None:
    named = re.findall(r"\bmake ((?:[a-z][a-z0-9-]*(?: |$))+)", workflow.read_text(), re.MULTILINE)
    assert named
    assert {target for line in named for target in line.split()} <= TARGETS
