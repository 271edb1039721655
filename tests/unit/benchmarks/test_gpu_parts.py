"""What the benchmark of a GPU counts: bytes and operations of a step, the time that is left, steps
that all rows decode together, and its table.
"""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
import torch
from benchmarks import models
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import bounds, cuts, ours, picture, shapes, theirs
from benchmarks.gpu.budget import Budget, LeftOutError
from benchmarks.gpu.ours import Target
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.sizes import Sizes, new_tokens
from benchmarks.turns import OURS

from fairlead_runtime.models import files

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bounds.Work]:
    folder = tmp_path_factory.mktemp("llama")
    size = shapes.save(shapes.LLAMA, torch.bfloat16, folder)
    return folder, bounds.Work.of(size, shapes.config(shapes.LLAMA, torch.bfloat16), torch.bfloat16)


def test_a_step_of_llama_3_8b_reads_what_it_is_known_to(llama: tuple[Path, bounds.Work]) -> None:
    """15 GB at batch 1, and at 64 rows of 1k tokens 23.4 GB with 128 KiB a token."""
    work = llama[1]
    assert work.size.total == 8_030_261_248
    assert work.decode_bytes(1, 0) == pytest.approx(15.0e9, rel=0.01)
    assert work.decode_bytes(64, 1024) == pytest.approx(23.4e9, rel=0.02)
    assert work.decode_bytes(1, 1) - work.decode_bytes(1, 0) == 128 << 10


def test_prompts_multiply_by_all_layers_and_the_head_only_for_the_last_token(
    llama: tuple[Path, bounds.Work],
) -> None:
    work = llama[1]
    one, two = work.prefill_operations(1, 1), work.prefill_operations(1, 2)
    weights, attention = 2 * work.size.layers, 4 * 32 * 32 * 128
    assert one == weights + 2 * work.size.head + attention
    assert two - one == weights + 2 * attention
    assert work.prefill_operations(3, 2) == 3 * two


def test_the_directory_is_a_checked_model_that_takes_no_room(
    llama: tuple[Path, bounds.Work],
) -> None:
    checked = files.check(llama[0])
    assert checked.weight_bytes > 16 * 10**9
    assert (llama[0] / "model.safetensors").stat().st_blocks * 512 < 1 << 20


def test_blocks_hold_every_case_and_what_its_rows_decode() -> None:
    sizes = Sizes(((1, 4000), (64, 100)), 10)
    assert (sizes.rows, sizes.longest) == (64, 4000 + new_tokens(1, 4000, 10))
    blocks = sizes.blocks(16)
    assert blocks * 16 >= 64 * (100 + new_tokens(64, 100, 10))
    assert blocks * 16 <= 64 * (100 + new_tokens(64, 100, 10) + 32)


def test_a_part_that_does_not_fit_or_fails_is_left_out_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = [0.0]
    budget = Budget(100, lambda: clock[0])

    def fails() -> None:
        raise RuntimeError("no room")

    def elsewhere() -> None:
        raise LeftOutError("not here")

    assert budget.run("first", 100, lambda: 7) == 7
    clock[0] = 60.0
    assert budget.run("second", 41, lambda: 7) is None
    assert budget.run("third", 40, lambda: 7) == 7
    assert budget.run("fourth", 1, fails) is None
    assert budget.run("fifth", 1, elsewhere) is None
    assert budget.left_out == {
        "second": "40 s are left, it needs about 41",
        "fourth": "RuntimeError: no room",
        "fifth": "not here",
    }
    assert capsys.readouterr().out.count("left out: ") == 3


def test_a_device_is_idle_while_nobody_computes_whichever_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, x = torch.device("cpu"), torch.randn(300, 300)

    def work() -> None:
        for _ in range(3):
            x @ x

    def elsewhere() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    for run in (work, elsewhere):
        names = [event.name for event in bounds.computed(cpu, run)]
        assert names.count("aten::matmul") == 3
        assert 0 <= bounds.idle(cpu, run) < 1
    with pytest.raises(RuntimeError, match="saw no work of the device"):
        bounds.idle(cpu, lambda: None)
    times = ((0.0, 1.0), (4.0, 5.0), (9.0, 10.0))
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in times]
    monkeypatch.setattr(bounds, "computed", lambda *_: events)
    assert bounds.idle(cpu, work) == pytest.approx(0.7)


