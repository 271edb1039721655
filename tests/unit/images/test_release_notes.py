"""The notes of a release come from the changelog, and every version agrees."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "release_notes.py"
CHANGELOG = """\
# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- Something new.

## [0.1.0] - 2026-11-01

- The first one.
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "charts/fairlead").mkdir(parents=True)
    chart = 'apiVersion: v2\nversion: 0.2.0\nappVersion: "0.2.0"\n'
    (tmp_path / "charts/fairlead/Chart.yaml").write_text(chart)
    return tmp_path


def notes(project: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "scripts/release_notes.py"), version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_notes_are_the_section_of_the_version_alone(project: Path) -> None:
    done = notes(project, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "### Added\n\n- Something new.\n"


@pytest.mark.parametrize("version", ["0.3.0", "Unreleased", "0.2"])
def test_a_version_without_a_section_ends_the_release(project: Path, version: str) -> None:
    done = notes(project, version)
    assert done.returncode == 1
    assert f"no section for {version}" in done.stderr


@pytest.mark.parametrize(
    ("file", "old", "place"),
    [
        ("pyproject.toml", 'version = "0.2.0"', "pyproject.toml"),
        ("charts/fairlead/Chart.yaml", "\nversion: 0.2.0", "Chart.yaml, version"),
        ("charts/fairlead/Chart.yaml", 'appVersion: "0.2.0"', "Chart.yaml, appVersion"),
    ],
)
def test_a_version_that_another_place_contradicts_ends_the_release(
    project: Path, file: str, old: str, place: str
) -> None:
    path = project / file
    path.write_text(path.read_text().replace(old, old.replace("0.2.0", "0.1.9")))
    done = notes(project, "0.2.0")
    assert done.returncode == 1
    assert f"{place} says 0.1.9" in done.stderr
