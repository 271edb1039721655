"""Print the entries of a lock that some requirements of pyproject.toml need.

    python select_lock.py [--lock FILE] [--extra NAME]… [--only NAME]… [--without PATTERN]…
                          [--instead REQUIREMENT]… DIR

The lock is requirements.lock in DIR, or the one that `--lock` names. It holds every package with
its hashes, and after each one, as uv writes them, comments with the packages that need it. These
are the edges of the graph that is walked here, so nothing is resolved again and every entry keeps
its hashes. Without `--extra` only the project's own dependencies count; `--only` names packages in
place of the project. `--instead` is printed in place of the entry of its package.
"""

import argparse
import fnmatch
import re
import sys
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    """The normalized project name at the start of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if not found:
        raise SystemExit(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def entries(lock: str) -> dict[str, str]:
    """Each package's lines; a package may have one entry for each range of Python versions.

    An entry runs to the next line that is not indented.
    """
    found: dict[str, str] = {}
    for text in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        name = name_of(text)
        found[name] = f"{found[name]}\n{text}" if name in found else text
    return found


def needed_by(entry: str) -> set[str]:
    """The packages that the entry's `# via` comments name."""
    comments = re.findall(r"^ +#(?: +via)? +([A-Za-z0-9].*)$", entry, re.MULTILINE)
    return {name_of(text) for text in comments if text != "via"}


def closure(roots: set[str], locked: dict[str, str], without: list[str]) -> list[str]:
    """The roots and all that they need, in the lock's order; nothing behind a left-out package."""
    needs: dict[str, set[str]] = {name: set() for name in locked}
    for name, entry in locked.items():
        for parent in needed_by(entry) & needs.keys():
            needs[parent].add(name)
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen or any(fnmatch.fnmatch(name, pattern) for pattern in without):
            continue
        if name not in locked:
            raise SystemExit(f"the lock has no {name}; run `make lock`")
        seen.add(name)
        waiting += needs[name]
    return [name for name in locked if name in seen]


def roots_of(project: Path, extras: list[str]) -> set[str]:
    table = tomllib.loads(project.read_text())["project"]
    wanted = list(table["dependencies"])
    for extra in extras:
        wanted += table["optional-dependencies"][extra]
    own = table["name"]
    return {name for name in map(name_of, wanted) if name != own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--instead", action="append", default=[])
    parser.add_argument("--lock", default="requirements.lock")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    locked = entries((options.folder / options.lock).read_text())
    roots = set(options.only) or roots_of(options.folder / "pyproject.toml", options.extra)
    selected = closure(roots, locked, options.without)
    locked |= {name_of(requirement): requirement for requirement in options.instead}
    for name in selected:
        print(locked[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
