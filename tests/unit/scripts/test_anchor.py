"""Where a planted bug's text is found, and what is said when it is not (planted/anchor.py)."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from planted import anchor
from planted.anchor import AnchorError, Planted, plant

MODULE = '''\
"""A module."""
import functools
LIMIT = 1

@functools.cache
def free(x):
    def inner():
        return x + LIMIT
    return inner() + 2

class Pool:
    size = 1  # LIMIT

    @property
    def length(self):
        return 3

    @length.setter
    def length(self, value):
        self.size = value

    async def take(self):
        self.size -= 1

if LIMIT:
    def chosen(): return 5
else:
    def chosen(): return 6
LAST = "ü" if LIMIT else 4
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    file = tmp_path / "runtime" / "pkg" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "old", "line"),
    [
        ("free", "return inner() + 2", 9),
        ("free", "@functools.cache\n", 5),
        ("free.inner", "LIMIT", 8),
        ("free.inner", "    def inner():\n", 7),
        ("Pool", "size = 1", 12),
        ("Pool", "LIMIT", 12),
        ("Pool.length", "return 3", 16),
        ("Pool.length", "self.size = value", 20),
        ("Pool.length", "@length.setter\n", 18),
        ("Pool.take", "self.size -= 1\n", 23),
        ("chosen", "return 6\n", 28),
        ("", "LIMIT = 1", 3),
        ("", "if LIMIT:", 25),
        ("", "import functools", 2),
        ("", '"ü" if LIMIT else 4\n', 29),
        ("", "return inner() + 2\n\nclass Pool", 9),
    ],
)
def test_a_text_is_found_once_in_its_definition(name: str, old: str, line: int, root: Path) -> None:
    place = f"pkg.module:{name}"
    planted = plant(place, old, "NEW", root)
    assert planted.file == "runtime/pkg/module.py"
    before, found, after = planted.text.partition("NEW")
    assert found
    assert before + old + after == MODULE
    assert before.count("\n") == line - 1


@pytest.mark.parametrize(
    ("place", "old", "message"),
    [
        ("pkg.none:", "x", "pkg.none:: no module pkg.none: name the one that has the code now"),
        ("runtime/pkg/module.py", "x", "runtime/pkg/module.py is Python: name its module and def"),
        ("csrc/none.cpp", "x", "csrc/none.cpp does not exist: name a file, relative to the rep"),
        ("pkg.module:gone", "return 3", "gone: runtime/pkg/module.py defines no gone: name Pool."),
        (
            "pkg.module:gone",
            "return 9",
            "defines no gone: runtime/pkg/module.py has it nowhere: ta",
        ),
        ("pkg.module:inner", "x + LIMIT", "defines no inner: name free.inner, which has it"),
        ("pkg.module:free", "return 3", "'return 3' 0 times, not once: name Pool.length, which"),
        ("pkg.module:free", "return 9", "0 times, not once: runtime/pkg/module.py has it nowhere"),
        ("pkg.module:Pool", "self.size", "2 times, not once: take a longer text, or a definition"),
        ("pkg.module:Pool.length", "self", "3 times, not once: take a longer text"),
        ("pkg.module:chosen", "return ", "2 times, not once: take a longer text"),
        ("pkg.module:", "return 3", "0 times, not once: name Pool.length, which has it"),
        ("pkg.module:", "LIMIT", "3 times, not once: take a longer text"),
    ],
)
def test_a_place_or_text_that_is_not_there_once_is_named_with_the_fix(
    place: str, old: str, message: str, root: Path
) -> None:
    with pytest.raises(AnchorError) as caught:
        plant(place, old, "", root)
    assert message in str(caught.value)
    assert place in str(caught.value)


def test_the_same_text_elsewhere_in_the_file_costs_nothing(root: Path) -> None:
    file = root / "runtime" / "pkg" / "module.py"
    more = "\n\ndef other():\n    self.size -= 1\n    LIMIT = 1\n"
    file.write_text(f"{MODULE}{more}")
    planted = plant("pkg.module:Pool.take", "self.size -= 1", "pass", root)
    assert planted.text == MODULE.replace("self.size -= 1", "pass") + more
    assert plant("pkg.module:", "LIMIT = 1", "LIMIT = 2", root).text.startswith(
        MODULE.replace("LIMIT = 1", "LIMIT = 2")
    )


def test_a_text_in_a_file_that_is_not_python_occurs_once_in_the_file(root: Path) -> None:
    (root / "team.cpp").write_text("int a = 1;\nint b = 1;\n")
    assert plant("team.cpp", "b = 1", "b = 2", root) == Planted(
        "team.cpp", "int a = 1;\nint b = 2;\n"
    )
    with pytest.raises(AnchorError, match=r"team.cpp: it has '= 1' 2 times, not once: take a lon"):
        plant("team.cpp", "= 1", "", root)
    with pytest.raises(AnchorError, match=r"team.cpp has it nowhere"):
        plant("team.cpp", "c", "", root)


def test_two_modules_of_one_name_are_refused(root: Path) -> None:
    package = root / "tests" / "pkg" / "module"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with pytest.raises(AnchorError, match=r"runtime/pkg/module.py and tests/pkg/module/__init"):
        plant("pkg.module:", "LIMIT = 1", "", root)


@pytest.mark.parametrize(
    "file",
    [
        "operator/fairlead_operator/reconcile.py",
        "runtime/fairlead_runtime/cache/__init__.py",
        "kernels/fairlead_kernels/formats/quantize.py",
        "tests/support/soak.py",
        "tests/cluster/conftest.py",
        "tests/e2e/__main__.py",
        "scripts/planted/anchor.py",
        "benchmarks/gpu/bounds.py",
        "docker/sbom.py",
    ],
)
def test_modules_of_all_folders_are_found(file: str) -> None:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if not module.startswith("benchmarks."):
        module = module.partition(".")[2]
    assert anchor.file_of(f"{module}:") == file


def test_a_mismatch_names_the_bug() -> None:
    class Bug(NamedTuple):
        name: str
        place: str
        old: str
        new: str = ""

    good = Bug("good", "planted.anchor:mismatches", "except AnchorError as error:")
    bad = Bug("bad", "planted.anchor:mismatches", "a text of no file")
    (error,) = anchor.mismatches([good, bad])
    assert error.startswith("bad: planted.anchor:mismatches: it has 'a text of no file' 0 times")
