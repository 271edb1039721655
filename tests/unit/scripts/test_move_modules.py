"""Modules move with everything that names them (scripts/move_modules.py), in a small repository."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from move_modules import move, read_moves
from planted.anchor import plant

MOVES = """
runtime/pkg/device/graphs.py runtime/pkg/device/step/graph_cache.py
runtime/pkg/limits.py runtime/pkg/limits/limits.py
pkg.device.graphs:Cache pkg.device.step.graph_cache:Graphs
"""
USER = '''\
"""Names ``pkg.device.graphs.Cache`` and `device/graphs.py`."""

import pkg.device.graphs
import pkg.limits as bounds
from pkg.device import graphs, other
from pkg.device.graphs import Cache
from pkg.limits import LIMIT

MODULE = "pkg.limits"
PROGRAM = """
from pkg import limits, other
from pkg.device import graphs
"""


def use(graphs_of=None):
    from pkg import limits

    return pkg.device.graphs.Cache, graphs.Cache(limits.LIMIT, graphs=1), f"{graphs.ONE}", Cache


def patch(monkeypatch):
    monkeypatch.setattr("pkg.device.graphs.Cache.size", other.limits(bounds, LIMIT))
'''
MOVED_USER = '''\
"""Names ``pkg.device.step.graph_cache.Cache`` and `device/step/graph_cache.py`."""

import pkg.device.step.graph_cache
import pkg.limits.limits as bounds
from pkg.device import other
from pkg.device.step import graph_cache
from pkg.device.step.graph_cache import Cache
from pkg.limits.limits import LIMIT

MODULE = "pkg.limits.limits"
PROGRAM = """
from pkg.limits import limits
from pkg import other
from pkg.device.step import graph_cache as graphs
"""


def use(graphs_of=None):
    from pkg.limits import limits

    return (
        pkg.device.step.graph_cache.Cache,
        graph_cache.Cache(limits.LIMIT, graphs=1),
        f"{graph_cache.ONE}",
        Cache,
    )


def patch(monkeypatch):
    monkeypatch.setattr(
        "pkg.device.step.graph_cache.Cache.size", other.limits(bounds, LIMIT)
    )
'''
SHADOW = """\
from pkg.device import graphs


def capture(graphs=graphs):
    return graphs
"""
FILES: dict[str, str | bytes] = {
    "runtime/pkg/__init__.py": "",
    "runtime/pkg/device/__init__.py": "",
    "runtime/pkg/device/graphs.py": "class Cache:\n    size = 1\n\n\nONE = 1\n",
    "runtime/pkg/device/other.py": "from pkg.limits import LIMIT as limits\n",
    "runtime/pkg/limits.py": "LIMIT = 2\n",
    "runtime/pkg/user.py": USER,
    "tests/test_shadow.py": SHADOW,
    "scripts/planted/table.py": 'BUGS = [("pkg.device.graphs:Cache.size", "pkg.limits:")]\n',
    "docs/page.md": "`runtime/pkg/limits.py`, [`device/graphs.py`](../runtime/pkg/device/graphs.py)"
    ", `pkg/device/graphs.py`, `graphs.py`, others/limits.py and pkg.limits_of.\n",
    "pyproject.toml": """\
