"""scripts/first_light.py: a rehearsal on a CPU, whole; tiers that hang, die and fail; and what each
tier's results decide.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.result_lines import FILE, TIER, append

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import first_light
from first_light import Job, Run, Tier

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "scripts" / "first_light.py"


@pytest.fixture(autouse=True)
def _environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets for its processes is gone after it."""
    for name in (FILE, TIER):
        monkeypatch.setenv(name, "")


def program(code: str) -> Job:
    return Job(("-c", code))


def tier(name: str, *jobs: Job, seconds: float = 30.0) -> Tier:
    return Tier(name, seconds, 0.0, lambda _run: list(jobs))


def run_of(folder: Path, seconds: float = 100.0) -> Run:
    return Run(folder, "cuda", time.monotonic() + seconds)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


NOTE = (
    "import sys; sys.path.insert(0, '.');"
    "from benchmarks.result_lines import append; append('a figure', ok=True, value=1.5, unit='ms')"
)


def test_a_tier_that_hangs_dies_or_fails_stops_no_other_and_what_it_knew_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_light, "GRACE", 0.5)
    monkeypatch.setattr(first_light, "LEAST", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # It ignores the signal that asks, as a call of the driver does that never returns, and so does
    # what it has started.
    ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('hangs');"
    starts = f"import subprocess; c = subprocess.Popen(['sleep', '100']); open({str(pipe)!r}, 'w')"
    hang = f"{NOTE}; {ignores} {starts}.write(str(c.pid)); time.sleep(100)"
    ends_by, children = first_light._ends_by, list[int]()

    def is_over_once_it_hangs(process: "subprocess.Popen[str]", ends: float) -> bool:
        """Time is over for what hangs when it has said all, and for nothing else."""
        if hang not in process.args:  # type: ignore[operator]  # a sequence
            return ends_by(process, time.monotonic() + 600)
        if not children:
            children.append(int(pipe.read_text()))
        return ends_by(process, time.monotonic() + 0.2)

    monkeypatch.setattr(first_light, "_ends_by", is_over_once_it_hangs)
    tiers = (
        tier("hang", program(hang), program("print('beside it')")),
        tier("die", program(f"{NOTE}; import os; os.abort()")),
        tier("fail", program("raise ValueError('a fault')")),
        tier("pass", program(NOTE)),
    )
    run = run_of(tmp_path)
    assert run.all(tiers) == 1
    by_tier = {name: run.lines(name) for name in ("hang", "die", "fail", "pass")}
    assert [line["value"] for line in by_tier["hang"]] == [1.5, None]
    assert [line["ok"] for line in by_tier["hang"]] == [True, None]
    assert first_light.TIME in by_tier["hang"][1]["error"]
    assert [line["ok"] for line in by_tier["die"]] == [True, False]
    assert "ended with -6" in by_tier["die"][1]["error"]
    assert [line["ok"] for line in by_tier["fail"]] == [False]
    assert [line["ok"] for line in by_tier["pass"]] == [True]
    log = (tmp_path / "hang.log").read_text()
    assert "[0] hangs\n" in log
    assert "[1] beside it\n" in log
    assert "ValueError: a fault" in (tmp_path / "fail.log").read_text()
    assert not runs(children[0])
    out = capsys.readouterr().out
    assert "pass a figure: 1.5 ms" in out
    assert "FAILED die -c" in out


def test_a_sticky_error_of_the_gpu_ends_its_process_and_the_tests_left_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an illegal address was read: the next test of the process would fail as well."""
    monkeypatch.setattr(first_light, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "conftest.py").write_text(
        "import torch\n"
        "from gpu import conftest\n"
        "from gpu.conftest import pytest_runtest_logreport, pytest_runtest_makereport\n"
        "conftest.is_lost = lambda _device: True\n"
    )
    (tmp_path / "test_some.py").write_text(
        "import torch\n"
        "def test_before(): pass\n"
        "def test_with_a_fault(): raise torch.AcceleratorError('an illegal memory access')\n"
        "def test_after(): pass\n"
    )
    names = [f"test_some.py::test_{name}" for name in ("before", "with_a_fault", "after")]
    run = run_of(tmp_path)
    run.all([tier("tests", Job(tests=tuple(names)))])
    found = {line["name"].rpartition("_")[2]: line for line in run.lines()}
    assert [found[name]["ok"] for name in ("before", "fault", "after")] == [True, False, False]
    assert "can compute nothing any more" in found["fault"]["error"]
    assert "did not run: its process: ended with 4" in found["after"]["error"]


def test_without_a_gpu_a_call_ends_after_the_facts(tmp_path: Path) -> None:
    later = tmp_path / "later"
    append_facts = f"{NOTE}; append('GPU', ok=False, error='none'); append('make', ok=None)"
    tiers = (
        tier("facts", program(append_facts)),
        tier("kernels", program(f"open({str(later)!r}, 'w')")),
    )
    assert run_of(tmp_path).all(tiers) == 2
    assert not later.exists()


def noted(name: str, lines: dict[str, bool]) -> Tier:
    """A tier of which each of these lines says whether it passed."""

    def jobs(_run: object) -> list[Job]:
        for test, ok in lines.items():
            append(test, ok)
        return []

    return Tier(name, 30.0, 0.0, jobs)


FLASHINFER, OTHER = "tests/gpu/test_flashinfer_on_gpu.py::a", "tests/gpu/test_layers_on_gpu.py::a"
CUTS = "tests/gpu/test_decodes_on_gpu.py::test_a_cuda_graph_holds_cuts_in_triton"


@pytest.mark.parametrize(
    ("lines", "kernels"),
    [
        ({FLASHINFER: True, OTHER: True}, "flashinfer"),
        ({FLASHINFER: False, OTHER: True}, "auto"),
        ({FLASHINFER: False, OTHER: False}, "flashinfer"),
        ({FLASHINFER: False, CUTS: False}, "auto"),
        ({FLASHINFER: True, CUTS: False}, "flashinfer"),
    ],
)
def test_where_flashinfer_alone_fails_the_next_tiers_run_without_it(
    lines: dict[str, bool], kernels: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    run.all([noted("kernels", lines)])
    environ = run._environ(side_by_side=True)
    assert environ.get("FAIRLEAD_TEST_KERNELS", "flashinfer") == kernels
    assert ("FAIRLEAD_NO_FALLBACK" in environ) is (kernels == "flashinfer")
    assert f"kernels={kernels}" in first_light.speed_jobs(run)[0].program


@pytest.mark.parametrize(
    ("lines", "graphs"),
    [
        ({"a[llama-eager]": True, "a[llama-graphs]": True}, "on"),
        ({"a[llama-eager]": True, "a[llama-graphs]": False, "b[llama-on]": False}, "off"),
        ({"a[llama-graphs]": False, "b[on-off]": False}, "on"),
        ({"a[llama-eager]": False, "a[llama-graphs]": False}, "on"),
    ],
)
def test_where_graphs_alone_fail_the_speed_is_measured_without_them(
    lines: dict[str, bool], graphs: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    run.all([noted("tokens", lines)])
    assert f"cuda_graphs={graphs}" in first_light.speed_jobs(run)[0].program


@pytest.mark.parametrize(
    ("left", "tokens", "ran"), [(400.0, 75, True), (165.0, 35, True), (135, 0, False)]
)
def test_where_time_is_short_the_last_tests_go_before_the_speed(
    left: float, tokens: int, *, ran: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (given,) = (each for each in first_light.CALLS[1] if each.name == "tokens")
    run = run_of(tmp_path, left)
    run.all([given._replace(jobs=lambda _run: [program(NOTE)])])
    seconds = int(re.findall(r"tokens: 1 processes, (\d+) s", capsys.readouterr().out)[0])
    assert seconds == pytest.approx(tokens, abs=6)
    assert (run.lines()[0]["ok"] is True) is ran


def test_a_call_fits_into_its_minutes() -> None:
    for call, minutes in first_light.MINUTES.items():
        limits = [each.seconds for each in first_light.CALLS[call]]
        assert sum(limit for limit in limits if limit < math.inf) <= minutes * 60


def test_only_the_last_tier_of_a_call_has_what_is_left() -> None:
    for tiers in first_light.CALLS.values():
        assert all(each.seconds < math.inf for each in tiers[:-1])


def test_figures_are_taken_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for each in (*first_light.CALLS[1], *first_light.CALLS[2]):
        jobs = each.jobs(run)
        assert len(jobs) == 1 or not any(job.program for job in jobs), each.name


def test_the_results_of_another_run_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "has the results of another run: name a new folder" in ran.stderr


def test_what_failed_before_runs_again_each_file_by_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, "cuda", 0.0, [f"{OTHER}[1]", FLASHINFER, f"{OTHER}[2]"])
    jobs = [job.tests for job in first_light.again_jobs(run)]
    assert jobs == [(f"{OTHER}[1]", f"{OTHER}[2]"), (FLASHINFER,)]


def commands() -> Iterator[str]:
    """The calls that docs/gpu.md has, one command each."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        if "scripts/first_light.py" in block:
            yield block


def test_each_documented_command_is_short_and_has_options_that_there_are() -> None:
    found = list(commands())
    assert len(found) == 2
    for number, command in enumerate(found, 1):
        assert len(command) <= 2000
        words = shlex.split(command.replace("\\\n", " "))
        given = words[words.index("scripts/first_light.py") + 1 :]
        options = first_light.parser().parse_args([word.replace("$OUT", "out") for word in given])
        assert options.call == number


@pytest.mark.parametrize("call", [1, 2])
def test_a_rehearsal_on_a_cpu_runs_every_tier(call: int, tmp_path: Path) -> None:
    """All tests that it names exist, too: pytest starts none where it does not find one."""
    ran = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            *("--device", "cpu", "--call", str(call)),
            "--out",
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    text = (tmp_path / "results.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    for name in (each.name for each in first_light.CALLS[call]):
        of_tier = [line for line in lines if line["tier"] == name]
        assert of_tier, name
        for line in of_tier:
            assert line["ok"] is not False
            assert line["ok"] or line["error"]
    names = {line["name"] for line in lines if line["ok"]}
    forms = [line["name"] for line in lines if line["error"].endswith("runs on a CPU")]
    if call == 1:
        tests = [line["name"] for line in lines if "::" in line["name"]]
        assert len(tests) == len(set(tests)) >= 45
        assert len(forms) < len(tests) - 15
        assert {"GPU", "reads", "multiplies", "packages", "torch", "transformers"} <= names
        assert {"start of the engine", "kernels, 1 rows at 24", "decode, 6 rows at 24"} <= names
    else:
        assert "decode, 3 rows at 24" in names
        assert forms
