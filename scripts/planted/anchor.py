"""Finds the place of a planted bug: a text that occurs once in one definition.

A place in Python is `"fairlead_runtime.cache.blocks:BlockPool.release"`: a module and the qualified
name of a function or class in it, without `<locals>`. Its source is the whole lines from the first
decorator to the last line. Definitions of one name (overloads, a property and its setter, `if` and
`else`) are one place: the text occurs once in all of them together. Without a name,
`"fairlead_runtime.cache.blocks:"`, the place is the module's top level: the text occurs once
outside the module's functions and classes, or reaches across their edges. An edit anywhere else
costs nothing.

A place in any other file is its path, `"kernels/fairlead_kernels/csrc/team.cpp"`; the text occurs
once in the file.

Everything is found by path, nothing is imported.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

ROOT = Path(__file__).resolve().parents[2]
# Where Python looks for the project's modules; the benchmarks' names begin at the root.
SOURCES = ("operator", "runtime", "kernels", "tests", "scripts", "docker", ".")

Span = tuple[int, int]


class AnchorError(ValueError):
    """A place or its text is not there, or not once. The message names the place and the fix."""


class Anchored(Protocol):
    """A bug: at ``place``, ``old`` becomes ``new``."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


class Planted(NamedTuple):
    """``file`` is relative to the repository, ``text`` all that it holds with the bug."""

    file: str
    text: str


def plant(place: str, old: str, new: str, root: Path = ROOT) -> Planted:
    """The file of a place in the repository ``root`` with ``new`` for ``old``; writes nothing.
    Raises AnchorError.
    """
    file = file_of(place, root)
    text = (root / file).read_text()
    _, in_python, name = place.partition(":")
    everywhere = list(_occurrences(text, old))
    found = [span for span in everywhere if not in_python or _is_in(name, text, span)]
    if len(found) == 1:
        start, end = found[0]
        return Planted(file, text[:start] + new + text[end:])
    if found:
        fix = "take a longer text" + (", or a definition inside" if in_python else "")
    elif in_python and everywhere:
        homes = {holder(text, span) or "the top level" for span in everywhere}
        fix = f"name {' or '.join(sorted(homes))}, which has it"
    else:
        fix = f"{file} has it nowhere: take the text that is there now"
    lacks = in_python and name and name not in _definitions(text)
    what = f"{file} defines no {name}" if lacks else f"it has {old!r} {len(found)} times, not once"
    raise AnchorError(f"{place}: {what}: {fix}")


def file_of(place: str, root: Path = ROOT) -> str:
    """The path of a place's file in the repository ``root``. Raises AnchorError where there is
    none, or more than one.
    """
    module, in_python, _ = place.partition(":")
    if not in_python:
        if module.endswith(".py"):
            raise AnchorError(f"{place} is Python: name its module and definition, module:name")
        if not (root / module).is_file():
            raise AnchorError(f"{place} does not exist: name a file, relative to the repository")
        return module
    stem = module.replace(".", "/")
    files = [
        path.relative_to(root).as_posix()
        for source in SOURCES
        for path in (root / source / f"{stem}.py", root / source / stem / "__init__.py")
        if path.is_file()
    ]
    if not files:
        raise AnchorError(f"{place}: no module {module}: name the one that has the code now")
    if len(files) > 1:
        raise AnchorError(f"{place}: {' and '.join(files)} are {module}: rename one")
    return files[0]


def mismatches(bugs: Iterable[Anchored]) -> list[str]:
    """Bugs whose text does not occur exactly once in its place: they would prove nothing."""
    errors = []
    for bug in bugs:
        try:
            plant(bug.place, bug.old, bug.new)
        except AnchorError as error:
            errors.append(f"{bug.name}: {error}")
    return errors


def holder(text: str, span: Span) -> str:
    """The qualified name of the innermost definition of ``text`` that contains ``span`` whole;
    empty at the top level.
    """
    names = [name for name, spans in _definitions(text).items() if _is_within(span, spans)]
    return max(names, key=lambda name: name.count("."), default="")


def _occurrences(text: str, old: str) -> Iterator[Span]:
    at = text.find(old)
    while at >= 0:
        yield at, at + len(old)
        at = text.find(old, at + 1)


def _is_in(name: str, text: str, span: Span) -> bool:
    if not name:
        return not holder(text, span)
    return _is_within(span, _definitions(text).get(name, ()))


def _is_within(span: Span, spans: Iterable[Span]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)


@cache
def _definitions(text: str) -> dict[str, list[Span]]:
    """The spans of each qualified name's definitions."""
    offsets = [0]
    for line in text.split("\n"):  # as the parser counts; splitlines() knows more ends of lines
        offsets.append(offsets[-1] + len(line) + 1)
    spans: dict[str, list[Span]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min(one.lineno for one in (child, *child.decorator_list))
                last = child.end_lineno or child.lineno
                span = offsets[first - 1], min(offsets[last], len(text))
                spans.setdefault(f"{prefix}{child.name}", []).append(span)
                inside = f"{prefix}{child.name}."
            if not isinstance(child, ast.expr):
                visit(child, inside)

    visit(ast.parse(text), "")
    return spans
