"""Follow the README on a terminal, as a newcomer does, and print what each command took: seconds,
and lines of output until it said what one waits for.

    python3 scripts/first_minute.py           # in a fresh clone of this repository, with its set-up
    python3 scripts/first_minute.py --here    # without set-up and demo, with this Python's packages
    python3 scripts/first_minute.py --goals   # and compare the seconds with the goals

Runs every block of the README but those of a cluster, which `make e2e` runs: commands on a terminal
of their own, Python, and what is typed into the chat. A block that shows output is compared with
it, whatever its numbers are. Servers take free ports, and `fairlead plan` reads the config.json of
docs/published_models.json where the README lets it download one.

Exit code 1: a command failed, the README shows what is not said, or more lines came than a person
reads. Needs nothing but Python's standard library, and git for the clone.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.pseudo_terminal import PseudoTerminal, on_a_terminal  # noqa: E402 - of the tests

DEMO = "make demo"
SET_UP = "$ fairlead serve"  # what `make demo` says first when that is done
QUESTION = "What is a KV cache?"
ADDRESS = "http://127.0.0.1:8000"
ENDS = "Ctrl-C ends this server"
SERVE_LINES, REFUSAL_LINES = 12, 3  # the most, until the address and of a refusal
DEMO_SECONDS, SERVE_SECONDS, REFUSAL_SECONDS = 75.0, 6.0, 1.0  # on two idle cores
MOST = 72  # characters of a command in the table
ON_A_CLUSTER = ("helm ", "kubectl ")
PLANNED = "Qwen2.5 7B"  # of docs/published_models.json
REFUSED = (
    "fairlead serve /no/such/model",
    "fairlead serve demo",
    "fairlead serve demo: --prt 8000",
    "fairlead serve demo: --max-num-seqs 8",
    "fairlead generate demo: --prompt x --max-tokens -1",
    "fairlead plan -f /no/such/file.yaml",
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_STYLE = re.compile(r"\x1b\[[0-9;]*[mK]")
_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True, slots=True)
class Block:
    """One of the README: commands to type, what the first of them is shown to say, or Python."""

    commands: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    program: str = ""


def blocks(text: str) -> Iterator[Block]:
    """The blocks that a newcomer runs, in their order."""
    for language, content in _FENCE.findall(text):
        lines = content.replace("\\\n", " ").splitlines()
        if language == "python":
            yield Block(program=content)
        elif language:
            continue
        elif lines[0].startswith("$ "):
            shown = tuple(line for line in lines[1:] if line not in ("", "..."))
            yield Block((lines[0].removeprefix("$ "),), shown)
        else:
            commands = (line.partition("  #")[0].strip() for line in lines)
            yield Block(tuple(c for c in commands if c and not c.startswith(ON_A_CLUSTER)))


def resource(text: str) -> str:
    """The README's chat.yaml."""
    found: str = next(content for language, content in _FENCE.findall(text) if language == "yaml")
    return found


def missing(shown: Sequence[str], said: str) -> list[str]:
    """The lines of ``shown`` that do not follow each other in ``said``, whatever the numbers. One
    that ends with … is the begin of a line.
    """
    lines = iter([_plain(line) for line in said.splitlines()])
    return [line for line in shown if not any(_shows(_plain(line), other) for other in lines)]


def _shows(shown: str, line: str) -> bool:
    begin = shown.removesuffix("…")
    return line == shown or (begin != shown and line.startswith(begin.rstrip()))


def _plain(line: str) -> str:
    """A line as it stands there in the end, without what was written over, styles and numbers."""
    return _NUMBER.sub("N", _STYLE.sub("", line.rpartition("\x1b[K")[2])).strip()


