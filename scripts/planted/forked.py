"""Runs tests in forks of one process that has imported the libraries and nothing of the project, so
that a run costs what its tests take, not the imports. A fork imports the project's files as they
are by then, so a bug is planted in a copy of the repository before its tests run.

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
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

PACKAGES = ("operator", "runtime", "kernels")
OURS = ("fairlead_operator", "fairlead_runtime", "fairlead_kernels", "support")
# What the tests import beside the project. Importing starts no thread that a fork would lack.
LIBRARIES = (
    "_hypothesis_pytestplugin",
    "_pytest.junitxml",
    "_pytest.unittest",
    "anyio.pytest_plugin",
    "hypothesis",
    "llguidance",
    "msgspec",
    "numpy",
    "pdb",
    "pytest_timeout",
    "tokenizers",
    "torch",
    "transformers.modeling_utils",
    "xdist.looponfail",
    "xdist.plugin",
)
# A test of a second that has not ended by then hangs, on a busy machine too.
SECONDS = 300.0
LONGEST = 3000  # characters of a report


@dataclass(frozen=True)
class Selection:
    """Tests or files of them, relative to the folder of tests, which run for ``seconds`` at most;
    ``until_failure``: until the first that fails.
    """

    tests: Sequence[str]
    seconds: float = SECONDS
    until_failure: bool = False


@dataclass
class Answer:
    """``failed``: the tests that failed, and where. ``passed``: the seconds that each took.
    ``broken``: what could not be collected, set up or taken down, and why. ``running``: the test
    that began last. ``ended``: the tests came to an end in time. ``signal``: of which the fork
    died before. ``output``: the last of what was printed.
    """

    failed: dict[str, str] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    running: str = ""
    ended: bool = False
    signal: int = 0
    output: str = ""


def why_missed(tests: Selection, answer: Answer) -> str:
    """Why none of the tests has caught a bug; empty when each of them has. What hangs or cannot be
    imported would fail any test, so it proves nothing.
    """
    if not answer.ended:
        return f"no end within {tests.seconds:.0f} s, or the fork died: {answer.output}"
    if answer.broken:
        return f"broken: {answer.broken}"
    if passed := [test for test in tests.tests if test in answer.passed]:
        return f"{', '.join(passed)} passed"
    if others := [test for test in tests.tests if test not in answer.failed]:
        return f"{', '.join(others)} did not run: {answer.output}"
    return ""


class Forks:
    """The process that is forked, from outside; it runs tests of the repository, or its copy,
    ``root``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> Self:
        paths = (str(self._root / name) for name in (*PACKAGES, "scripts"))
        # pytest's variables are those of the run that asks. The tests of bugs are short forms.
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "FAIRLEAD_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "planted.forked"],
            cwd=self._root,
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

    def end(self) -> None:
        """Kill the tests that run, and the process."""
        self._process.terminate()

    def run(self, tests: Selection) -> Answer:
        """Raises RuntimeError when the process that is forked has ended."""
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise RuntimeError("no process to fork: enter the context first")
        print(json.dumps(asdict(tests)), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process that is forked ended with {self._process.wait()}")
        return Answer(**json.loads(line))


class _Reports:
    """A plugin of pytest that writes how each test ended, a line of JSON each, so that they are
    known of a fork that dies, too.
    """

    def __init__(self, written: IO[str]) -> None:
        self._written = written
        self._began = 0.0

    def write(self, end: str, test: str = "", what: Any = None) -> None:
        print(json.dumps([end, test.removeprefix("tests/"), what]), file=self._written, flush=True)

    def pytest_sessionstart(self) -> None:
        """Let no example that fails be made smaller: nobody reads it. The tests' settings are
        loaded by now, and no test is.
        """
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.reuse, Phase.generate)
        settings.register_profile("planted", settings(), phases=phases)
        settings.load_profile("planted")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write("broken", report.nodeid, report.longreprtext[-LONGEST:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.monotonic()
        self.write("running", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            end = "failed" if report.when == "call" else "broken"
            self.write(end, report.nodeid, report.longreprtext[-LONGEST:])
        elif report.when == "call" and report.passed:
            self.write("passed", report.nodeid, time.monotonic() - self._began)


def _read(written: IO[str]) -> Answer:
    answer = Answer()
    for line in written:
        if not line.endswith("\n"):  # the fork was killed while it wrote
            break
        end, test, what = json.loads(line)
        if end == "ended":
            answer.ended = True
        elif end == "running":
            answer.running = test
        else:
            getattr(answer, end)[test] = what
    return answer


def _run_in_fork(tests: Selection, written: IO[str], printed: IO[bytes]) -> NoReturn:
    """Run the tests and write how they end; never returns to what was forked."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        import pytest

        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
        if tests.until_failure:
            options.append("-x")
        reports = _Reports(written)
        pytest.main([*options, *(f"tests/{test}" for test in tests.tests)], plugins=[reports])
        reports.write("ended")
    except BaseException:  # noqa: BLE001 - its text is in the answer
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _fork(tests: Selection) -> Answer:
    with tempfile.TemporaryFile("w+") as written, tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            _run_in_fork(tests, written, printed)
        end = os.pidfd_open(pid)
        try:
            in_time, _, _ = select.select([end], [], [], tests.seconds)
        finally:
            os.close(end)
            with suppress(ProcessLookupError):  # it has not got so far as to have a group
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        written.seek(0)
        answer = _read(written)
        if in_time and os.WIFSIGNALED(status):
            answer.signal = os.WTERMSIG(status)
        printed.seek(0)
        answer.output = printed.read().decode(errors="replace")[-LONGEST:]
        return answer


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # a fork that runs is killed with it
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
            print(json.dumps(asdict(_fork(Selection(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 - the process ends below
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)  # without what libraries say of their leaks