[project.scripts]
run = "pkg.limits:main"
cached = "pkg.device.graphs:Cache"
""",
    "picture.bin": b"\xff\xfe",
}


def make(root: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "--all"], cwd=root, check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, FILES)
    return tmp_path


def test_imports_strings_tables_and_documents_follow_the_modules(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = move(read_moves(MOVES.splitlines(), root), root)
    assert left == ["docs/page.md:1: graphs.py"]
    assert capsys.readouterr().out.splitlines() == [
        "runtime/pkg/device/step/__init__.py is new: say what it owns",
        "runtime/pkg/limits/__init__.py is new: say what it owns",
    ]
    tracked = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).split()
    assert "runtime/pkg/device/graphs.py" not in tracked
    assert {"runtime/pkg/device/step/graph_cache.py", "runtime/pkg/limits/limits.py"} <= {*tracked}
    assert (root / "runtime/pkg/user.py").read_text() == MOVED_USER
    assert (root / "docs/page.md").read_text() == (
        "`runtime/pkg/limits/limits.py`, [`device/step/graph_cache.py`]"
        "(../runtime/pkg/device/step/graph_cache.py), `pkg/device/step/graph_cache.py`, "
        "`graphs.py`, others/limits.py and pkg.limits_of.\n"
    )
    assert (root / "pyproject.toml").read_text() == (
        '[project.scripts]\nrun = "pkg.limits.limits:main"\n'
        'cached = "pkg.device.step.graph_cache:Graphs"\n'
    )
    assert (root / "scripts/planted/table.py").read_text() == (
        'BUGS = [("pkg.device.step.graph_cache:Graphs.size", "pkg.limits.limits:")]\n'
    )
    assert plant("pkg.limits.limits:", "LIMIT = 2", "LIMIT = 3", root).text == "LIMIT = 3\n"
    code = "import pkg.user as u; assert u.use.__module__ and u.graph_cache.ONE == 1"
    subprocess.run([sys.executable, "-c", code], cwd=root / "runtime", check=True)


def test_a_name_with_another_meaning_in_the_file_is_kept(root: Path) -> None:
    move(read_moves(MOVES.splitlines(), root), root)
    assert (root / "tests/test_shadow.py").read_text() == SHADOW.replace(
        "from pkg.device import graphs", "from pkg.device.step import graph_cache as graphs"
    )


def test_what_names_an_old_module_in_other_ways_is_listed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(
        root,
        {
            "runtime/pkg/device/graphs.py": "HERE = __file__\n",
            "tests/test_names.py": 'A = f"{PKG}.device.graphs", f"{X}.graphs_of"\n'
            'B = f"{DEVICE}/graphs.py", "sub.graphs"\n',
            "lint.toml": 'only = ["runtime/pkg/device/gr*.py", "runtime/pkg/**"]\n',
        },
    )
    left = move(read_moves(["runtime/pkg/device/graphs.py runtime/pkg/step.py"], root), root)
    assert sorted(left) == [
        "docs/page.md:1: graphs.py",
        "lint.toml:1: runtime/pkg/device/gr*.py",
        "tests/test_names.py:1: }.device.graphs",
        "tests/test_names.py:2: graphs.py",
    ]
    assert capsys.readouterr().out == "runtime/pkg/step.py has moved, and uses __file__\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("runtime/pkg/none.py runtime/pkg/new.py", "the first must exist"),
        ("runtime/pkg/limits.py runtime/pkg/user.py", "the second not"),
        ("runtime/pkg/limits.py build/new.py", "nor may git ignore it"),
        ("runtime/pkg/limits.py", "write two paths of modules in packages, or two places"),
        ("runtime/pkg/limits.py pkg.limits:x", "write two paths"),
        ("runtime/pkg/__init__.py runtime/pkg/new.py", "write two paths"),
        ("scripts/tool.py scripts/new.py", "write two paths of modules in packages"),
        ("", "nothing to move"),
    ],
)
def test_a_move_that_cannot_be_is_refused(line: str, message: str, root: Path) -> None:
    make(root, {".gitignore": "build/\n", "scripts/tool.py": ""})
    with pytest.raises(ValueError, match=message):
        read_moves([line], root)


@pytest.mark.parametrize(
    "text",
    ["from pkg import (\n    limits,  # a comment\n)\n", "from . import limits\n"],
)
def test_an_import_that_cannot_be_rewritten_stops_everything(text: str, root: Path) -> None:
    make(root, {"runtime/pkg/odd.py": text})
    moves = read_moves(MOVES.splitlines(), root)
    with pytest.raises(ValueError, match=r"runtime/pkg/odd.py: line 1: write the import in full"):
        move(moves, root)
    assert (root / "runtime/pkg/limits.py").exists()
    assert (root / "runtime/pkg/user.py").read_text() == USER
