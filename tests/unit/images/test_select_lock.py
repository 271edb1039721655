"""Which entries of the lock an image installs (docker/select_lock.py)."""

import re
from pathlib import Path

import pytest

from select_lock import closure, entries, main, needed_by

ROOT = Path(__file__).parents[3]
LOCK = """\
app-lib==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via demo (pyproject.toml)
deep==2.0 \\
    --hash=sha256:bb
    # via
    #   app-lib
    #   other
gpu-part==3.0 ; sys_platform == 'linux' \\
    --hash=sha256:cc
    # via app-lib
only-gpu==4.0 \\
    --hash=sha256:dd
    # via gpu-part
other==5.0 ; python_full_version < '3.12' \\
    --hash=sha256:ee
other==6.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ff
"""


def test_a_closure_is_what_the_roots_need_and_nothing_else() -> None:
    assert closure({"app-lib"}, entries(LOCK), []) == ["app-lib", "deep", "gpu-part", "only-gpu"]
    assert closure({"other"}, entries(LOCK), []) == ["deep", "other"]


def test_nothing_behind_a_package_that_is_left_out_is_taken() -> None:
    assert closure({"app-lib"}, entries(LOCK), ["gpu-*"]) == ["app-lib", "deep"]


def test_entries_keep_their_hashes_and_every_range_of_python_versions() -> None:
    locked = entries(LOCK)
    assert locked["app-lib"].count("--hash") == 2
    assert locked["other"].count("--hash") == 2
    assert needed_by(locked["deep"]) == {"app-lib", "other"}


def test_a_package_that_the_lock_lacks_ends_the_build() -> None:
    with pytest.raises(SystemExit, match="lock has no missing"):
        closure({"missing"}, entries(LOCK), [])


def test_a_requirement_of_the_builders_own_replaces_the_entry_of_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other.lock").write_text(LOCK)
    own = "app-lib==1.0+cpu --hash=sha256:cd"
    arguments = ("--lock", "other.lock", "--only", "app-lib", "--instead", own, str(tmp_path))
    monkeypatch.setattr("sys.argv", ["select_lock.py", *arguments])
    assert main() == 0
    printed = entries(capsys.readouterr().out)
    assert printed["app-lib"] == own
    assert printed.keys() == {"app-lib", "deep", "gpu-part", "only-gpu"}


@pytest.mark.parametrize(
    ("extra", "needs", "lacks"),
    [
        ("operator", {"kopf", "kubernetes", "aiohttp", "pyyaml"}, {"torch", "numpy", "pytest"}),
        ("runtime", {"torch", "transformers", "uvicorn", "pyyaml"}, {"kopf", "pytest", "ruff"}),
    ],
)
def test_an_extra_of_the_real_lock_selects_its_packages_with_hashes(
    extra: str,
    needs: set[str],
    lacks: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["select_lock.py", "--extra", extra, str(ROOT)])
    assert main() == 0
    printed = entries(capsys.readouterr().out)
    assert needs <= printed.keys()
    assert not lacks & printed.keys()
    assert all(
        re.search(r"==\S+", entry) and "--hash=sha256:" in entry for entry in printed.values()
    )