class Side:
    """An engine that takes as long as it is told; ``asked``: rows, context, steps and parameters of
    each call; ``fails``: at decodes of so many rows.
    """

    fails = 0

    def __init__(self, name: str, milliseconds: float, asked: list[Any], **settings: Any) -> None:
        self.name = name
        self._taken, self._asked, self.cold = milliseconds, asked, {"load": 1.0}
        self._settings, self.model = settings, "its model"

    def decode(self, rows: int, context: int, steps: int, **params: Any) -> list[float]:
        self._asked.append((rows, context, steps, self._settings | params))
        if self.name == theirs.NAME and rows == self.fails:
            raise RuntimeError("no memory for so many rows")
        return [self._taken] * steps

    def prefill(self, rows: int, length: int) -> float:
        return self._taken / 1e3

    def idle(self, rows: int, context: int, steps: int) -> float:
        return self._taken / 100

    def longest(self, rows: int, context: int, steps: int, count: int) -> list[bounds.Kernel]:
        return [bounds.Kernel("a product", self._taken * steps, 3 * steps)]

    def use_cuts(self, name: str) -> None:
        self._asked.append(f"cuts in {name}")

    def drop_graphs(self) -> None:
        self._asked.append("dropped")

    def first_token(self) -> None:
        pass

    def close(self) -> None:
        self._asked.append("closed")


def test_an_engine_that_cannot_have_the_cuts_of_its_settings_is_shut_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    stopped = SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    monkeypatch.setattr(ours, "LLM", lambda *_, **__: stopped)
    target = Target(shapes.LLAMA, tmp_path, torch.float32, torch.device("cpu"))
    with pytest.raises(LeftOutError, match="samples on the host"):
        ours.Ours(target, Sizes(((1, 24),), 4), cuts="triton")
    assert calls == ["shutdown"]


class Asked(NamedTuple):
    ours: list[Any]
    theirs: list[Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    calls = Asked([], [])

    def their_side(_model: Any, _sizes: Any, given: Any, **sampled: Any) -> Side:
        return Side(theirs.NAME, 6.0, calls.theirs, **given, **sampled)

    monkeypatch.setattr(program, "Ours", lambda *_, **__: Side(OURS, 2.0, calls.ours))
    monkeypatch.setattr(program, "Theirs", their_side)
    monkeypatch.setattr(cuts, "milliseconds", lambda name, *_: {"torch": 2.5, "triton": 0.5}[name])
    monkeypatch.setattr(theirs, "best", lambda *_: ("graphs and asynchronous", "fast"))
    return calls


def run_of(folder: Path, **more: Any) -> program.Run:
    """With its figures in a file of lines."""
    target = Target(shapes.TINY, folder, torch.float32, torch.device("cpu"))
    made = Report("a GPU", "tiny", "float32", figures=folder / "figures.jsonl")
    return program.Run(target, program.PLANS[shapes.TINY], made, Budget(1000), **more)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]


def test_both_sides_compute_the_same_and_are_written_in_the_same_unit(
    tmp_path: Path, asked: Asked
) -> None:
    run = run_of(tmp_path)
    plan, made = run.plan, run.report
    run.in_turns()
    run.crowd()
    rows = {row.name: row for row in made.rows}
    assert len(rows) == 4 + 1 + 3 + 3 + 1
    for name, row in rows.items():
        assert row.ours, name
        assert row.ratio == pytest.approx(3.0), name
    operations = run.work.prefill_operations(*plan.prompts) / 1e12
    assert rows["prompts, 2 of 32"].theirs == [operations / 6e-3] * 2
    assert rows["device idle, 3 rows at 24"].theirs == [6.0]
    assert not run.budget.left_out
    # Greedy steps are greedy on both sides, sampled ones sample alike.
    fast = {"use_cuda_graph": True, "use_async_batching": True}
    measured = [one for one in asked.theirs if one != "closed" and one[2] == plan.steps]
    first, second, third, last = plan.cases
    assert [one for one in measured if one[3] == fast][:4] == [
        (*case, 4, fast) for case in (second, third, first, last)
    ]
    assert asked.ours.count((*plan.cases[2], 4, {})) == 1 + plan.rounds
    for name, params in program.SAMPLING.items():
        sampled = {"top_k": 0, **params}
        assert measured.count((*plan.cases[2], 4, fast | sampled)) == plan.rounds, name
        assert asked.ours.count((*plan.cases[2], 4, params)) == 1 + plan.rounds, name
    assert asked.ours.count("closed") == 2
    assert asked.theirs.count("closed") == 1 + 3 + 1


