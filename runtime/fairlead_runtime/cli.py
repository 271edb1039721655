"""``fairlead``: a dispatcher over the entry-point group ``fairlead.commands``.

Owns finding, listing and calling commands; knows none of them. A command's module is imported when
it is called and not before, and ``--help`` reads the first line of each module's docstring from its
source, so listing commands imports neither torch nor kopf. A command is ``main(args) -> exit
code``: 0 good, 1 the answer is no, 2 cannot be done as asked.
"""

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

GROUP = "fairlead.commands"
Command = Callable[[Sequence[str]], int]


def main(args: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if args is None else args)
    commands = {point.name: point for point in entry_points(group=GROUP)}
    name = given[0] if given else ""
    if name in {"-h", "--help", "help"}:
        print(usage(commands))  # noqa: T201 - what was asked for
        return 0
    if name == "--version":
        print(f"fairlead {version('fairlead')}")  # noqa: T201 - what was asked for
        return 0
    if name not in commands:
        print(_unknown(name, commands) if name else usage(commands), file=sys.stderr)  # noqa: T201 - an error
        return 2
    return _call(commands[name], given[1:])


def _call(point: EntryPoint, args: Sequence[str]) -> int:
    """Run a command; an interrupted one and one whose reader left end quietly, with the shell's
    codes.
    """
    _bound_spinning()
    try:
        command: Command = point.load()
    except ModuleNotFoundError as error:
        # The base installation carries neither torch nor kopf; the extras do.
        message = f"fairlead {point.name}: {error.name} is not installed: pip install 'fairlead[{_extra(point)}]'"
        print(message, file=sys.stderr)  # noqa: T201 - an error
        return 2
    try:
        return command(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _bound_spinning() -> None:
    """Let OpenMP's threads wait awake for some microseconds, then sleep. It is read when torch is
    first imported.

    By its default they stay awake for milliseconds, and a step of the demo model takes up to sixty
    times as long beside another busy process. Sleeping at once costs a third of the speed on quiet
    cores. benchmarks/README.md.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def usage(commands: Mapping[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:<{width}}  {summary(commands[name])}" for name in sorted(commands)]
    return "\n".join(
        [
            "usage: fairlead COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "fairlead COMMAND --help tells more.",
        ]
    )


def summary(point: EntryPoint) -> str:
    """The first line of the module's docstring, without importing the module."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return "(not installed)"
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    line = doc.partition("\n")[0]
    return line.partition(": ")[2] or line


def _unknown(name: str, commands: Mapping[str, EntryPoint]) -> str:
    near = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {near[0]}?" if near else "the commands are " + ", ".join(sorted(commands))
    return f"fairlead: no command {name!r}; {hint}"


def _extra(point: EntryPoint) -> str:
    return "operator" if point.module.startswith("fairlead_operator") else "runtime"
