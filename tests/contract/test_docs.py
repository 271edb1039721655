"""The documentation agrees with the code."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "examples")
PAGES = sorted(chain(ROOT.glob("*.md"), *((ROOT / name).rglob("*.md") for name in FOLDERS)))
LONGEST = 120  # characters of a line; tables and the targets of links do not count


def test_the_flag_tables_are_those_of_the_configuration() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_too_long(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    text = {n: re.sub(r"\]\([^)]*\)", "]", line) for n, line in lines if line[:1] != "|"}
    assert [n for n, line in text.items() if len(line) > LONGEST] == []


@pytest.mark.parametrize("folder", ["docs", "docs/design"])
def test_the_first_page_of_a_folder_links_to_every_other(folder: str) -> None:
    index = ROOT / folder / "README.md"
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index.read_text()))
    assert linked == {page.name for page in index.parent.glob("*.md")} - {index.name}


def test_a_change_that_is_not_released_is_one_line_of_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    section = text.split("## [Unreleased]\n")[1].split("\n## [")[0]
    headings = re.findall(r"^### (.*)$", section, re.MULTILINE)
    assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert len(headings) == len(set(headings))
    part = re.compile(r'- \S.*|### \w+|[A-Z][\w ]+:|"GPU, untried": .*|')
    assert [line for line in section.splitlines() if not part.fullmatch(line)] == []


def test_every_test_that_a_page_names_exists() -> None:
    text = (ROOT / "docs" / "robustness.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_the_readme_names_every_top_level_folder() -> None:
    readme = (ROOT / "README.md").read_text()
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    folders = {
        line.split("/")[0]
        for line in tracked.splitlines()
        if "/" in line and not line.startswith(".")
    }
    assert not {name for name in folders if f"`{name}/" not in readme}


def test_the_page_on_installing_claims_the_kubernetes_that_the_tests_run_and_no_other() -> None:
    harness = (ROOT / "tests" / "cluster" / "harness" / "binaries.py").read_text()
    chart = (ROOT / "charts" / "fairlead" / "Chart.yaml").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    (tried,) = re.findall(r'^KUBERNETES = "v(\d+\.\d+)\.', harness, re.MULTILINE)
    (least,) = re.findall(r'^kubeVersion: ">=(\d+\.\d+)\.0-0"$', chart, re.MULTILINE)
    assert f"You need Kubernetes {tried}, which the tests run" in page
    assert f"refuses only what is older than {least}" in page


def test_the_page_on_operations_says_where_to_look_for_every_alert() -> None:
    rules = (ROOT / "charts" / "fairlead" / "files" / "alerts.yaml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    page = (ROOT / "docs" / "operations.md").read_text()
    assert alerts
    assert set(re.findall(r"`(Fairlead\w+)`", page)) == alerts