def test_every_figure_of_ours_is_written_before_another_side_starts(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)

    def start() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_theirs", start)
    with pytest.raises(KeyboardInterrupt):
        run.in_turns()
    lines = [line for line in lines_of(tmp_path) if "side" in line]
    assert {line["side"] for line in lines} == {OURS}
    assert {line["name"] for line in lines} == {row.name for row in run.report.rows}
    assert len(lines) == 4 + 1 + 3 + 3
    assert asked.theirs == []


def test_a_side_that_fails_at_one_case_drops_no_other(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    monkeypatch.setattr(Side, "fails", run.plan.cases[1][0])
    run.in_turns()
    rows = {row.name: row for row in run.report.rows}
    for name, row in rows.items():
        assert row.ours, name
        assert bool(row.theirs) is (name != "decode, 3 rows at 24"), name
    assert list(run.budget.left_out) == ["decode, 3 rows at 24, transformers"]
    assert asked.theirs.count("closed") == 1 + 3


def test_the_longest_kernels_are_those_of_most_time_however_often_they_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = {"often": [1000] * 3, "long": [5000], "short": [1000]}
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for name, times in ran.items()
        for us in times
    ]
    monkeypatch.setattr(bounds, "computed", lambda *_: events)
    kernels = bounds.longest(torch.device("cpu"), lambda: None, 2)
    assert kernels == [bounds.Kernel("long", 5.0, 1), bounds.Kernel("often", 3.0, 3)]


def test_ours_only_starts_one_engine_and_lists_its_longest_kernels(
    tmp_path: Path, asked: Asked
) -> None:
    run = run_of(tmp_path, ours_only=True)
    run.all("")
    assert asked.theirs == []
    assert asked.ours.count("closed") == 1
    assert asked.ours[-2:] == [(*run.plan.few, run.plan.steps, {}), "closed"]
    assert asked.ours.index("dropped") > asked.ours.index((*run.plan.crowd, run.plan.steps, {}))
    assert not run.budget.left_out
    assert all(row.ours for row in run.report.rows)
    values = {line["name"]: line["value"] for line in lines_of(tmp_path)}
    assert values["kernels, 1 rows at 24"] == [["a product", 2.0, 3.0]]
    many = run.plan.many
    assert values["cuts, 4 rows of 512, top-p, in torch"] == 2.5
    assert values["cuts, 4 rows of 512, top-p, in triton"] == 0.5
    place = asked.ours.index("cuts in triton")
    top_p = program.SAMPLING["top-p"]
    assert (*many, run.plan.steps, top_p) in asked.ours[:place]
    assert asked.ours[place + 2] == (*many, run.plan.steps, top_p)
    assert "decode, 4 rows at 24, top-p, cuts in triton" in values
    assert values["start of the engine"] == {"load": 1.0}
    assert "| a product | 2 | 3 |" in run.report.lines()


def test_a_form_of_cuts_is_timed_by_its_name() -> None:
    assert cuts.milliseconds("torch", 2, 9, torch.device("cpu")) > 0
    with pytest.raises(ValueError, match="cuts: 'cuda' is none of torch, triton"):
        cuts.form("cuda")


def test_only_some_cases_are_measured_and_nothing_else(tmp_path: Path, asked: Asked) -> None:
    run = run_of(tmp_path, brief=True)
    run.plan = run.plan._replace(cases=((3, 24),), rounds=1)
    run.all("")
    assert [row.name for row in run.report.rows] == ["decode, 3 rows at 24"]
    assert asked.ours.count((3, 24, run.plan.steps, {})) == 2
    assert asked.theirs[-1] == "closed"
    run = run_of(tmp_path, brief=True, ours_only=True)
    run.plan = run.plan._replace(cases=((3, 24), (1, 24)))
    run.all("")
    assert [len(row.ours) for row in run.report.rows] == [1, 1]


