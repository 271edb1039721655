"""The engine's process: started before this one imports much, and never left behind."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_runtime.child.process import ending
from fairlead_runtime.processes import spawn

SERVE = """
import sys
from fairlead_runtime.cli import main
from fairlead_runtime.child import process

def spawned(*_):
    print(sorted({"fastapi", "torch", "transformers", "uvicorn"} & set(sys.modules)))
    sys.exit(0)

process.spawn = spawned
main(["serve", "demo:"])
"""


def test_the_process_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    with spawn.engine(30) as engine:
        assert Path(f"/proc/{engine.pid}").exists()
    assert engine.reap(0.0) == ending(-signal.SIGKILL)
    assert not Path(f"/proc/{engine.pid}").exists(), "no zombie is left"
    assert engine.connection.fileno() == -1, "the socket is closed"
    assert limits == [(resource.RLIMIT_CORE, (0, 0))], "no core file holds prompts or keys"


def test_it_starts_before_the_http_process_imports_what_it_serves_with() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr
