"""The workflows for a public host, which nothing here can run, agree with each other and the
project.
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
ALL = "".join(WORKFLOWS.values())
IMAGES = runpy.run_path(str(ROOT / "scripts" / "build_images.py"))["IMAGES"]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_may_only_read_and_each_job_ends_in_time(name: str) -> None:
    text = WORKFLOWS[name]
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("runs-on: ") == text.count("timeout-minutes: ") > 0


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_that_has_not_run_says_so_in_its_first_lines(name: str) -> None:
    first = re.sub(r"\n# ?", " ", WORKFLOWS[name].split("\nname: ")[0])
    assert "It has not run yet." in first


def test_all_workflows_take_one_version_of_an_action_and_one_kind_of_machine() -> None:
    versions = set(re.findall(r"uses: (\S+)@(\S+)", ALL))
    assert len(versions) == len({action for action, _ in versions}) > 3
    assert len(set(re.findall(r"runs-on: (\S+)", ALL))) == 1


def test_a_release_builds_and_pushes_every_image_that_the_chart_names() -> None:
    """The chart names them with its own version; the GPU build has a tag of its own."""
    release = WORKFLOWS["release.yml"]
    built = re.findall(r"make images .*NAMES=\"(.*)\"", release)
    assert " ".join(built).split() == list(IMAGES)
    pushed = re.findall(r'"(\w+:\$\{TAG#v\}[\w-]*)"', release)
    assert pushed == [f"{name}:${{TAG#v}}{suffix}" for name, suffix, _ in IMAGES.values()]
    helper = (ROOT / "charts" / "fairlead" / "templates" / "_helpers.tpl").read_text()
    assert f'printf "%s{IMAGES["runtime-cuda"][1]}" .Chart.AppVersion' in helper


def test_a_release_publishes_all_else_before_it_builds_the_image_for_gpus() -> None:
    """Which may take hours, or all the disk that the steps before have freed."""
    release = WORKFLOWS["release.yml"]
    steps = ("sudo rm -rf ", "make images ", '"runtime:${TAG#v}"', "helm push", '"runtime-cuda"')
    places = [release.index(step) for step in (*steps, 'runtime:${TAG#v}-cuda"', "gh release")]
    assert places == sorted(places)


def test_go_and_python_are_versions_that_the_project_asks_for() -> None:
    module = ROOT / "tests" / "cluster" / "harness" / "gomodules" / "controlplane" / "go.mod"
    (go,) = re.findall(r"^go (\d+\.\d+)", module.read_text(), re.MULTILINE)
    assert set(re.findall(r'go-version: "(\S+)"', ALL)) == {go}
    (python,) = set(re.findall(r'python-version: "(\S+)"', ALL))
    assert python in {"3.11", "3.12", "3.13"}
