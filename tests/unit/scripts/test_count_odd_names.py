"""Which names scripts/count_odd_names.py counts, and when it fails."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import count_odd_names
from count_odd_names import ODD, bindings, main

SOURCE = """\
import os as here
class Seen:
    kept: int = 1
    def taken(self, given, *others, why=None, **what):
        self._held = other_pods = given.left
        return {one: (who := one) for one in others}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for package in count_odd_names.PACKAGES:
        folder = tmp_path / package / f"fairlead_{package}"
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("replicas = 1\n")
    (tmp_path / "operator" / "fairlead_operator" / "module.py").write_text("pods = 1\n_WHY_ = 2\n")
    return tmp_path


def test_names_that_are_bound_are_counted_and_names_that_are_read_are_not() -> None:
    names = sorted(binding.name for binding in bindings(SOURCE))
    bound = "Seen _held given kept one other_pods others self taken what who why"
    assert " ".join(names) == bound
    odd = {binding.name for binding in bindings(SOURCE) if binding.is_odd}
    assert odd == {*names} - {"self", "other_pods"}, "no part of a name is odd, only a whole one"


def test_there_are_as_many_odd_words_as_the_review_counted_with() -> None:
    assert len(ODD) == 37


def test_each_package_has_a_line_with_its_share(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], root) == 0
    assert capsys.readouterr().out.splitlines() == [
        "operator: 50.00 % (1 of 2 names)",
        "runtime: 0.00 % (0 of 1 names)",
        "kernels: 0.00 % (0 of 1 names)",
    ]


def test_the_list_names_file_and_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"], root)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "operator/fairlead_operator/module.py:2:_WHY_"


def test_a_share_above_its_limit_fails_and_one_at_it_does_not(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--limit", "operator=50", "kernels=0"], root) == 0
    assert capsys.readouterr().err == ""
    assert main(["--limit", "operator=49.9", "kernels=0"], root) == 1
    assert "operator: more than 49.9 %" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["operators=1", "operator", "operator=much"])
def test_a_limit_for_no_package_or_without_a_number_is_refused(root: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        main(["--limit", text], root)


def test_the_packages_of_this_repository_have_names() -> None:
    for package in count_odd_names.PACKAGES:
        assert len(count_odd_names.bindings_of(package)) > 1000
