"""Print for each package the share of its names that say nothing of their value: pronouns and
participles alone, such as `held`, `seen` and `one`. A value is better named by a noun of the field,
a function by a verb.

    .venv/bin/python scripts/count_odd_names.py [--list] [--limit PACKAGE=PERCENT ...]

Counted are the names that the source binds: names stored, arguments, attributes stored, functions
and classes, without the underscores at their ends and in any case. Needs the standard library only.

Exit code: 0, or 1 if the share of a package is above its limit.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operator", "runtime", "kernels")

# What a reader asks of each: whose, which, how many, by whom?
WORDS = """
own ours theirs given wanted found made kept said told left others other one some here there each
every beside whole way ways most least fours four held but why what who seen asked met taken shown
"""
ODD = frozenset(WORDS.split())


class Binding(NamedTuple):
    """A name where it gets its value. ``file`` is relative to the repository."""

    file: str
    line: int
    name: str

    @property
    def is_odd(self) -> bool:
        return self.name.strip("_").lower() in ODD


def bindings(source: str, file: str = "") -> Iterator[Binding]:
    """Every name that this source binds."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield Binding(file, node.lineno, name)
            case ast.arg(arg=name):
                yield Binding(file, node.lineno, name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Binding(file, node.lineno, name)
            case ast.ClassDef(name=name):
                yield Binding(file, node.lineno, name)


def bindings_of(package: str, root: Path = ROOT) -> list[Binding]:
    """The names of a package's modules, by file and line."""
    folder = root / package / f"fairlead_{package}"
    return sorted(
        binding
        for path in folder.rglob("*.py")
        for binding in bindings(path.read_text("utf-8"), path.relative_to(root).as_posix())
    )


def percent(names: Sequence[Binding]) -> float:
    """The share of odd names, in percent."""
    return 100 * sum(binding.is_odd for binding in names) / max(1, len(names))


def limit(text: str) -> tuple[str, float]:
    """A package and the percent that are allowed in it, from `PACKAGE=PERCENT`."""
    package, _, share = text.partition("=")
    if package not in PACKAGES:
        raise argparse.ArgumentTypeError(f"{package!r} is none of {', '.join(PACKAGES)}")
    try:
        return package, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not PACKAGE=PERCENT") from None


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print each odd name with its place")
    parser.add_argument(
        "--limit", type=limit, nargs="+", default=[], metavar="PACKAGE=PERCENT", help="fail above"
    )
    options = parser.parse_args(argv)
    limits = dict(options.limit)
    over = []
    for package in PACKAGES:
        names = bindings_of(package, root)
        odd = [binding for binding in names if binding.is_odd]
        for file, line, name in odd if options.list else ():
            print(f"{file}:{line}:{name}")
        print(f"{package}: {percent(names):.2f} % ({len(odd)} of {len(names):,} names)")
        if percent(names) > limits.get(package, 100.0):
            over.append(f"{package}: more than {limits[package]:g} % of the names are odd")
    if over:
        print(*over, "see them with --list, and name what the value is", sep="\n", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
