"""Plants bugs in forks of one process that has imported the libraries and nothing of the project,
so that a bug costs what its test takes, not the imports. The repository stays as it is: a fork
imports the changed text in place of the one file.

As a program it answers requests, one JSON object a line, with one JSON object a line.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import IO, Any, NoReturn, Self

from planted import anchor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("operator", "runtime", "kernels")
OURS = ("fairlead_operator", "fairlead_runtime", "fairlead_kernels", "support")
# What the tests import beside the project. Importing starts no thread that a fork would lack.
LIBRARIES = (
    "anyio.pytest_plugin",
    "hypothesis",
    "llguidance",
    "msgspec",
    "numpy",
    "pytest_timeout",
    "tokenizers",
    "torch",
    "transformers.modeling_utils",
)
# A test of a second that has not ended by then hangs, on a busy machine too.
SECONDS = 300.0
LONGEST = 3000  # characters of a report


@dataclass(frozen=True)
class Change:
    """In ``place`` (``planted.anchor``) ``old`` becomes ``new`` while ``tests`` run, for
    ``seconds`` at most. A test is relative to the folder of tests. Without a place nothing changes.
    """

    tests: tuple[str, ...]
    place: str = ""
    old: str = ""
    new: str = ""
    seconds: float = SECONDS


@dataclass
class Answer:
    """``failed``: the tests that failed, and where. ``broken``: what could not be collected, set up
    or taken down, and why. ``imported``: the changed file was imported whole. ``ended``: the tests
    came to an end within ``Change.seconds``. ``output``: the last of what they printed.
    """

    failed: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    imported: bool = False
    ended: bool = False
    output: str = ""


def why_missed(change: Change, answer: Answer) -> str:
    """Why none of the tests has caught the change; empty when each of them has. What hangs or
    cannot be imported would fail any test, so it proves nothing.
    """
    if not answer.ended:
        return f"no end within {change.seconds:.0f} s, or the fork died: {answer.output}"
    if answer.broken:
        return f"broken: {answer.broken}"
    if not answer.imported:
        return f"the tests do not import {anchor.file_of(change.place)}: {answer.output}"
    if passed := [test for test in change.tests if test in answer.passed]:
        return f"{', '.join(passed)} passed"
    if others := [test for test in change.tests if test not in answer.failed]:
        return f"{', '.join(others)} did not run: {answer.output}"
    return ""


class Forks:
    """The process that is forked, from outside."""

    def __enter__(self) -> Self:
        paths = (str(ROOT / name) for name in (*PACKAGES, "scripts"))
        # pytest's variables are those of the run that asks. The tests of bugs are short forms.
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "FAIRLEAD_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "planted.forked"],
            cwd=ROOT,
            env={
                **ours,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                "TRITON_INTERPRET": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # It ends with its input.
        self._process.communicate()

    def run(self, change: Change) -> Answer:
        """Raises RuntimeError when the process that is forked has ended."""
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise RuntimeError("no process to fork: enter the context first")
        print(json.dumps(asdict(change)), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process that is forked ended with {self._process.wait()}")
        return Answer(**json.loads(line))


class _Changed(SourceFileLoader):
    """Loads a file as if its text were another."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.imported = False
        self._text = text

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - it loads the one file
        # Neither from __pycache__ nor into it.
        return self.source_to_code(self._text.encode(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.imported = True


class _Finder:
    """Finds the changed file before anybody else does."""

    def __init__(self, change: Change) -> None:
        planted = anchor.plant(change.place, change.old, change.new)
        self._path, self._text = ROOT / planted.file, planted.text
        compile(self._text, planted.file, "exec")
        self.loader: _Changed | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in OURS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or Path(spec.origin) != self._path:
            return None
        self.loader = spec.loader = _Changed(name, spec.origin, self._text)
        return spec


class _Reports:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._answer.broken[report.nodeid] = report.longreprtext[-LONGEST:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid.removeprefix("tests/")
        if report.failed:
            ends = self._answer.failed if report.when == "call" else self._answer.broken
            ends[test] = report.longreprtext[-LONGEST:]
        elif report.when == "call" and report.passed:
            self._answer.passed.append(test)


def _run_in_fork(change: Change, written: IO[str], printed: IO[bytes]) -> NoReturn:
    """Run the tests and write the answer; never returns to what was forked."""
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        import pytest

        finder = _Finder(change) if change.place else None
        if finder is not None:
            sys.meta_path.insert(0, finder)
        answer = Answer()
        options = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0")
        tests = (f"tests/{test}" for test in change.tests)
        pytest.main([*options, *tests], plugins=[_Reports(answer)])
        answer.imported = bool(finder and finder.loader and finder.loader.imported)
        answer.ended = True
        json.dump(asdict(answer), written)
        written.flush()
    except BaseException:  # noqa: BLE001 - its text is in the answer
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _fork(change: Change) -> Answer:
    with tempfile.TemporaryFile("w+") as written, tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            _run_in_fork(change, written, printed)
        end = os.pidfd_open(pid)
        select.select([end], [], [], change.seconds)
        os.close(end)
        with suppress(ProcessLookupError):  # it has not got so far as to have a group
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        written.seek(0)
        answer = Answer(**json.loads(written.read() or "{}"))
        printed.seek(0)
        answer.output = printed.read().decode(errors="replace")[-LONGEST:]
        return answer


def main() -> None:
    for name in LIBRARIES:
        import_module(name)
    if ours := sorted(name for name in sys.modules if name.partition(".")[0] in OURS):
        raise RuntimeError(f"a fork could not change what is imported already: {ours}")
    gc.collect()
    gc.freeze()  # else each fork collects, and copies, what the libraries made
    with tempfile.TemporaryDirectory() as compiled:
        # The forks share what they compile, also where the environment says not to keep it.
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        for line in sys.stdin:
            asked = json.loads(line)
            answer = _fork(Change(**{**asked, "tests": tuple(asked["tests"])}))
            print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
