"""How a test is found that catches a planted bug, and what of the C++ is compiled for it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import plant_package_bugs
from plant_package_bugs import CatchingTests, Hunter
from planted import native
from planted.bug import PackageBug
from planted.copies import Copy
from planted.forked import Answer, Selection
from planted.hunting import Outcome, Run, Runs, Verdict

from fairlead_kernels.cpu import compilation

FILE = "unit/test_module.py"
BUG = PackageBug("name", "pkg.module:", "one", "two", (FILE,))
FIRST, SECOND = f"{FILE}::test_first", f"{FILE}::test_second"


class Forks:
    """What forks would answer: which tests pass without the bug, and what comes with it."""

    def __init__(self, module: Path, passing: tuple[str, ...], answer: Answer) -> None:
        self.module, self.passing, self.answer = module, passing, answer
        self.selections: list[tuple[str, tuple[str, ...]]] = []

    def run(self, selection: Selection) -> Answer:
        text = self.module.read_text()
        self.selections.append((text, tuple(selection.tests)))
        if text == "two":
            return self.answer
        if not {*selection.tests} <= {*self.passing}:
            return Answer(ended=True)
        return Answer(passed=dict.fromkeys(selection.tests, 1.0), ended=True)


class Passes(Runs):
    """Processes in which all tests pass."""

    def run(self, *_: object) -> Run:
        return Run(0, "1 passed")


class Hunted:
    def __init__(self, folder: Path, passing: tuple[str, ...], answer: Answer) -> None:
        module = folder / "runtime" / "pkg" / "module.py"
        module.parent.mkdir(parents=True)
        module.write_text("one")
        self.tests = folder / "tests" / FILE
        self.tests.parent.mkdir(parents=True)
        self.tests.write_text("")
        self.file = folder / "catching.json"
        self.copy = Copy(folder)
        self.forks = Forks(module, passing, answer)
        self.copy.forks = self.forks  # type: ignore[assignment]

    def hunt(self, known: str = "", bug: PackageBug = BUG) -> Verdict:
        self.file.write_text(json.dumps({bug.name: known} if known else {}))
        hunter = Hunter([bug], Passes(), CatchingTests(self.file))
        return hunter.hunt(bug, self.copy)


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant_package_bugs, "BUGS", (BUG,))


def test_the_test_that_caught_a_bug_last_is_the_only_one_that_runs(tmp_path: Path) -> None:
    hunted = Hunted(tmp_path, (FIRST, SECOND), Answer(failed={SECOND: "why"}, ended=True))
    verdict = hunted.hunt(SECOND)
    assert (verdict.outcome, verdict.how) == (Outcome.CAUGHT, SECOND)
    assert hunted.forks.selections == [("one", (SECOND,)), ("two", (SECOND,))]


@pytest.mark.parametrize("known", ["", f"{FILE}::test_gone", f"unit/test_another.py::{FIRST}"])
def test_without_such_a_test_whole_files_tell_and_it_is_kept(tmp_path: Path, known: str) -> None:
    hunted = Hunted(tmp_path, (FIRST, SECOND), Answer(failed={FIRST: "why"}, ended=True))
    assert hunted.hunt(known).how == FIRST
    assert hunted.forks.selections[-3:] == [("two", (FILE,)), ("one", (FIRST,)), ("two", (FIRST,))]
    assert json.loads(hunted.file.read_text()) == {BUG.name: FIRST}


def test_tests_with_a_name_like_the_bugs_run_first(tmp_path: Path) -> None:
    hunted = Hunted(tmp_path, (FIRST, SECOND), Answer(failed={SECOND: "why"}, ended=True))
    names = ("a_state_is_cleared", "rows_of_a_state", "the_rows_of_each_state_are_read", "other")
    hunted.tests.write_text("".join(f"def test_{name}(): ...\n" for name in names))
    bug = BUG._replace(name="a row of a state is not read")
    assert hunted.hunt(bug=bug).how == SECOND
    nearest = [f"{FILE}::test_{names[number]}" for number in (2, 1, 0)]
    assert hunted.forks.selections[0] == ("two", tuple(nearest))


def test_tests_that_caught_others_run_before_whole_files(tmp_path: Path) -> None:
    hunted = Hunted(tmp_path, (FIRST, SECOND), Answer(failed={SECOND: "why"}, ended=True))
    hunted.file.write_text(
        json.dumps({"another": SECOND, "one more": "unit/test_another.py::test"})
    )
    hunter = Hunter([BUG], Passes(), CatchingTests(hunted.file))
    assert hunter.hunt(BUG, hunted.copy).how == SECOND
    assert hunted.forks.selections[0] == ("two", (SECOND,))
    assert FILE not in {test for _, tests in hunted.forks.selections for test in tests}


@pytest.mark.parametrize(
    ("passing", "answer"),
    [
        ((FIRST,), Answer(passed={FIRST: 1.0}, ended=True)),
        ((SECOND,), Answer(failed={FIRST: "it fails without the bug, too"}, ended=True)),
        ((FIRST,), Answer(running=FIRST, signal=signal.SIGSEGV)),
        ((FIRST,), Answer(output="nothing ran")),
    ],
)
def test_what_no_fork_shows_is_judged_by_a_process(
    tmp_path: Path, passing: tuple[str, ...], answer: Answer
) -> None:
    hunted = Hunted(tmp_path, passing, answer)
    verdict = hunted.hunt()
    assert (verdict.outcome, verdict.how) == (Outcome.MISSED, "its tests pass")
    assert json.loads(hunted.file.read_text()) == {}


def test_a_test_that_hangs_has_caught_the_bug(tmp_path: Path) -> None:
    hunted = Hunted(tmp_path, (FIRST,), Answer(running=FIRST))
    assert hunted.hunt().how == FIRST


def test_a_test_that_a_bug_in_cpp_crashes_has_caught_it(tmp_path: Path) -> None:
    hunted = Hunted(tmp_path, (FIRST,), Answer(running=FIRST, signal=signal.SIGSEGV))
    hunted.forks.module = tmp_path / "runtime" / "pkg" / "module.cpp"
    hunted.forks.module.write_text("one")
    assert hunted.hunt(bug=BUG._replace(place="runtime/pkg/module.cpp")).how == FIRST


def test_tests_are_kept_in_order_and_only_of_bugs_that_are_planted(tmp_path: Path) -> None:
    file = tmp_path / "catching.json"
    file.write_text(json.dumps({"of no table": FIRST}))
    CatchingTests(file).put(BUG, SECOND)
    assert file.read_text() == f'{{\n "{BUG.name}": "{SECOND}"\n}}\n'
    quick = BUG._replace(quick="test_first")
    assert CatchingTests(file).get(quick) == FIRST


def test_a_file_is_compiled_again_only_when_it_or_what_it_includes_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / native.PACKAGE / "csrc"
    objects, libraries = tmp_path / "objects", tmp_path / native.PACKAGE / "native"
    for folder in (sources, objects, libraries):
        folder.mkdir(parents=True)
    (sources / "a.h").write_text('#include "b.h"\n')
    (sources / "b.h").write_text("")
    (sources / "one.cpp").write_text('#include "a.h"\n')
    (sources / "two.cpp").write_text("")
    (sources / "hash.cpp").write_text("FAIRLEAD_SOURCES\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f"for each; do case $each in *.cpp) basename $each >> {tmp_path}/log;; esac; done\n"
        'while [ "$1" != -o ]; do shift; done; touch "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(compilation, "compiler", lambda: str(compiler))

    def compiled() -> list[str]:
        (tmp_path / "log").write_text("")
        native.compile_copy(tmp_path, native.BASELINE, objects)
        return sorted((tmp_path / "log").read_text().split())

    assert compiled() == ["hash.cpp", "one.cpp", "two.cpp"]
    assert (libraries / "baseline.so").exists()
    assert compiled() == []
    (sources / "two.cpp").write_text("// changed\n")
    assert compiled() == ["hash.cpp", "two.cpp"]
    (sources / "b.h").write_text("// changed\n")
    assert compiled() == ["hash.cpp", "one.cpp"]
    (sources / "b.h").write_text("")
    assert compiled() == []


def test_all_headers_compile_where_instructions_are_emulated(tmp_path: Path) -> None:
    headers = sorted(compilation.SOURCES.glob("*.h"))
    source = tmp_path / "headers.cpp"
    source.write_text("".join(f'#include "{header.name}"\n' for header in headers))
    _, (_, flags) = native.DIGITS.libraries
    command = [compilation.compiler(), *compilation.FLAGS, *flags, f"-I{compilation.SOURCES}"]
    subprocess.run([*command, "-Wno-psabi", "-fsyntax-only", str(source)], check=True)


@pytest.mark.parametrize(
    ("place", "file", "build"),
    [
        ("pkg.module:", FILE, None),
        ("runtime/pkg/module.cpp", FILE, native.BASELINE),
        ("runtime/pkg/module.h", "unit/kernels/test_cpu_digits.py", native.DIGITS),
        ("pkg.module:", "unit/kernels/test_cpu_digits.py", native.DIGITS),
    ],
)
def test_what_is_built_is_for_the_bug_and_its_tests(
    place: str, file: str, build: native.Build | None
) -> None:
    assert plant_package_bugs.build_of(BUG._replace(place=place, tests=(file,))) == build
