"""A copy of the repository, in which bugs are planted one at a time."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from planted import anchor, native
from planted.bug import PackageBug
from planted.forked import PACKAGES, Forks
from planted.native import Build

FOLDERS = (*PACKAGES, "tests", "scripts", "benchmarks", "crds", "charts", "docs", "examples")

_edits = count(1)


class Copy:
    """The repository's files that tests read, in ``folder``, and forks that test them. ``build``:
    what is compiled of the C++ again; None: the libraries are the repository's. ``objects``: a
    folder for compiled files, which copies may share.
    """

    def __init__(self, folder: Path, build: Build | None = None, objects: Path = Path()) -> None:
        self.folder, self.build = folder, build
        self.forks = Forks(folder)
        self._objects = objects

    def __enter__(self) -> Self:
        """Copy the files, with their byte code and no other cache, and start what is forked.
        Raises ``compilation.NotBuiltError``.
        """
        ignored = shutil.ignore_patterns(".*")
        for name in FOLDERS:
            shutil.copytree(anchor.ROOT / name, self.folder / name, ignore=ignored)
        for path in anchor.ROOT.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, self.folder)
        if self.build:
            native.choose(self.folder, self.build)
            native.compile_copy(self.folder, self.build, self._objects)
        self.forks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.forks.__exit__(kind, error, trace)

    @contextmanager
    def planted(self, bug: PackageBug) -> Iterator[None]:
        """The copy with the bug. Raises AnchorError, and ``compilation.NotBuiltError``."""
        planted = anchor.plant(bug.place, bug.old, bug.new, self.folder)
        target = self.folder / planted.file
        source = target.read_text()
        try:
            self._write(target, planted.text)
            yield
        finally:
            self._write(target, source)

    def _write(self, target: Path, text: str) -> None:
        target.write_text(text)
        # Byte code is good for a file's size and second: no two texts may share them.
        second = anchor.ROOT.stat().st_mtime + next(_edits)
        os.utime(target, (second, second))
        if self.build and target.suffix in native.SUFFIXES:
            native.compile_copy(self.folder, self.build, self._objects)