def test_what_was_left_out_has_a_line(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.budget.tell = run.report.leave_out
    run.budget.run("the rest", 2000, lambda: None)
    (line,) = (line for line in lines_of(tmp_path) if line["name"] == "the rest")
    assert line["ok"] is None
    assert "s are left, it needs about 2000" in line["error"]


def test_the_fastest_of_their_settings_that_run_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"its own choice": 5.0, "graphs and asynchronous": 3.0, "compiled at level 2": 1.0}
    tried, closed = theirs.candidates(2), list[Any]()

    class Fake:
        attention = "sdpa"

        def __init__(self, _model: Any, _sizes: Any, settings: Any) -> None:
            (self.name,) = (name for name, given in tried.items() if given == settings)
            if self.name in failing:
                raise RuntimeError("out of memory")

        def decode(self, _rows: int, _context: int, steps: int) -> list[float]:
            return [took[self.name]] * steps

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(theirs, "Theirs", Fake)
    failing = {"compiled at level 2"}
    name, said = theirs.best(None, Sizes(((1, 2),), 3), 1, 2, 3, tried)
    assert name == "graphs and asynchronous"
    assert "its own choice: 5.00 ms on sdpa" in said
    assert "compiled at level 2: RuntimeError: out of memory" in said
    assert closed == list(tried)[:2]
    failing.clear()
    assert theirs.best(None, Sizes(((1, 2),), 3), 1, 2, 3, tried)[0] == "compiled at level 2"
    assert list(theirs.candidates(0)) == list(tried)[:2]
    assert tried["compiled at level 2"]["default_compile_level"] == 2
    failing |= set(tried)
    with pytest.raises(RuntimeError, match="its own choice: RuntimeError"):
        theirs.best(None, Sizes(((1, 2),), 3), 1, 2, 3, tried)


def test_time_that_several_cover_counts_once() -> None:
    assert bounds.covered([(5, 7), (0, 2), (1, 3), (1, 2), (6, 6.5)]) == (5, 7)
    assert bounds.covered([]) == (0, 0)


def test_only_steps_in_which_all_rows_decode_count() -> None:
    """The second row starts at 3; the first ends at 12."""
    first = [float(at) for at in range(13)]
    second = [3.0 + at for at in range(13)]
    taken = theirs.steps_together([first, second], 5)
    assert taken == [1000.0] * 5
    for times in ([first, second], [second, first]):
        with pytest.raises(RuntimeError, match="in 5 steps of 6"):
            theirs.steps_together(times, 6)


def report() -> Report:
    made = Report("a GPU", "a <shape>", "bfloat16")
    row = made.row("decode", "ms a step", 4.0)
    row.ours, row.theirs = [8.0, 5.0, 6.0], [12.0, 15.0]
    prompts = made.row("prompts", "TFLOP/s", 800.0, more=True)
    prompts.ours, prompts.theirs = [600.0], [300.0]
    made.row("alone", "ms a step", 4.0).ours.append(40.0)
    made.cold["load"] = 1.5
    made.left_out = {"vLLM": "not here"}
    return made


def test_rows_say_how_near_the_bound_and_how_many_times_as_fast() -> None:
    decode, prompts, alone = report().rows
    assert decode.ratio == pytest.approx(2.45), "of the last rounds of both"
    assert decode.share == 4 / 6
    assert (prompts.ratio, prompts.share) == (2.0, 0.75)
    assert (alone.ratio, alone.share) == (None, 0.1)
    assert Row("none", "ms", bound=1.0).share is None


def test_the_table_has_every_row_the_start_and_what_was_left_out() -> None:
    text = "\n".join(report().lines())
    assert "| decode, ms a step | 6 (5 to 8) | 13.5 (12 to 15) | 2.45 | 67% of 4 |" in text
    assert "| prompts, TFLOP/s | 600 (600 to 600) | 300 (300 to 300) | 2.00 | 75% of 800 |" in text
    assert "| load | 1.50 |" in text
    assert "left out: vLLM: not here" in text
    assert "torch " in text
    assert "python3 -m benchmarks.gpu" in text


def test_bars_are_shares_of_the_bound_and_longer_is_faster() -> None:
    root = ET.fromstring("\n".join(picture.draw(report())))
    bars = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    widths = [float(one.attrib["width"]) / picture.WIDTH for one in bars]
    want = [4 / 6, 4 / 13.5, 0.75, 300 / 800, 0.1]
    assert widths == pytest.approx(want, abs=1e-3)
    assert "a <shape>" in "".join(root.itertext())


def test_the_tiny_shape_is_saved_as_the_large_one_is(tmp_path: Path) -> None:
    size = shapes.save(shapes.TINY, torch.float32, tmp_path)
    made = shapes.make(shapes.TINY, torch.float32, torch.device("cpu"), "eager")
    assert size == models.size(made)
    assert set(files.check(tmp_path).weights["model.safetensors"].tensors) == set(made.state_dict())
