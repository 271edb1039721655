"""Move modules, and rewrite everything that names them.

    .venv/bin/python scripts/move_modules.py FILE

Each line of FILE (`-`: standard input) is `OLD NEW`: two paths of modules, relative to the
repository, or two places of a definition, `package.module:Old package.module:New`. The definition
somebody moves or renames by hand; its name is rewritten where the place is written so, as for
planted bugs and entry points. The texts of planted bugs are left alone.

Rewritten in all that git tracks: imports, dotted names, and paths with a folder (`device/graphs.py`
if that is one file). A module that is used by its name keeps it, by `as`, where the old or the new
name has another meaning in the file. Prints where an old name is left, and what else to look at.
Exit code: 0, 1 if an old name is left in Python, 2 if nothing was done, for the reason printed.

Own code, because rope's MoveModule takes 3 to 12 seconds for each of many modules, renames none,
and leaves strings, tables and documents as they are.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import accumulate
from os.path import commonpath
from pathlib import Path
from typing import NamedTuple

from planted.anchor import SOURCES

ROOT = Path(__file__).resolve().parents[1]
PATH = re.compile(r"\b(?:\w+/)*\w+\.py\b")
LEFT = re.compile(rf"[\w./*-]*\*[\w./*-]*|\}}\.\w+(?:\.\w+)*|{PATH.pattern}")


class Moves(NamedTuple):
    """``files``: old path → new. ``names``: the same of modules' and definitions' dotted names."""

    files: dict[str, str]
    names: dict[str, str]


def module_of(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts[1:] if parts[0] in SOURCES else parts)


def read_moves(lines: Iterable[str], root: Path) -> Moves:
    """Raises ValueError for a line that cannot be, with the reason."""
    files: dict[str, str] = {}
    names: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines)):
        old, _, new = line.partition(" ")
        if ":" in old and ":" in new:
            names[old] = new
            continue
        modules = all(re.fullmatch(r"\S+(?<!__init__)\.py", path) for path in (old, new))
        if not modules or "." not in module_of(old):
            raise ValueError(f"{line}: write two paths of modules in packages, or two places")
        ignored = subprocess.run(["git", "check-ignore", "-q", new], cwd=root, check=False)
        taken = (root / new).exists() or new in files.values() or ignored.returncode == 0
        if taken or not (root / old).is_file():
            raise ValueError(f"{line}: the first must exist, the second not, nor may git ignore it")
        files[old], names[module_of(old)] = new, module_of(new)
    if not names:
        raise ValueError("nothing to move")
    return Moves(files, names)


def rewrite_names(text: str, names: Mapping[str, str]) -> str:
    """Write dotted names anew, in code, strings and prose."""
    choice = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{choice})(?!\w)", lambda found: names[found[0]], text)


def rewrite_paths(text: str, files: Mapping[str, str], tracked: Iterable[str]) -> str:
    """Write paths anew. What a path leaves out at its front, the new one leaves out too."""

    def replace(found: re.Match[str]) -> str:
        said = found[0]
        meant = [path for path in tracked if f"/{path}".endswith(f"/{said}")]
        if "/" not in said or len(meant) != 1 or meant[0] not in files:
            return said
        new = f"/{files[meant[0]]}"
        return new.removeprefix(commonpath([f"/{meant[0].removesuffix(said)}", new])).lstrip("/")

    return PATH.sub(replace, text)


def rewrite_imports(text: str, names: Mapping[str, str]) -> str:
    """Write `from package import module` anew, and the module's uses where its name changes."""
    tree, data = ast.parse(text), text.encode()
    starts = list(accumulate((len(line) + 1 for line in data.split(b"\n")), initial=0))
    edits: dict[tuple[int, int], str] = {}

    def span(node: ast.Name | ast.ImportFrom) -> tuple[int, int]:
        last, column = node.end_lineno or 0, node.end_col_offset or 0
        return starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column

    nodes = list(ast.walk(tree))
    bound = _bound(nodes)
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    moved = {
        alias: names[name]
        for node in imports
        for alias in node.names
        if (name := f"{node.module}.{alias.name}") in names
    }
    same = Counter((alias.name, new) for alias, new in moved.items())
    for node in imports:
        start, end = span(node)
        some = [alias for alias in node.names if alias in moved]
        if node.level or (some and b"#" in data[start:end]):
            raise ValueError(
                f"line {node.lineno}: write the import in full, without a comment in it"
            )
        kept = [alias for alias in node.names if alias not in some]
        statements = [ast.unparse(ast.ImportFrom(node.module, kept, 0))] if kept else []
        for alias in some:
            package, _, name = moved[alias].rpartition(".")
            called = alias.asname or alias.name
            uses = [span(use) for use in nodes if isinstance(use, ast.Name) and use.id == called]
            alone = name not in bound and bound[called] == same[called, moved[alias]]
            # Before Python 3.12 what is in an f-string has a wrong place.
            if alone and all(data[at:to] == called.encode() for at, to in uses):
                edits |= dict.fromkeys(uses, name)
                called = name
            statements.append(f"from {package} import {name}" + f" as {called}" * (called != name))
        if some:
            edits[start, end] = ("\n" + " " * node.col_offset).join(statements)
    for (start, end), new in sorted(edits.items(), reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def rewrite_programs(text: str, names: Mapping[str, str]) -> str:
    """Write a line `from package import module, module` anew where it stands in a string or in a
    document: in a program's own code no such line is left.
    """

    def replace(found: re.Match[str]) -> str:
        indent, package, listed = found.groups()
        lines: dict[str, list[str]] = {}
        for name in listed.split(", "):
            place, _, new = names.get(f"{package}.{name}", f"{package}.{name}").rpartition(".")
            lines.setdefault(place, []).append(new + f" as {name}" * (new != name))
        imports = (f"{indent}from {place} import {', '.join(lines[place])}" for place in lines)
        return "\n".join(imports)

    return re.sub(r"(?m)^( *)from ([\w.]+) import (\w+(?:, \w+)*)$", replace, text)


def _bound(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often each name is bound, in any scope: 0 for one that is only used."""
    bound: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, ast.alias):
            bound[node.asname or node.name.partition(".")[0]] += 1
        elif isinstance(node, ast.Name):
            bound[node.id] += not isinstance(node.ctx, ast.Load)
        elif not isinstance(node, ast.keyword):  # definitions, parameters, patterns, exceptions
            bound[getattr(node, "name", None) or getattr(node, "arg", None) or ""] += 1
    return bound


def leftovers(files: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[str]:
    """`path:line: old name`: names of files alone, globs, and `f"{PACKAGE}.module"`."""
    present = {*texts, *(f"{parent}.py" for path in texts for parent in Path(path).parents)}

    def is_left(said: str) -> bool:
        if "*" in said:
            pairs = files.items() if "/" in said else ()
            return any(fnmatch(old, said) and not fnmatch(new, said) for old, new in pairs)
        end = f"{said[1:].replace('.', '/')}.py" if said.startswith("}") else f"/{said}"
        were, are = (any(f"/{path}".endswith(end) for path in some) for some in (files, present))
        return were and not are

    for path, text in texts.items():
        for number, line in enumerate(text.split("\n"), 1):
            for said in filter(is_left, LEFT.findall(line)):
                yield f"{path}:{number}: {said}"


def move(moves: Moves, root: Path) -> list[str]:
    """Move and rewrite all, print what else to look at, and return where old names are left. Raises
    ValueError before anything is done.
    """
    tracked = _run(root, "git", "ls-files", "-z").split("\0")[:-1]
    texts, changed = {}, {}
    for path in tracked:
        try:
            before = (root / path).read_text()
            text = rewrite_paths(rewrite_names(before, moves.names), moves.files, tracked)
            text = rewrite_imports(text, moves.names) if path.endswith(".py") else text
            text = rewrite_programs(text, moves.names)
        except UnicodeDecodeError:
            continue
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        new = moves.files.get(path, path)
        texts[new] = text
        if text != before:
            changed[new] = text
        if new != path and "__file__" in text:
            print(f"{new} has moved, and uses __file__")
    for old, new in moves.files.items():
        package = (root / new).with_name("__init__.py")
        package.parent.mkdir(parents=True, exist_ok=True)
        if (root / old).with_name("__init__.py").exists() and not package.exists():
            package.write_text('"""Say what this package owns."""\n')
            _run(root, "git", "add", str(package))
            print(f"{package.relative_to(root)} is new: say what it owns")
        _run(root, "git", "mv", old, new)
    for path, text in changed.items():
        (root / path).write_text(text)
    python = [path for path in changed if path.endswith(".py")]
    for command in ("check --quiet --fix --select I --", "format --quiet --") if python else ():
        _run(root, sys.executable, "-m", "ruff", *command.split(), *python)
    return list(leftovers(moves.files, texts))


def _run(root: Path, *command: str) -> str:
    return subprocess.check_output(command, cwd=root, text=True)


def main() -> int:
    try:
        text = sys.stdin.read() if sys.argv[1:] == ["-"] else Path(sys.argv[1]).read_text()
        left = move(read_moves(text.splitlines(), ROOT), ROOT)
    except (IndexError, OSError, ValueError) as error:
        print(error, __doc__, sep="\n\n", file=sys.stderr)
        return 2
    print("\n".join(left))
    return int(any(place.partition(":")[0].endswith(".py") for place in left))


if __name__ == "__main__":
    sys.exit(main())