@dataclass(slots=True)
class Walk:
    """A newcomer's way, in ``folder``. ``python``: in place of .venv/bin; empty: that one."""

    folder: Path
    python: str = ""
    rows: list[tuple[str, float, int, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    url: str = ""  # of the server that runs

    def run(self, block: Block, servers: ExitStack) -> None:
        if block.program:
            self._python(block.program)
        for command in block.commands:
            if command.startswith("curl ") and not shutil.which("curl"):
                continue
            if command == DEMO and self.python:
                continue  # tests/functional/commands/test_demo.py runs it
            if " serve " in command:
                self._serve(command, block.output, servers)
            elif " chat " in command:
                self._chat(command)
            else:
                self._until_its_end(command, block.output)

    def _until_its_end(self, command: str, output: Sequence[str]) -> None:
        began = time.monotonic()
        with self._terminal(command) as terminal:
            if command == DEMO:
                terminal.until(SET_UP)
                self._row(command, began, terminal, "set-up")
                terminal.until("> What is")
                terminal.until("\n")
                terminal.until("\n")
                self._row(command, began, terminal, "first answer")
            code = terminal.end()
        self._row(command, began, terminal, "end")
        self._check(command, code == 0, f"exit code {code}: {_last(terminal)}")
        self._check(command, not (lacks := missing(output, terminal.text)), f"says no {lacks}")

    def _serve(self, command: str, output: Sequence[str], servers: ExitStack) -> None:
        """The server runs until the next one, or the end of the walk."""
        servers.close()
        began = time.monotonic()
        terminal = servers.enter_context(self._terminal(f"{command} --port=0 --admin-port=0"))
        servers.callback(self._stop, command, terminal)
        terminal.until(ENDS)
        terminal.until("\n")
        lines = self._row(command, began, terminal, "address")
        self._check(command, lines <= SERVE_LINES, f"{lines} lines until its address")
        self._check(command, not (lacks := missing(output, terminal.text)), f"says no {lacks}")
        self.url = re.findall(r"(http://\S+)/v1", terminal.text)[-1]
        if "--record" in command:
            self._answer()
            servers.close()  # the recording is whole
            return
        for path, name in (("/", "page"), ("/page/live", "first picture")):
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                self._check(command, answer.read(), f"{path} is empty")
            self._row(f"a browser at {ADDRESS}/", began, None, name)

    def _stop(self, command: str, terminal: PseudoTerminal) -> None:
        began = time.monotonic()
        terminal.type("\x03")
        self._check(command, (code := terminal.end()) == 0, f"exit code {code} after Ctrl-C")
        self._row("Ctrl-C", began, None, "end of the server")

    def _chat(self, command: str) -> None:
        began = time.monotonic()
        with self._terminal(command) as terminal:
            terminal.until("> ")
            self._row(command, began, terminal, "prompt")
            terminal.type(QUESTION + "\r")
            terminal.until("\n")
            terminal.until("> ")
            self._row(f"“{QUESTION}”", began, None, "first answer")
            terminal.type("\x04")
            self._check(command, (code := terminal.end()) == 0, f"exit code {code}")

    def _python(self, program: str) -> None:
        file = self.folder / "block.py"
        file.write_text(program.replace(ADDRESS, self.url))
        name = "LLM" if "import LLM" in program else "openai"
        self._until_its_end(f".venv/bin/python {file.name}", ())
        self.rows[-1] = (f"Python with {name}", *self.rows[-1][1:])

    def _answer(self) -> None:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        headers = {"content-type": "application/json"}
        url, data = f"{self.url}/v1/chat/completions", json.dumps(body).encode()
        asked = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            self._check("a chat", b"choices" in answer.read(), "has no answer")

    def refuse(self, command: str) -> float:
        """Its seconds."""
        began = time.monotonic()
        with self._terminal(command) as terminal:
            code = terminal.end()
        lines = self._row(command, began, terminal, "refusal")
        self._check(command, code == 2, f"exit code {code}")
        self._check(command, lines <= REFUSAL_LINES, f"{lines} lines")
        return time.monotonic() - began

    @contextmanager
    def _terminal(self, command: str) -> Iterator[PseudoTerminal]:
        words = command.replace(ADDRESS, self.url or ADDRESS)
        words = re.sub(r"^(\.venv/bin/)?fairlead ", ".venv/bin/fairlead ", words)
        if "--download" in words:
            words = words.replace("--download", "--config config.json")
        if self.python:
            python = shlex.quote(self.python)
            words = re.sub(r"^\.venv/bin/python ", f"{python} ", words)
            words = re.sub(r"^\.venv/bin/fairlead ", f"{python} -m fairlead_runtime ", words)
        line = f"cd {shlex.quote(str(self.folder))} && stty cols 110 rows 30 && {words}"
        with on_a_terminal("/bin/bash", "-c", line) as terminal:
            yield terminal

    def _row(self, command: str, began: float, terminal: PseudoTerminal | None, what: str) -> int:
        lines = terminal.text.count("\n") if terminal else 0
        self.rows.append((command, time.monotonic() - began, lines, what))
        return lines

    def _check(self, command: str, holds: object, fault: str) -> None:
        if not holds:
            self.faults.append(f"{command}: {fault}")

    def table(self) -> str:
        lines = ["| command | until | seconds | lines |", "|---|---|---|---|"]
        for command, seconds, count, what in self.rows:
            name = command if len(command) <= MOST else f"{command[:MOST]}…"
            shown = name if name.startswith(("“", "a ", "Python ", "Ctrl")) else f"`{name}`"
            lines.append(f"| {shown} | {what} | {seconds:.1f} | {count or ''} |")
        return "\n".join(lines)

    def seconds(self, what: str) -> float:
        return next(seconds for _, seconds, _, name in self.rows if name == what)


def _last(terminal: PseudoTerminal) -> str:
    return " / ".join(terminal.text.strip().splitlines()[-3:])


def walk(folder: Path, python: str = "") -> Walk:
    readme = (ROOT / "README.md").read_text("utf-8")
    published = json.loads((ROOT / "docs" / "published_models.json").read_text("utf-8"))
    (folder / "chat.yaml").write_text(resource(readme))
    (folder / "config.json").write_text(json.dumps(published[PLANNED]["config"]))
    newcomer = Walk(folder, python)
    with ExitStack() as servers:
        for block in blocks(readme):
            newcomer.run(block, servers)
    return newcomer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--here", action="store_true", help="without clone, set-up and demo")
    parser.add_argument(
        "--goals", action="store_true", help="fail where seconds are over the goals"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not options.here:
            folder /= "fairlead"
            clone = ["git", "clone", "--quiet", str(ROOT), str(folder)]
            subprocess.run(clone, check=True)
        newcomer = walk(folder, sys.executable if options.here else "")
        slowest = max(newcomer.refuse(command) for command in REFUSED)
    if options.goals:
        measured = [
            ("address", newcomer.seconds("address"), SERVE_SECONDS),
            ("slowest refusal", slowest, REFUSAL_SECONDS),
        ]
        if not options.here:
            measured.append(("first answer", newcomer.seconds("first answer"), DEMO_SECONDS))
        newcomer.faults += [f"{n}: {s:.1f} s of {goal:g}" for n, s, goal in measured if s > goal]
    print(newcomer.table())
    for fault in newcomer.faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if newcomer.faults else 0


if __name__ == "__main__":
    sys.exit(main())
