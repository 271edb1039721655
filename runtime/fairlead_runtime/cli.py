"""``fairlead``: a dispatcher over the entry-point group ``fairlead.commands``.

Owns finding, listing and calling commands. A command's module is imported only when it is called,
and ``--help`` reads the first sentence of each module's docstring from its source, so listing
commands imports neither torch nor kopf; argparse's subparsers would need every module's flags. A
command is ``main(args) -> exit code``: 0 success, 1 a negative result, 2 a refused input.
"""

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

from fairlead_runtime.settings import terminal

GROUP = "fairlead.commands"
# Those that a newcomer needs first; others follow by name.
ORDER = ("serve", "chat", "generate", "fetch", "plan", "trace", "replay", "backtest", "operator")
FLAGS = ("--help", "--version")  # of no command
Command = Callable[[Sequence[str]], int]


def main(args: Sequence[str] | None = None) -> int:
    terminal.replace_unencodable()
    arguments = list(sys.argv[1:] if args is None else args)
    commands = {point.name: point for point in entry_points(group=GROUP)}
    name = arguments[0] if arguments else ""
    if name in {"-h", "--help", "help"}:
        print(usage(commands))  # noqa: T201 - the result
        return 0
    if name == "--version":
        print(f"fairlead {version('fairlead')}")  # noqa: T201 - the result
        return 0
    if not name:
        print(usage(commands), file=sys.stderr)  # noqa: T201 - an error
        return 2
    if name not in commands:
        terminal.refuse("UnknownCommand", f"{name!r} is not a command", _nearest(name, commands))
        return 2
    return _call(commands[name], arguments[1:])


def _call(point: EntryPoint, args: Sequence[str]) -> int:
    """Run a command. An interrupt and a closed pipe end it without a traceback, with the shell's
    exit codes.
    """
    _limit_spinning()
    command: Command | None = None
    try:
        command = point.load()
        return command(args)
    except ModuleNotFoundError as error:
        # The base installation has neither torch nor kopf; the extras have.
        if command is not None and (error.name or "").startswith("fairlead_"):
            raise  # a fault of ours
        fix = f"pip install 'fairlead[{_extra(point)}]'"
        terminal.refuse("NotInstalled", f"{error.name} is not installed", fix)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Without this, Python's flush at exit fails, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _limit_spinning() -> None:
    """Let idle OpenMP threads spin for some microseconds, then sleep. OpenMP reads the variable
    when torch is first imported.

    By default they spin for milliseconds, and a step of the demo model takes up to sixty times as
    long while another process is busy. No spinning costs a third of the speed on idle CPUs.
    Figures: benchmarks/README.md.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def usage(commands: Mapping[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    places = {name: number for number, name in enumerate(ORDER)}
    names = sorted(commands, key=lambda name: (places.get(name, len(places)), name))
    lines = [f"  {name:<{width}}  {summary(commands[name])}" for name in names]
    return "\n".join(
        [
            "usage: fairlead COMMAND [ARGUMENTS]",
            "       fairlead --version",
            "",
            *lines,
            "",
            "Run fairlead COMMAND --help for the arguments of a command.",
            "Begin with: fairlead serve demo:   (the model that comes with Fairlead)",
        ]
    )


def summary(point: EntryPoint) -> str:
    """The first sentence of the module's docstring, without importing the module."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return "(not installed)"
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    first = " ".join(doc.partition("\n\n")[0].split()).partition(". ")[0]
    text = (first.partition("`: ")[2] or first.partition(": ")[2] or first).rstrip(".")
    return text[:1].upper() + text[1:]


def _nearest(name: str, commands: Mapping[str, EntryPoint]) -> str:
    matches = difflib.get_close_matches(name, [*commands, *FLAGS], n=1)
    if matches:
        return f"did you mean {matches[0]}?"
    if name.startswith("-"):
        return "write the command first, as in fairlead serve demo: --port 8000"
    return "the commands are " + ", ".join(sorted(commands))


def _extra(point: EntryPoint) -> str:
    return "operator" if point.module.startswith("fairlead_operator") else "runtime"
