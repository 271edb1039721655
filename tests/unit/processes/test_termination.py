"""The JSON line that a process writes when it has to end."""

import io
import json
from pathlib import Path

import pytest

from fairlead_runtime.child.process import OUT_OF_MEMORY
from fairlead_runtime.commands.refusals import refusal_for
from fairlead_runtime.outputs import EngineDead
from fairlead_runtime.processes import termination
from fairlead_runtime.settings import terminal


def reported(environ: dict[str, str]) -> dict[str, str]:
    stderr = io.StringIO()
    termination.report(
        "BadWeights", "model.safetensors: too short", "fetch again", environ, stderr=stderr
    )
    [line] = stderr.getvalue().splitlines()
    fields: dict[str, str] = json.loads(line)
    return fields


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("the engine process was ended by SIGKILL, " + OUT_OF_MEMORY, "lower --num-blocks"),
        ("torch cannot be imported: libtorch_cpu.so: failed to map segment", "lower --num-blocks"),
        ("the engine process ended with exit code 1", "the device or the driver"),
    ],
)
def test_an_engine_that_ran_out_of_memory_is_no_fault_of_a_device(reason: str, hint: str) -> None:
    refusal = refusal_for(EngineDead(reason))
    assert refusal is not None
    assert hint in refusal.hint


def test_one_line_of_json_goes_to_stderr_and_to_a_log_that_exists(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an older message")
    expected = {
        "code": "BadWeights",
        "message": "model.safetensors: too short",
        "hint": "fetch again",
    }
    assert reported({termination.VARIABLE: str(log)}) == expected
    assert json.loads(log.read_text()) == expected


def test_a_log_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    reported({termination.VARIABLE: str(tmp_path / "log")})
    assert not list(tmp_path.iterdir())


def test_a_directory_in_place_of_the_log_raises_no_error(tmp_path: Path) -> None:
    assert reported({termination.VARIABLE: str(tmp_path)})["code"] == "BadWeights"


@pytest.mark.parametrize(
    "message", ["x" * 100_000, '"\\\n' * 30_000, "ü🙂" * 50_000, "", "x" * 3900]
)
@pytest.mark.parametrize("hint", ["", "h" * 50_000, "short"])
def test_a_message_that_the_kubelet_would_cut_stays_valid_json(message: str, hint: str) -> None:
    line = terminal.json_line("HubUnreachable", message, hint)
    assert len(line.encode()) < terminal.LARGEST
    fields = json.loads(line)
    assert fields["code"] == "HubUnreachable"
    assert message.startswith(fields["message"].rstrip("…"))
    if len(message) < 1000 and len(hint) < 1000:
        assert (fields["message"], fields["hint"]) == (message, hint)
